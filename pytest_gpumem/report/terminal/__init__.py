"""What pytest shows in the terminal."""
