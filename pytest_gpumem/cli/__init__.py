"""The gpumem command, an entry point of the package. It may import every package but the plugin."""
