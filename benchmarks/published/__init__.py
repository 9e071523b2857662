"""Compare peaks on real GPUs that others published with the virtual GPU's for the same steps."""
