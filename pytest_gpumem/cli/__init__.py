"""The gpumem command: a door. It may import every room but the plugin."""
