"""Subcommands of ``gpumem`` that tell of figures over time, and in other forms."""
