"""Ranks of torch.distributed on virtual GPUs: one alone, or several as processes."""
