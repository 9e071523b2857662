"""``gpumem bisect``: which release or commit of a package brought a growth."""
