"""``gpumem verify``: measure steps on this machine's GPU, and predict them for it."""
