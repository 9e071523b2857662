"""CPU tensors over the bytes of device memory, and operator calls with such arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

HOST: Final = torch.device("cpu")
PLAIN: Final = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""types of tensors whose data pointer is the address of their values; others may be wrappers"""
NUMBERS: Final = {bool, int, float, complex}


def available_memory() -> int:
    """Return the bytes of host memory that are free or can be freed."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain strided one, on a device with memory.

    A wrapper subclass (DTensor, a fake tensor) has no values of its own: the tensors that it wraps
    pass through the dispatcher themselves. Other subclasses (MONAI's MetaTensor) have values.
    """
    return (
        (type(tensor) in PLAIN or _holds_memory_itself(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor._is_zerotensor()
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _holds_memory_itself(tensor: Tensor) -> bool:
    """Return whether a tensor of a subclass wraps no other, and is no lazy module's parameter."""
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return not is_wrapper and not torch.nn.parameter.is_lazy(tensor)


COMPRESSED: Final = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices),
}
"""sparse layouts, and the methods that return a tensor's two index tensors"""


def is_sparse(tensor: Tensor) -> bool:
    """Return whether a tensor consists of index tensors and a tensor of values."""
    return tensor.layout is torch.sparse_coo or tensor.layout in COMPRESSED


def indices_of(tensor: Tensor) -> Sequence[Tensor]:
    """Return a sparse tensor's index tensors."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices()]
    return [get(tensor) for get in COMPRESSED[tensor.layout]]


def parts_of(tensor: Tensor) -> Sequence[Tensor]:
    """Return the tensors that make up a sparse or nested tensor; for a strided one, itself."""
    if tensor.is_nested:
        return [tensor.values()]
    if is_sparse(tensor):
        is_coo = tensor.layout is torch.sparse_coo
        return [*indices_of(tensor), tensor._values() if is_coo else tensor.values()]
    return [tensor] if tensor.layout is torch.strided and not tensor._is_zerotensor() else []


def extents_of(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the start and end addresses of the parts of device tensors."""
    for tensor in tensors:
        for part in parts_of(tensor):
            if part.is_cuda:
                yield part.data_ptr(), part.data_ptr() + span(part)


def of_parts(tensor: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return a sparse tensor like ``tensor`` with these parts; for a plain one, the only part."""
    if tensor.layout is torch.sparse_coo:
        result: Tensor = torch.ops.aten._sparse_coo_tensor_unsafe(*parts, tensor.shape)
        result = result._coalesced_(tensor.is_coalesced())
    elif tensor.layout in COMPRESSED:
        options = {"dtype": tensor.dtype, "layout": tensor.layout}
        result = torch.ops.aten._sparse_compressed_tensor_unsafe(*parts, tensor.shape, **options)
    else:
        result = parts[0]
    return result


class _Native:
    """Stores the native library's version of ``over_device_memory``, once it is prepared."""

    over: Callable[[Tensor], Tensor | None] | None = None


NATIVE: Final = _Native()


def over_device_memory(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over a CUDA tensor's addresses, with its dtype, sizes and strides.

    It does not keep the CUDA tensor alive, and must not outlive it. A CPU tensor is returned
    unchanged.
    """
    if not tensor.is_cuda:
        return tensor
    if NATIVE.over is not None and not tensor.is_neg():
        host = NATIVE.over(tensor)
        if host is not None:
            return host
    size, strides = tensor.shape, tensor.stride()
    itemsize = tensor.element_size()
    nbytes = span(tensor)
    if not nbytes:
        return torch.empty_strided(size, strides, dtype=tensor.dtype)
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), HOST, nbytes)
    assert nbytes % itemsize == 0  # noqa: S101 - a span counts elements
    host = torch.empty(0, dtype=tensor.dtype)
    host.set_(storage, 0, size, strides)
    if tensor.is_conj():
        host = torch._conj(host)
    if tensor.is_neg():
        host = torch._neg_view(host)
    return host


def span(tensor: Tensor) -> int:
    """Return the bytes from the first element of a strided tensor to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 0:
            return 0
        elements += (size - 1) * stride
    return elements * tensor.element_size()


def describe(tensor: Tensor) -> tuple[int, ...]:
    """Return the struct ``extent`` of native/base/operator_functions.c for a tensor."""
    if tensor.layout is not torch.strided or tensor.is_nested or not is_plain(tensor):
        return 3, 0, 0, 0, 0, 0
    is_real = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
    kind = 2 if tensor.is_cuda else 1
    return kind, tensor.data_ptr(), tensor.nbytes, span(tensor), is_real, id(tensor.dtype)


def tensors_in(arguments: object) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results, including those in lists."""
    if isinstance(arguments, Tensor):
        return [arguments]
    if not isinstance(arguments, (list, tuple)):
        return []
    tensors: list[Tensor] = []
    for argument in arguments:  # an optimizer's operators have hundreds of tensors
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, (list, tuple)):
            tensors += tensors_in(argument)
    return tensors


def paired(result: object, host: object) -> list[tuple[Tensor, Tensor | None]]:
    """Pair each tensor of a CUDA result with the host's tensor, or None if that is missing."""
    if isinstance(result, Tensor):
        return [(result, host if isinstance(host, Tensor) else None)]
    pairs: list[tuple[Tensor, Tensor | None]] = []
    if isinstance(result, (list, tuple)) and isinstance(host, (list, tuple)):
        for tensor, values in zip(result, host, strict=False):
            pairs += paired(tensor, values)
    return pairs


def mapped(arguments: Any, function: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - any
    """Return arguments with a function applied to each, also in lists, tuples and dicts."""
    if isinstance(arguments, (list, tuple)) and not hasattr(arguments, "_fields"):
        items = [mapped(argument, function) for argument in arguments]
        return items if isinstance(arguments, list) else tuple(items)
    if isinstance(arguments, dict):
        return {name: mapped(argument, function) for name, argument in arguments.items()}
    if isinstance(arguments, slice):
        parts = (arguments.start, arguments.stop, arguments.step)
        return slice(*(mapped(part, function) for part in parts))
    return function(arguments)


def map_arguments(
    arguments: Any,  # noqa: ANN401 - a tuple, a list or a dict
    on_host: Callable[[Tensor], object],
    generator: Callable[[torch.Generator], torch.Generator],
) -> Any:  # noqa: ANN401 - as the arguments
    """Return an operator's arguments, converted for the CPU.

    Args:
        arguments: positional or keyword arguments, which may contain lists.
        on_host: returns the CPU tensor for a device tensor or a host tensor.
        generator: returns the CPU's generator for a GPU's.
    """
    if isinstance(arguments, dict):
        return {
            name: map_arguments([argument], on_host, generator)[0]
            for name, argument in arguments.items()
            if name != "pin_memory"  # a factory's argument: a GPU tensor cannot be pinned
        }
    items: list[Any] = []
    for argument in arguments:
        if argument is None or type(argument) in NUMBERS:
            items.append(argument)
        elif isinstance(argument, Tensor):
            items.append(on_host(argument))
        elif isinstance(argument, (list, tuple)):
            items.append(map_arguments(argument, on_host, generator))
        elif isinstance(argument, torch.device):
            items.append(HOST if argument.type == "cuda" else argument)
        elif isinstance(argument, torch.Generator) and argument.device.type == "cuda":
            items.append(generator(argument))
        else:
            items.append(argument)
    return items if isinstance(arguments, list) else tuple(items)


# -- calls in dtypes that the CPU does not support --


WIDER: Final = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.complex32: torch.complex64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
}
"""dtypes that some CPU operators do not support, and the wider dtypes to compute in instead"""


def in_types_of_the_host(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:  # noqa: ANN401 - as the arguments
    """Call a function of host tensors; in wider dtypes if the CPU does not support theirs.

    A GPU, too, computes in single precision and stores in half. Arguments that the function writes
    keep their own dtypes.
    """
    try:
        return function(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        wide: dict[int, tuple[Tensor, Tensor]] = {}

        def widened(argument: Any) -> Any:  # noqa: ANN401 - any type
            if isinstance(argument, Tensor) and argument.dtype in WIDER:
                copy = argument.to(WIDER[argument.dtype])
                return wide.setdefault(id(argument), (argument, copy))[1]
            if isinstance(argument, (list, tuple)):
                return type(argument)(widened(part) for part in argument)
            if isinstance(argument, torch.dtype):
                return WIDER.get(argument, argument)
            return argument

        wide_args = [widened(argument) for argument in args]
        wide_kwargs = {name: widened(argument) for name, argument in kwargs.items()}
        if not wide:
            raise
        versions = {key: copy._version for key, (_, copy) in wide.items()}
        try:
            result = function(*wide_args, **wide_kwargs)
        except (RuntimeError, NotImplementedError):
            raise error from None
        for key, (argument, copy) in wide.items():
            if copy._version != versions[key]:
                argument.copy_(copy)
        return result
