"""The gpumem command, an entry point of the package. It may import every room but the plugin."""
