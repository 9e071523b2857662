"""Text that pytest shows in the terminal."""
