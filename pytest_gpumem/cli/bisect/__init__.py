"""``gpumem bisect`` and ``gpumem blame``: which release, commit or edit brought a growth."""
