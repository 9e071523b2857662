"""Tensors behind a tensor: those that a subclass wraps (DTensor, torchao's), and its gradient."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

MAX_DEPTH = 8
"""wrappers in wrappers; a class that gives itself would never end"""


def place_of(tensor: Tensor) -> tuple[int, int]:
    """Return the device of a tensor's storage and its address; 0 where it has none.

    A subclass is not asked: that of a lazy module's parameters refuses, and further ones note each
    call. That of a compiler's tensors has no memory, and torch 2.10 and older warn where it is
    asked for.
    """
    import torch

    if type(tensor).__name__ == "FakeTensor":
        return tensor.get_device(), 0
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return tensor.get_device(), tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            return tensor.get_device(), 0


def gradient_of(tensor: Tensor) -> Tensor | None:
    """Return a tensor's ``.grad``: see :func:`gradients_of`."""
    return gradients_of([tensor])[0]


def gradients_of(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return ``.grad`` of each; PyTorch warns where that of another node's result is read."""
    return [
        tensor.grad if tensor is not None and (tensor.is_leaf or tensor.retains_grad) else None
        for tensor in tensors
    ]


def plain_tensors(tensor: Tensor, depth: int = MAX_DEPTH) -> Iterator[Tensor]:
    """Yield the tensors with the storage of a tensor: itself, or those that its class wraps.

    ``__tensor_flatten__`` names them, as torch.compile asks for them (see
    torch/utils/_python_dispatch.py).
    """
    import torch

    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None or not depth:
        yield tensor
        return
    try:
        names, _ = flatten(tensor)
        parts = [getattr(tensor, name) for name in names]
    except Exception:  # noqa: BLE001 - a foreign class's code, which is not what is tested
        parts = []
    for part in parts:
        if isinstance(part, torch.Tensor):
            yield from plain_tensors(part, depth - 1)


def live_tensors() -> list[Tensor]:
    """Return the CUDA tensors that are Python objects; callers drop the list at once."""
    import torch

    # type(), not isinstance: that asks __class__, which a lazy object answers by waking up.
    tensors = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), torch.Tensor) and candidate.is_cuda
    ]
    return [tensor for tensor in tensors if place_of(tensor)[1]]
