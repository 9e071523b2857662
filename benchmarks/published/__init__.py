"""Peaks that others published of real GPUs, and the virtual GPU's of the same steps."""
