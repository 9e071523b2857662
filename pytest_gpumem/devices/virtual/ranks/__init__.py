"""Ranks of torch.distributed on virtual GPUs: one rank alone, or several in one process each."""
