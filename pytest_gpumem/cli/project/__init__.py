"""Files that ``gpumem init`` writes into a project."""
