"""``gpumem bisect`` and ``gpumem blame``: find the release or the edit that caused a growth."""
