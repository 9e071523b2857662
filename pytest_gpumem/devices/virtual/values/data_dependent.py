"""Operators whose CUDA code asks the device for figures: the bytes that its copies bring.

Most of these operators have outputs whose sizes depend on values. Their CUDA code learns a size by
a small copy from memory that its kernels wrote. The mode computes the operator on the host first,
and queues the bytes of these copies in their order; PyTorch's own code then takes its own temporary
memory, and outputs of the true size.

Which copies an operator makes is PyTorch's source (aten/src/ATen/native) and was seen at run time
with torch 2.14 and 2.15; functions below say where torch 2.6 to 2.13 make others. Where these ask
for one answer in copies of several sizes, the answer is a tuple of its forms. Another version may
make other copies: the native library takes no queued bytes for a copy of another size and reports
it. tests/tables/operators-that-read-back.md lists all.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from pytest_gpumem.devices.virtual.values.host_tensors import over_device_memory
from pytest_gpumem.devices.virtual.values.operator_table import bound, copies
from pytest_gpumem.devices.virtual.values.torch_release import TORCH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.devices.virtual.values.operator_table import Answer

MAX_CUB_ELEMENTS: Final = (1 << 31) - 1
"""elements from which on nonzero works in chunks (Nonzero.cu), and thrust's indices have 8 bytes"""
MAX_MODE_SORTED: Final = 2048
"""elements of the largest slice of which one kernel finds the mode (TensorModeKernel.cu)"""
CHUNK: Final = 1 << 30
"""elements of such a chunk"""
BYTE_MASKS: Final = (torch.bool, torch.uint8)
"""types of an index tensor that is a mask"""


def _int32(*numbers: int) -> bytes:
    return struct.pack(f"={len(numbers)}i", *numbers)


def _int64(number: int) -> bytes:
    return struct.pack("=q", number)


def _count(number: int) -> tuple[bytes, bytes]:
    """Return a count as 4 and as 8 bytes: as an int32 and as an int64."""
    return _int32(number), _int64(number)


def _content(tensor: Tensor) -> bytes:
    """Return the bytes of a host tensor's elements."""
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def _count_of_true(mask: Tensor, count: int) -> list[bytes]:
    """Return the copy in which nonzero learns that ``mask`` has ``count`` true values."""
    if mask.numel() < MAX_CUB_ELEMENTS:
        return [_int32(count)]
    chunks = -(-mask.numel() // CHUNK)  # a count for each; PyTorch takes their sum
    counts = [min(CHUNK, max(count - at * CHUNK, 0)) for at in range(chunks)]
    return [_int32(*counts)]


# -- nonzero, and what contains it --


@copies("aten::nonzero")
def nonzero_copies(
    result: Tensor | None, values: Tensor, *, share: float | None = None, **_options: object
) -> list[bytes]:
    """Return the number of values that are not zero."""
    count = _number_of_true(values, share) if result is None else result.shape[0]
    return _count_of_true(values, count)


@bound("aten::nonzero")
def nonzero_bound(values: Tensor, **_options: object) -> list[bytes]:
    """Return that no value is zero."""
    return _count_of_true(values, values.numel())


@copies("aten::masked_select")
def masked_select_copies(
    _result: object, values: Tensor, mask: Tensor, *, share: float | None = None, **_options: object
) -> list[bytes]:
    """Return the number of true values of the mask, as expanded."""
    expanded = torch.broadcast_tensors(values, mask)[1]
    repeated = expanded.numel() // mask.numel() if mask.numel() else 0
    return _count_of_true(expanded, _number_of_true(mask, share) * repeated)


@copies("torchvision::nms")
def nms_copies(
    result: Tensor, boxes: Tensor, scores: Tensor, *_options: object
) -> Sequence[Answer]:
    """Return how many boxes stay: torchvision selects them by a mask of all.

    Before 0.22 it copies which boxes each one suppresses, by scores, and selects on the host.
    """
    if not boxes.numel():
        return []
    if TORCH >= (2, 7):  # and so torchvision 0.22
        return _count_of_true(boxes[:, 0], result.shape[0])
    order = over_device_memory(scores).argsort(stable=True, descending=True)
    bits = 0  # the first one stays: let it suppress all that do not
    for place in (~torch.isin(order, result)).nonzero().flatten().tolist():
        bits |= 1 << place
    row = -(-len(order) // 64) * 8
    return [bits.to_bytes(row, "little") + bytes(row * (len(order) - 1))]


@bound("torchvision::nms")
def nms_bound(boxes: Tensor, *_options: object) -> list[bytes]:
    """Return that all boxes stay; before torchvision 0.22, zeros say so."""
    has_count = boxes.numel() and TORCH >= (2, 7)
    return _count_of_true(boxes[:, 0], boxes.shape[0]) if has_count else []


def _masks(indices: Sequence[Tensor | None], share: float | None) -> list[bytes]:
    """Return the copies of an index with masks, one for each: PyTorch's expandTensors."""
    return [
        copy
        for index in indices
        if index is not None and index.dtype in BYTE_MASKS and index.is_cuda
        for copy in _count_of_true(index, _number_of_true(index, share))
    ]


def _number_of_true(mask: Tensor, share: float | None) -> int:
    """Return how many values of a mask are true: this share; None: the mask tells."""
    return int(over_device_memory(mask).count_nonzero() if share is None else mask.numel() * share)


@copies("aten::index")
def index_copies(
    _result: object,
    _values: Tensor,
    indices: Sequence[Tensor | None],
    *,
    share: float | None = None,
    **_options: object,
) -> list[bytes]:
    """Return the number of true values of each mask."""
    return _masks(indices, share)


@copies("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
def index_put_copies(
    _result: object,
    target: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    _unsafe: bool = False,
    *,
    share: float | None = None,
) -> list[bytes]:
    """Return none where PyTorch fills by the mask instead: canDispatchToMaskedFill."""
    defined = [index for index in indices if index is not None]
    is_one_mask = len(defined) == 1 and defined[0].dtype in BYTE_MASKS
    is_host_value = values.numel() == 1 and values.device.type == "cpu"
    if is_one_mask and is_host_value and not accumulate and defined[0].device == target.device:
        return []
    return _masks(indices, share)


# -- unique --


@copies("aten::_unique", "aten::_unique2")
def unique_copies(result: Sequence[Tensor], values: Tensor, *_options: object) -> list[bytes]:
    """Return the number of unique values; of a mask, how many of its values are true."""
    if not values.numel():
        return []
    if values.dtype != torch.bool:
        return [_int64(result[0].shape[0])]
    if result[0].shape[0] == 2:  # noqa: PLR2004 - false and true
        return [_int32(1)]  # some are true: the kernels count how many
    return [_int32(values.numel() if bool(result[0][0]) else 0)]


@copies("aten::unique_dim", "aten::unique_dim_consecutive")
def unique_dim_copies(
    result: Sequence[Tensor], values: Tensor, dim: int, *_options: object, **_more: object
) -> Sequence[Answer]:
    """Return the number of unique slices.

    It has 8 bytes since torch 2.15, but for up to 2^31 slices whose counts are wanted: 4.
    """
    return [_count(result[0].shape[dim])] if values.numel() else []


@copies("aten::unique_consecutive")
def unique_consecutive_copies(
    result: Sequence[Tensor],
    values: Tensor,
    _return_inverse: bool = False,
    _return_counts: bool = False,
    dim: int | None = None,
) -> Sequence[Answer]:
    """Return the number of unique values, or of unique slices."""
    if dim is not None:
        return unique_dim_copies(result, values, dim)
    return [_int64(result[0].shape[0])] if values.numel() else []


@bound("aten::_unique", "aten::_unique2")
def unique_bound(values: Tensor, *_options: object, **_more: object) -> Sequence[Answer]:
    """Return that all values differ; of a mask, that both truth values are there."""
    if values.dtype == torch.bool:
        return [_int32(1)] if values.numel() else []
    return unique_consecutive_bound(values)


@bound("aten::unique_dim", "aten::unique_dim_consecutive")
def unique_dim_bound(
    values: Tensor, dim: int, *_options: object, **_more: object
) -> Sequence[Answer]:
    """Return that all slices differ."""
    return unique_dim_copies([values], values, dim)


@bound("aten::unique_consecutive")
def unique_consecutive_bound(
    values: Tensor,
    _return_inverse: bool = False,
    _return_counts: bool = False,
    dim: int | None = None,
) -> Sequence[Answer]:
    """Return that all neighbours differ."""
    if dim is not None:
        return unique_dim_bound(values, dim)
    return [_int64(values.numel())] if values.numel() else []


@copies("aten::isin")
def isin_copies(_result: object, *arguments: object, **options: bool) -> list[bytes]:
    """Return unique's counts of both tensors, where PyTorch sorts."""
    hosts = map(over_device_memory, _sorted_by_isin(*arguments, **options))
    return [copy for host in hosts for copy in unique_copies(host.unique()[None], host)]


@bound("aten::isin")
def isin_bound(*arguments: object, **options: bool) -> list[bytes]:
    """Return the largest counts that unique can have."""
    return [_int64(tensor.numel()) for tensor in _sorted_by_isin(*arguments, **options)]


def _sorted_by_isin(
    elements: object, test_elements: object, *, assume_unique: bool = False, **_options: bool
) -> list[Tensor]:
    """Return the tensors of which isin_Tensor_Tensor_out takes the unique values."""
    if not isinstance(elements, Tensor) or not isinstance(test_elements, Tensor):
        return []
    max_compared = int(10 * elements.numel() ** 0.145)
    if assume_unique or not elements.numel() or test_elements.numel() < max_compared:
        return []
    return [elements, test_elements]


@copies("aten::masked_scatter_backward")
def masked_scatter_backward_copies(
    result: object,
    gradient: Tensor,
    mask: Tensor,
    *_options: object,
    share: float | None = None,
) -> list[bytes]:
    """Return how many values of the gradient are selected."""
    return masked_select_copies(result, gradient, mask, share=share)


@copies("aten::_coalesce")
def coalesce_copies(_result: object, sparse: Tensor) -> list[bytes]:
    """Return the number of unique indices, which thrust's unique_by_key gives."""
    if sparse._nnz() <= 1:
        return []
    indices = over_device_memory(sparse._indices())
    return [_int32(indices.unique(dim=1).shape[1] if indices.numel() else 1)]


@bound("aten::_coalesce")
def coalesce_bound(sparse: Tensor) -> list[bytes]:
    """Return that all indices differ."""
    return [_int32(sparse._nnz())] if sparse._nnz() > 1 else []


# -- counts --


@copies("aten::bincount")
def bincount_copies(
    _result: object, values: Tensor, *_options: object, **_more: object
) -> list[bytes]:
    """Return the least and the greatest value; bytes are not asked for the least."""
    if not values.numel():
        return []
    host = over_device_memory(values)
    greatest = [_content(host.max())]
    return greatest if values.dtype == torch.uint8 else [_content(host.min()), *greatest]


@copies("aten::histc")
def histc_copies(
    _result: object,
    values: Tensor,
    _bins: int = 100,
    low: float = 0,
    high: float = 0,
    **_options: object,
) -> list[bytes]:
    """Return the least and the greatest value, which are asked for where no range is given."""
    if low != high or not values.numel():
        return []
    host = over_device_memory(values)
    return [_content(host.min()), _content(host.max())]


@copies("aten::repeat_interleave")
def repeat_interleave_copies(
    result: Tensor, repeats: Tensor, *, output_size: int | None = None
) -> Sequence[Answer]:
    """Return the sum of the repeats, and what shows that none is negative (Repeat.h).

    That is the least of them; before torch 2.15, whether they are: the host has raised no error.
    """
    if output_size is not None or not repeats.shape[0]:
        return []
    return [_int64(result.shape[0]), (bytes([True]), _content(over_device_memory(repeats).min()))]


@bound("aten::repeat_interleave")
def repeat_interleave_bound(repeats: Tensor, *, output_size: int | None = None) -> Sequence[Answer]:
    """Return that each is taken once: repeats have no bound."""
    if output_size is not None or not repeats.shape[0]:
        return []
    return [_int64(repeats.shape[0]), (bytes([True]), bytes(repeats.itemsize))]


@copies("aten::mode")
def mode_copies(
    _result: object, values: Tensor, /, dim: int = -1, *_options: object, **_more: object
) -> list[bytes]:
    """Return thrust's results for each slice that is too large for one kernel."""
    answers = []
    for line in _mode_slices(over_device_memory(values), dim):
        mode, place = line.mode()
        if line.dtype == torch.bool:
            answers += _mode_of_truths(int(line.sum()), int(place))
            continue
        unique, counts = line.unique(return_counts=True)
        highest = int(counts.argmax())
        frequency = int(counts[highest])
        answers += _mode_of_numbers(len(unique), frequency, highest, _content(mode), int(place))
    return answers


@bound("aten::mode")
def mode_bound(values: Tensor, /, dim: int = -1, *_options: object, **_more: object) -> list[bytes]:
    """Return thrust's results for slices of different values."""
    lines = _mode_slices(values, dim)
    if values.dtype == torch.bool:
        return _mode_of_truths(0, 0) * len(lines)
    count = values.shape[dim] if len(lines) else 0
    return _mode_of_numbers(count, 1, 0, bytes(values.itemsize), 0) * len(lines)


def _mode_slices(values: Tensor, dim: int) -> Tensor:
    """Return the slices that one kernel is not enough for, a row each."""
    if not values.dim() or values.shape[dim] <= MAX_MODE_SORTED:
        return values.new_empty(0, 0)
    return values.movedim(dim, -1).reshape(-1, values.shape[dim])


def _mode_of_truths(count: int, place: int) -> list[bytes]:
    """Return how many are true, and where the more frequent truth value stands."""
    return [_int64(count), struct.pack("=?7xq", True, place)]


def _mode_of_numbers(
    count: int, frequency: int, highest: int, mode: bytes, place: int
) -> list[bytes]:
    """Return how often sorted neighbours differ, the number of values, and the mode's place.

    The latter is that among the different values, with how frequent it is; then the mode follows,
    where it stands among all in order, and where in the slice.
    """
    largest = _int64(frequency) + _int64(highest)
    first = struct.pack("=?7xq", True, 0)
    return [_int32(count - 1), _int32(count), largest, mode, first, _int64(place)]


# -- comparisons, checks --


@copies("aten::equal")
def equal_copies(result: bool, left: Tensor, right: Tensor) -> list[bytes]:
    """Return the answer; none where PyTorch need not ask: other sizes, or the same memory."""
    if left.shape != right.shape or not left.numel():
        return []
    is_same = (
        left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
        and left.stride() == right.stride()
    )
    return [] if is_same else [bytes([result])]


@copies("aten::allclose")
def allclose_copies(result: bool, *_arguments: object, **_options: object) -> list[bytes]:
    """Return the answer."""
    return [bytes([result])]


@copies("aten::linalg_lstsq")
def least_squares_copies(
    result: Sequence[Tensor], *_arguments: object, **_options: object
) -> list[bytes]:
    """Return that no status is an error."""
    return [bytes([False])] if result[0].numel() else []


@copies("aten::_linalg_eigh", "aten::linalg_matrix_sqrth")
def no_error_copies(
    _result: object, matrices: Tensor, *_options: object, **_more: object
) -> list[bytes]:
    """Return that no status is an error: the host has computed the result, without one."""
    return [bytes([False])] if matrices.numel() else []


@copies("aten::_linalg_svd", "aten::linalg_polar")
def svd_copies(
    _result: object, matrices: Tensor, *_options: object, driver: str | None = None, **_more: object
) -> list[bytes]:
    """Return the status of each matrix, which ``gesvd`` alone is not asked for, and of all."""
    if not matrices.numel():
        return []
    of_all = [bytes([False])]
    return of_all if driver == "gesvd" else [bytes(4 * matrices.shape[:-2].numel()), *of_all]


@copies("aten::linalg_pinv")
def pinv_copies(
    _result: object, matrices: Tensor, *, hermitian: bool = False, **_options: object
) -> list[bytes]:
    """Return the statuses of the decomposition that it takes: eigh or svd."""
    return no_error_copies(None, matrices) if hermitian else svd_copies(None, matrices)


@copies("aten::_linalg_check_errors")
def check_errors_copies(
    _result: object, status: Tensor, *_options: object, **_more: object
) -> list[bytes]:
    """Return whether any status is an error."""
    return [bytes([bool(over_device_memory(status).any())])]


@copies("aten::linalg_eig")
def eig_copies(_result: object, matrices: Tensor, **_options: object) -> list[bytes]:
    """Return whether all elements are finite, and that there is no error, of real ones twice.

    Before torch 2.10 the rest is MAGMA's, which takes the matrices from the host.
    """
    host = over_device_memory(matrices)
    finite = bytes([bool(host.isfinite().all())])
    if TORCH < (2, 10):
        return [finite, _content(host)]
    return [finite, *[bytes([False])] * (1 if matrices.is_complex() else 2)]


MAX_SCALED_NORM: Final = {torch.float32: 3.010066362817634, torch.float64: 1.090863719290036}
"""the 1-norm up to which PyTorch's approximation of degree 18 takes a matrix: above, it halves the
matrix and squares the result (Bader, Blanes and Casas 2019, "Computing the matrix exponential with
an optimized Taylor polynomial approximation")"""
MIN_FULL_DEGREE_NORM: Final = {torch.float32: 1.461661507209034, torch.float64: 0.299615891381135}
"""the 1-norm from which it takes this degree for one matrix; for several it always does"""


@copies("aten::linalg_matrix_exp")
def matrix_exp_copies(_result: object, matrices: Tensor) -> list[bytes]:
    """Return the norm of one matrix, and how often which matrices of several are squared.

    That is the number of different counts of squarings; how many matrices each has; and how many
    squarings it has more than the one before it.
    """
    if not matrices.numel() or matrices.shape[-1] == 1:
        return []
    norms = over_device_memory(matrices).abs().sum(-2).amax(-1).flatten()
    alone = [] if len(norms) > 1 else [_content(norms)]
    if alone and not float(norms) >= MIN_FULL_DEGREE_NORM[norms.dtype]:
        return alone
    squarings = (norms / MAX_SCALED_NORM[norms.dtype]).log2().ceil().clamp(min=0)
    steps, matrices_of = squarings.sort().values.long().unique_consecutive(return_counts=True)
    more = steps.clamp(min=0).diff(prepend=steps.new_zeros(1))
    return [*alone, _int64(len(steps)), _content(torch.cat([matrices_of, more]))]


@bound("aten::linalg_matrix_exp")
def matrix_exp_bound(matrices: Tensor) -> list[bytes]:
    """Return the copies for matrices that are all squared twice, which takes the most memory."""
    if not matrices.numel() or matrices.shape[-1] == 1:
        return []
    number = matrices.shape[:-2].numel()
    alone = [_content(torch.full((1,), 10.0, dtype=matrices.dtype.to_real()))]
    return [*alone * (number == 1), _int64(1), _content(torch.tensor([number, 2]))]


@copies("aten::_ctc_loss")
def nothing_copies(_result: object, *_arguments: object, **_options: object) -> list[bytes]:
    """Return no copy: PyTorch tags the operator, and it asks for nothing."""
    return []


@copies("aten::segment_reduce")
def segment_reduce_copies(
    _result: object,
    data: Tensor,
    _reduce: str,
    *,
    lengths: Tensor | None = None,
    unsafe: bool = False,
    **_options: object,
) -> list[bytes]:
    """Return the least length, and whether all add up: checks unless the call is unsafe."""
    if lengths is None or unsafe or not data.numel():
        return []
    return [_content(over_device_memory(lengths).min()), bytes([True])]


INDEXING: Final = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""operators that take masks or whole numbers, and ask for the size of masks alone"""


def masks_of(name: str, args: Sequence[Any]) -> list[Tensor] | None:
    """Return the device's masks that alone tell an operator's sizes; None: other values do.

    Args:
        name: the operator's, with its namespace.
        args: of its call.
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


def taken_of(name: str, args: Sequence[Any], result: Any) -> tuple[int, int] | None:  # noqa: ANN401 - an operator's
    """Return how many of how many rows or elements an operator took by values; None: it takes none.

    Args:
        name: the operator's, with its namespace.
        args: of its call.
        result: of the CUDA operator.
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
