"""PyTorch's version, for operators that have had other results or made other copies."""

from __future__ import annotations

from typing import Final

import torch

TORCH: Final = tuple(map(int, torch.__version__.split(".")[:2]))
"""PyTorch's version: (2, 15)"""
