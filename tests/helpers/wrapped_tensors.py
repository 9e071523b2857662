"""Tensor subclasses that wrap plain tensors, as torchao's optimizer state does."""

from __future__ import annotations


def wrapped(tensor):
    """Wrap a tensor in one without storage, whose shape has four times as many elements."""
    import torch

    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, codes):
            shape = (4 * codes.numel(),)
            return torch.Tensor._make_wrapper_subclass(
                cls, shape, dtype=codes.dtype, device=codes.device
            )

        def __init__(self, codes):
            self.codes = codes

        def __tensor_flatten__(self):
            return ["codes"], None

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(str(func))

    return Wrapped(tensor)
