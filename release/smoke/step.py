"""A program, likewise."""

import torch

torch.nn.Linear(1024, 1024, device="cuda")
