"""Marks the arguments of Triton kernels as unknown if a program launches the kernels itself.

Kernels that an operator launches (PyTorch's own, in torch._native) need no tracking: the operator
declares what it writes.

The virtual GPU cannot track where other kernels outside of PyTorch write: after such a launch all
values are unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.virtual.compilation.compiled_values import current_mode
from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Iterator

LAUNCHES: Final = Patch(
    "triton.runtime.jit",
    "JITFunction.run",
    reason="after a kernel that a program launches, only the values of its arguments are unknown",
)
MIN_ADDRESS: Final = 1 << 40
"""smallest integer that may be an address: sizes and indices are smaller"""


@wrapped_by
def launch_tracked(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Launch a kernel, and mark only its arguments as unknown.

    If an argument may be an address, the native library marks all values as unknown.
    """
    __tracebackhide__ = True
    mode = current_mode()
    # Inside an operator, the operator reports what its kernels write.
    if mode is None or kwargs.get("warmup") or mode.in_operator():
        return run(self, *args, **kwargs)
    mode.host.unknown.kernels.add(getattr(self, "__name__", "one without a name"))
    if mode.running_here.opened is not None:  # a Python operator reports what its kernels write
        return run(self, *args, **kwargs)
    tensors = [*_tensors_in([*args, *kwargs.values()])]
    if any(_is_address(mode, tensor) for tensor in tensors):
        return run(self, *args, **kwargs)
    mode.count(1)
    try:
        return run(self, *args, **kwargs)
    finally:
        mode.count(-1)
        _forget(mode, tensors)


def forget_written(kernel: str, arguments: Any) -> None:
    """Mark a kernel's arguments as unknown.

    Args:
        kernel: name for notes, of a kernel that the program would launch on a GPU.
        arguments: the kernel's arguments, or those of the function that would launch it.
    """
    mode = current_mode()
    if mode is not None:
        mode.host.unknown.kernels.add(kernel)
        _forget(mode, _tensors_in(arguments))


def _forget(mode: Any, tensors: Any) -> None:
    for tensor in tensors:
        if not isinstance(tensor, int) and tensor.is_cuda:
            storage = tensor.untyped_storage()
            mode.forget(storage.data_ptr(), storage.nbytes())


def _tensors_in(arguments: Any) -> Iterator[Any]:
    """Yield the tensors and integers among arguments."""
    import torch

    for argument in arguments:
        if isinstance(argument, (torch.Tensor, int)):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors_in(argument)
        elif isinstance(getattr(argument, "base", None), torch.Tensor):  # a descriptor, a wrapper
            yield argument.base


def _is_address(mode: Any, argument: Any) -> bool:
    """Return whether an argument may be an address, or a tensor of addresses, to write to."""
    import torch

    if isinstance(argument, int):
        return argument >= MIN_ADDRESS
    if argument.dtype not in {torch.int64, torch.uint64} or not argument.is_cuda:
        return False
    if not argument.numel() or not mode.values.is_known(argument):
        return False
    from pytest_gpumem.devices.virtual.values.host_tensors import over_device_memory

    first = over_device_memory(argument.detach()).view(torch.int64).flatten()[0]
    return int(first) >= MIN_ADDRESS
