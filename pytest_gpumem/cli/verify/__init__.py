"""``gpumem verify``: measure steps on a GPU, and check the virtual GPU's predictions."""
