"""``gpumem verify``: steps measured on this machine's GPU, and predicted for it."""
