"""Ranks of torch.distributed on virtual GPUs: one rank alone, or several, each in a process."""
