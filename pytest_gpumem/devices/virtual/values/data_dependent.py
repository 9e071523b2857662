"""The bytes that operators' CUDA code reads back from the device.

Most of these operators have outputs whose sizes depend on values. Their CUDA code reads a size with
a small copy from memory that its kernels wrote. ValueMode computes the operator on the host first,
and queues the bytes of these copies in order; PyTorch's own code then allocates its own temporary
memory, and outputs of the true size.

Which copies an operator makes is in PyTorch's source (aten/src/ATen/native) and was observed at run
time with torch 2.14 and 2.15; functions below say where torch 2.6 to 2.13 differ. If versions
copy the same number in different sizes, the entry is a tuple with the bytes for each size. Another
version may make other copies: the native library uses no queued bytes for a copy of another size,
and reports it.
tests/tables/operators-that-read-back.md lists all.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from pytest_gpumem.devices.virtual.values.host_tensors import over_device_memory
from pytest_gpumem.devices.virtual.values.operator_table import TORCH, copies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.devices.virtual.values.operator_table import Answer, Arguments

MAX_CUB_ELEMENTS: Final = (1 << 31) - 1
"""number of elements from which nonzero works in chunks (Nonzero.cu), and thrust's indices have 8
bytes"""
MAX_MODE_SORTED: Final = 2048
"""number of elements in the largest slice whose mode one kernel finds (TensorModeKernel.cu)"""
CHUNK: Final = 1 << 30
"""elements per chunk of nonzero"""
BYTE_MASKS: Final = (torch.bool, torch.uint8)
"""dtypes of index tensors that PyTorch treats as masks"""


def _int32(*numbers: int) -> bytes:
    return struct.pack(f"={len(numbers)}i", *numbers)


def _int64(number: int) -> bytes:
    return struct.pack("=q", number)


def _content(tensor: Tensor) -> bytes:
    """Return the bytes of a host tensor's elements."""
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def _count_of_true(mask: Tensor, count: int) -> list[bytes]:
    """Return the copies by which nonzero reads that ``mask`` has ``count`` true values."""
    if mask.numel() < MAX_CUB_ELEMENTS:
        return [_int32(count)]
    chunks = -(-mask.numel() // CHUNK)  # one count per chunk; PyTorch adds them up
    counts = [min(CHUNK, max(count - at * CHUNK, 0)) for at in range(chunks)]
    return [_int32(*counts)]


# Each function returns the bytes of the copies, in order; its docstring names the numbers in them.
# It receives the host's result and the CUDA call's arguments by name. If values are unknown, the
# result is None, and ``share`` is the part of a mask that is true: functions registered with
# ``bounded`` then return the copies of the upper bound.


# -- nonzero, and what contains it --


@copies("aten::nonzero", bounded=True)
def nonzero_copies(result: Tensor | None, args: Arguments) -> list[bytes]:
    """Return the number of values that are not zero."""
    count = _number_of_true(args.self, args) if result is None else result.shape[0]
    return _count_of_true(args.self, count)


copies("aten::masked_select")(lambda _, args: _selected(args.self, args))
copies("aten::masked_scatter_backward")(lambda _, args: _selected(args.grad_output, args))


def _selected(values: Tensor, args: Arguments) -> list[bytes]:
    """Return the number of true values of the expanded mask."""
    expanded = torch.broadcast_tensors(values, args.mask)[1]
    repeated = expanded.numel() // args.mask.numel() if args.mask.numel() else 0
    return _count_of_true(expanded, _number_of_true(args.mask, args) * repeated)


def _bound(count: int, args: Arguments) -> int:
    """Return how many of ``count`` unknown elements to assume to be selected: at least one."""
    return count if args.share is None else max(1, int(count * args.share))


def _number_of_true(mask: Tensor, args: Arguments) -> int:
    """Return the number of true values of a mask; of an unknown mask, ``share`` of all."""
    if args.share is None:
        return int(over_device_memory(mask).count_nonzero())
    return int(mask.numel() * args.share)


@copies("torchvision::nms", bounded=True)
def nms_copies(result: Tensor | None, args: Arguments) -> Sequence[Answer]:
    """Return how many boxes remain: torchvision selects them with a mask over all boxes.

    Before 0.22 it copies which boxes each box suppresses, ordered by score, and selects on the
    host; zeros mean that all remain.
    """
    boxes: Tensor = args.dets
    if not boxes.numel():
        return []
    if TORCH >= (2, 7):  # which has torchvision 0.22
        count = _bound(boxes.shape[0], args) if result is None else result.shape[0]
        return _count_of_true(boxes[:, 0], count)
    if result is None:
        return []
    order = over_device_memory(args.scores).argsort(stable=True, descending=True)
    bits = 0  # the first box remains: let it suppress all others that do not remain
    for place in (~torch.isin(order, result)).nonzero().flatten().tolist():
        bits |= 1 << place
    row = -(-len(order) // 64) * 8
    return [bits.to_bytes(row, "little") + bytes(row * (len(order) - 1))]


@copies("aten::index")
def index_copies(_result: object, args: Arguments) -> list[bytes]:
    """Return the number of true values of each mask, which ``expandTensors`` reads."""
    return [
        copy
        for index in args.indices
        if index is not None and index.dtype in BYTE_MASKS and index.is_cuda
        for copy in _count_of_true(index, _number_of_true(index, args))
    ]


@copies("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
def index_put_copies(result: object, args: Arguments) -> list[bytes]:
    """Return the numbers that ``index`` reads back; none if PyTorch calls masked_fill instead.

    ``canDispatchToMaskedFill`` decides that.
    """
    defined = [index for index in args.indices if index is not None]
    is_one_mask = len(defined) == 1 and defined[0].dtype in BYTE_MASKS
    is_host_value = args.values.numel() == 1 and args.values.device.type == "cpu"
    is_here = is_one_mask and defined[0].device == args.self.device
    return [] if is_here and is_host_value and not args.accumulate else index_copies(result, args)


# -- unique --


def _number_of_unique(unique: Tensor | None, values: Tensor, args: Arguments) -> list[bytes]:
    """Return the number of unique values; for a mask, the number of true values."""
    if not values.numel():
        return []
    if values.dtype != torch.bool:
        return [_int64(_bound(values.numel(), args) if unique is None else unique.shape[0])]
    if unique is None or unique.shape[0] == 2:  # noqa: PLR2004 - false and true
        return [_int32(1)]  # some values are true: the kernels count them
    return [_int32(values.numel() if bool(unique[0]) else 0)]


copies("aten::_unique", "aten::_unique2", bounded=True)(
    lambda result, args: _number_of_unique(result[0] if result else None, args.self, args)
)


@copies("aten::unique_dim", "aten::unique_dim_consecutive", bounded=True)
def unique_dim_copies(result: Sequence[Tensor] | None, args: Arguments) -> Sequence[Answer]:
    """Return the number of unique slices.

    Before torch 2.15 the number has 4 bytes. Since then it has 8, but still 4 if counts are
    requested and there are at most 2^31 slices.
    """
    count = result[0].shape[args.dim] if result else _bound(args.self.shape[args.dim], args)
    return [(_int32(count), _int64(count))] if args.self.numel() else []


@copies("aten::unique_consecutive", bounded=True)
def unique_consecutive_copies(result: Sequence[Tensor] | None, args: Arguments) -> Sequence[Answer]:
    """Return the number of unique values, or of unique slices."""
    if args.dim is not None:
        return unique_dim_copies(result, args)
    values: Tensor = args.self
    count = result[0].numel() if result else _bound(values.numel(), args)
    return [_int64(count)] if values.numel() else []


@copies("aten::isin", bounded=True)
def isin_copies(result: object, args: Arguments) -> list[bytes]:
    """Return the counts of unique values in both tensors; none if PyTorch does not sort them.

    ``isin_Tensor_Tensor_out`` decides that.
    """
    both = args.get("elements"), args.get("test_elements")
    elements, tests = both
    if elements is None or tests is None or args.assume_unique or not elements.numel():
        return []
    if tests.numel() < int(10 * elements.numel() ** 0.145):
        return []
    hosts = both if result is None else map(over_device_memory, both)
    uniques = ((None if result is None else host.unique(), host) for host in hosts)
    return [copy for unique, host in uniques for copy in _number_of_unique(unique, host, args)]


@copies("aten::_coalesce", bounded=True)
def coalesce_copies(_result: object, args: Arguments) -> list[bytes]:
    """Return the number of unique indices, a result of thrust's unique_by_key."""
    sparse: Tensor = args.self
    if sparse._nnz() <= 1:
        return []
    if args.share is not None:
        return [_int32(_bound(sparse._nnz(), args))]
    indices = over_device_memory(sparse._indices())
    return [_int32(indices.unique(dim=1).shape[1] if indices.numel() else 1)]


# -- counts --


@copies("aten::bincount")
def bincount_copies(_result: object, args: Arguments) -> list[bytes]:
    """Return the minimum and the maximum; for uint8 only the maximum is read."""
    if not args.self.numel():
        return []
    host = over_device_memory(args.self)
    greatest = [_content(host.max())]
    return greatest if host.dtype == torch.uint8 else [_content(host.min()), *greatest]


@copies("aten::histc")
def histc_copies(_result: object, args: Arguments) -> list[bytes]:
    """Return the minimum and the maximum, which are read if no range is given."""
    if args.min != args.max or not args.self.numel():
        return []
    host = over_device_memory(args.self)
    return [_content(host.min()), _content(host.max())]


@copies("aten::repeat_interleave", bounded=True)
def repeat_interleave_copies(result: Tensor | None, args: Arguments) -> Sequence[Answer]:
    """Return the sum of the repeats, and the check that none is negative (Repeat.h).

    The check reads the minimum; before torch 2.15 a flag, which is true because the host raised no
    error. Repeats have no upper bound: unknown ones are assumed to be 1.
    """
    repeats: Tensor = args.repeats
    if args.output_size is not None or not repeats.shape[0]:
        return []
    if result is None:
        return [_int64(_bound(repeats.shape[0], args)), (bytes([True]), bytes(repeats.itemsize))]
    least = _content(over_device_memory(repeats).min())
    return [_int64(result.shape[0]), (bytes([True]), least)]


@copies("aten::mode", bounded=True)
def mode_copies(result: object, args: Arguments) -> list[bytes]:
    """Return thrust's results for each slice too large for a single kernel.

    Unknown slices are assumed to have distinct values.
    """
    values, dim = args.self, args.dim
    if not values.dim() or values.shape[dim] <= MAX_MODE_SORTED:
        return []
    length = values.shape[dim]
    if result is None:
        slices: int = values.numel() // length
        return _mode_of(values.dtype, 0, bytes(values.itemsize), 0, length, 1, 0) * slices
    answers = []
    for line in over_device_memory(values).movedim(dim, -1).reshape(-1, length):
        mode, place = line.mode()
        unique, counts = line.unique(return_counts=True)
        highest = int(counts.argmax())
        true = int(line.sum()) if line.dtype == torch.bool else 0
        numbers = len(unique), int(counts[highest]), highest
        answers += _mode_of(line.dtype, true, _content(mode), int(place), *numbers)
    return answers


def _mode_of(
    kind: torch.dtype, true: int, mode: bytes, place: int, count: int, frequency: int, highest: int
) -> list[bytes]:
    """Return thrust's results for a slice.

    For a mask: the number of true values, and the index of the more frequent one. For numbers: how
    often sorted neighbors differ, the number of values, and the mode's index among the distinct
    values, with its frequency; then the mode, its index in sorted order, and its index in the
    slice.
    """
    if kind == torch.bool:
        return [_int64(true), struct.pack("=?7xq", True, place)]
    largest = _int64(frequency) + _int64(highest)
    first = struct.pack("=?7xq", True, 0)
    return [_int32(count - 1), _int32(count), largest, mode, first, _int64(place)]


# -- comparisons, checks --


@copies("aten::equal")
def equal_copies(result: bool, args: Arguments) -> list[bytes]:
    """Return the result as one byte; [] if PyTorch compares no elements.

    It compares none of tensors that are empty, differ in shape, or are the same memory.
    """
    left, right = args.self, args.other
    if left.shape != right.shape or not left.numel():
        return []
    is_same = (
        left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
        and left.stride() == right.stride()
    )
    return [] if is_same else [bytes([result])]


copies("aten::allclose")(lambda result, _: [bytes([result])])
# lstsq reads an error flag, which is false: on an error, computing on the host would have raised
copies("aten::linalg_lstsq")(lambda result, _: [bytes([False])] if result[0].numel() else [])


@copies("aten::_linalg_eigh", "aten::linalg_matrix_sqrth")
def no_error_copies(_result: object, args: Arguments) -> list[bytes]:
    """Return an error flag, which is false: on an error, the host would have raised."""
    return [bytes([False])] if _matrices(args).numel() else []


@copies("aten::_linalg_svd", "aten::linalg_polar")
def svd_copies(_result: object, args: Arguments) -> list[bytes]:
    """Return each matrix's status (not with ``gesvd``), and whether any of them is an error."""
    matrices = _matrices(args)
    if not matrices.numel():
        return []
    of_all = [bytes([False])]
    if args.get("driver") == "gesvd":
        return of_all
    return [bytes(4 * matrices.shape[:-2].numel()), *of_all]


def _matrices(args: Arguments) -> Tensor:
    matrices: Tensor | None = args.get("A")
    return args.self if matrices is None else matrices


copies("aten::linalg_pinv")(  # copies of its decomposition: eigh or svd
    lambda result, args: (no_error_copies if args.hermitian else svd_copies)(result, args)
)


copies("aten::_linalg_check_errors")(  # whether any status is an error
    lambda _, args: [bytes([bool(over_device_memory(args.info).any())])]
)


@copies("aten::linalg_eig")
def eig_copies(_result: object, args: Arguments) -> list[bytes]:
    """Return whether all elements are finite, and a flag for no error (two if they are real).

    Before torch 2.10 MAGMA does the rest, on matrices in host memory.
    """
    host = over_device_memory(args.self)
    finite = bytes([bool(host.isfinite().all())])
    if TORCH < (2, 10):
        return [finite, _content(host)]
    return [finite, *[bytes([False])] * (1 if host.is_complex() else 2)]


MAX_SCALED_NORM: Final = {torch.float32: 3.010066362817634, torch.float64: 1.090863719290036}
"""largest 1-norm for PyTorch's approximation of degree 18: above it, PyTorch halves the matrix and
squares the result (Bader, Blanes and Casas 2019, "Computing the matrix exponential with an
optimized Taylor polynomial approximation")"""
MIN_FULL_DEGREE_NORM: Final = {torch.float32: 1.461661507209034, torch.float64: 0.299615891381135}
"""smallest 1-norm of a single matrix for which PyTorch uses degree 18; for several matrices it
always does"""


@copies("aten::linalg_matrix_exp", bounded=True)
def matrix_exp_copies(result: object, args: Arguments) -> list[bytes]:
    """Return the norm of one matrix, or how often each of several matrices is squared.

    For several: the number of distinct counts of squarings; how many matrices have each count; and
    by how many squarings it exceeds the previous count. Unknown matrices are all squared twice,
    which needs the most memory.
    """
    matrices: Tensor = args.self
    if not matrices.numel() or matrices.shape[-1] == 1:
        return []
    if result is None:
        number = matrices.shape[:-2].numel()
        norm = [_content(torch.full((1,), 10.0, dtype=matrices.dtype.to_real()))]
        return [*norm * (number == 1), _int64(1), _content(torch.tensor([number, 2]))]
    norms = over_device_memory(matrices).abs().sum(-2).amax(-1).flatten()
    alone = [] if len(norms) > 1 else [_content(norms)]
    if alone and not float(norms) >= MIN_FULL_DEGREE_NORM[norms.dtype]:
        return alone
    squarings = (norms / MAX_SCALED_NORM[norms.dtype]).log2().ceil().clamp(min=0)
    steps, matrices_of = squarings.sort().values.long().unique_consecutive(return_counts=True)
    more = steps.clamp(min=0).diff(prepend=steps.new_zeros(1))
    return [*alone, _int64(len(steps)), _content(torch.cat([matrices_of, more]))]


copies("aten::_ctc_loss")(lambda *_: [])  # tagged data-dependent, but it reads nothing back


@copies("aten::segment_reduce")
def segment_reduce_copies(_result: object, args: Arguments) -> list[bytes]:
    """Return the minimum length, and whether lengths add up; an unsafe call skips both checks."""
    if args.lengths is None or args.unsafe or not args.data.numel():
        return []
    return [_content(over_device_memory(args.lengths).min()), bytes([True])]


INDEXING: Final = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""operators that take masks or integers, and read back only the size of masks"""


def masks_of(name: str, args: Sequence[Any]) -> list[Tensor] | None:
    """Return the device masks if they alone determine an operator's sizes, else None.

    For ``_coalesce`` they are the indices.

    Args:
        name: the operator's name, with its namespace.
        args: arguments of its call.
    """
    if name in {"aten::masked_select", "aten::masked_scatter_backward"}:
        return [args[1]]
    if name == "aten::nonzero" and args[0].dtype == torch.bool:
        return [args[0]]
    if name == "aten::_coalesce":
        return [args[0]._indices()]
    if name not in INDEXING:
        return None
    indices = (index for index in args[1] if index is not None)
    return [index for index in indices if index.dtype in BYTE_MASKS and index.is_cuda]


def selection_of(name: str, args: Sequence[Any], result: Any) -> tuple[int, int] | None:  # noqa: ANN401 - an operator's
    """Return how many rows or elements an operator selected, and of how many.

    The result is None if it did not select by values.

    Args:
        name: the operator's name, with its namespace.
        args: arguments of its call.
        result: the CUDA operator's result.
    """
    if name == "aten::nonzero":
        return result.shape[0], args[0].numel()
    if name == "aten::masked_select":
        return result.numel(), torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    if name == "torchvision::nms":
        return result.numel(), args[0].shape[0]
    masks = masks_of(name, args)
    if name != "aten::index" or not masks or sum(index is not None for index in args[1]) > 1:
        return None
    place = next(place for place, index in enumerate(args[1]) if index is not None)
    return result.shape[place], masks[0].numel()
