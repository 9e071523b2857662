"""``gpumem bisect`` and ``gpumem blame``: which release or edit brought a growth."""
