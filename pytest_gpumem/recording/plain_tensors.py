"""Read a tensor's gradient, and the plain tensors that its class (DTensor, torchao) wraps."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from pytest_gpumem.recording.allocator_view import VIEW

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

MAX_DEPTH = 8
"""maximum nesting of wrappers; ends the recursion for a class that flattens to itself"""


def place_of(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's device and its storage's address, which is 0 if there is no storage.

    ``__torch_function__`` of subclasses is bypassed: for parameters of lazy modules it raises, and
    some subclasses record each call. A FakeTensor has no memory, and up to torch 2.10 reading its
    address warns.
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
    """Return a tensor's ``.grad``; None if it has none (see :func:`gradients_of`)."""
    return gradients_of([tensor])[0]


def gradients_of(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return each tensor's ``.grad``, or None.

    A non-leaf tensor without ``retain_grad`` gets None: PyTorch warns if its ``.grad`` is read.
    ``__torch_function__`` of subclasses is bypassed: that of PyTorch's ExpandedWeight raises.
    """
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        return [
            tensor.grad if tensor is not None and (tensor.is_leaf or tensor.retains_grad) else None
            for tensor in tensors
        ]


def plain_tensors(tensor: Tensor, depth: int = MAX_DEPTH) -> Iterator[Tensor]:
    """Yield the tensors that own a tensor's memory: itself, or those that its class wraps.

    ``__tensor_flatten__`` returns the names of the attributes with the wrapped tensors, as for
    torch.compile (see torch/utils/_python_dispatch.py).
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
    """Return the Python objects that are tensors on a measured device.

    The list keeps them alive: callers must drop it at once.
    """
    import torch

    # type(), not isinstance: isinstance reads __class__, which makes a lazy object load itself.
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [
            candidate
            for candidate in gc.get_objects()
            if issubclass(type(candidate), torch.Tensor)
            and candidate.device.type == VIEW.backend.device_type
        ]
    return [tensor for tensor in tensors if place_of(tensor)[1]]
