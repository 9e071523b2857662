"""Large tensors with few nonzero elements, such as ``to_dense()`` of a sparse tensor.

Only these elements are stored. So the size of ``to_sparse()`` or ``nonzero()`` is known for a
matrix that would take gigabytes of host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_FEW: Final = 1 << 20
"""maximum number of elements stored per tensor"""
MAX_SHARE: Final = 0.25
"""maximum share of a tensor's elements that counts as few"""


@dataclass(frozen=True)
class FewNonzeros:
    """The elements of a contiguous tensor that may differ from zero, on the host."""

    places: Tensor
    """indices into the flattened tensor, ascending"""
    values: Tensor
    assumed: bool = False
    """whether ones replace unknown values"""

    @classmethod
    def none(cls, dtype: torch.dtype) -> FewNonzeros:
        """Return the elements of a tensor of zeros, which has none."""
        return cls(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=dtype))

    @classmethod
    def of_sparse(cls, sparse: Tensor, *, assumed: bool) -> FewNonzeros:
        """Return the elements of a sparse host tensor."""
        coo = sparse.to_sparse_coo().coalesce()
        shape = torch.Size(coo.shape)
        places = [indices[:, None] for indices in coo.indices()]
        dense = torch.arange(shape[coo.sparse_dim() :].numel())
        first = _flattened(places, shape[: coo.sparse_dim()])
        flat = first * len(dense) + dense
        return cls(flat.flatten(), coo.values().flatten(), assumed)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory for the elements."""
        return self.places.nbytes + self.values.nbytes

    def nonzero(self, shape: Sequence[int]) -> Tensor:
        """Return the result of ``nonzero()`` for the tensor, which has this shape."""
        places = self.places[self.values != 0]
        return torch.stack(torch.unravel_index(places, tuple(shape)), 1)

    def write_to(self, host: Tensor) -> None:
        """Write all elements to a contiguous host tensor."""
        host.zero_()
        host.view(-1)[self.places] = self.values

    def mapped(self, function: Callable[[Tensor], Tensor | None]) -> FewNonzeros | None:
        """Return the elements after a pointwise function; None if it fails or changes zeros."""
        zero, values = function(self.values.new_zeros(1)), function(self.values)
        if zero is None or values is None or zero.any():
            return None
        return FewNonzeros(self.places, values, self.assumed)

    def changed(self, touched: Tensor, change: Callable[[Tensor, Tensor], object]) -> FewNonzeros:
        """Return the elements after an in-place operator.

        Args:
            touched: the indices that the operator writes, in its order.
            change: runs the operator on a one-dimensional tensor with all stored elements; its
                second argument has the positions in that tensor of the ``touched`` elements.
        """
        places, inverse = torch.cat([self.places, touched.flatten()]).unique(return_inverse=True)
        values = self.values.new_zeros(len(places))
        values[inverse[: len(self.places)]] = self.values
        change(values, inverse[len(self.places) :].view(touched.shape))
        return FewNonzeros(places, values, self.assumed)


def touched_places(name: str, args: Sequence[Any], shape: torch.Size) -> Tensor | None:
    """Return the indices at which an in-place operator writes to a contiguous tensor.

    None if there are too many, or not all dimensions are indexed by integers.

    Args:
        name: an operator's name in CHANGES.
        args: its arguments on the host, without the tensor that it writes.
        shape: shape of that tensor.
    """
    if name == "index_put_":
        indices = [index for index in args[0] if index is not None and index.dtype == torch.int64]
        if len(indices) != len(shape):
            return None
    else:
        dim, index = args[0] % len(shape), args[1]
        if name == "index_add_":
            sizes = [*shape[:dim], index.numel(), *shape[dim + 1 :]]
            index = index.view([-1 if at == dim else 1 for at in range(len(shape))])
        else:
            sizes = [*index.shape]
        indices = [
            index
            if at == dim
            else torch.arange(size).view([-1 if at == axis else 1 for axis in range(len(shape))])
            for at, size in enumerate(sizes)
        ]
    count = torch.broadcast_shapes(*(index.shape for index in indices)).numel()
    if count > min(MAX_FEW, shape.numel() * MAX_SHARE):
        return None
    return _flattened(indices, shape)


def _flattened(indices: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Return the indices into a flattened tensor for those along each dimension."""
    places = torch.zeros((), dtype=torch.int64)
    for index, size in zip(indices, shape, strict=True):
        places = places * size + index.remainder(size)
    return places


def _index_put(
    values: Tensor,
    at: Tensor,
    _indices: object,
    source: Tensor,
    accumulate: bool = False,  # noqa: FBT001, FBT002 - as the operator's
) -> None:
    values.index_put_([at], source, accumulate)


def _index_add(
    values: Tensor, at: Tensor, _dim: int, _index: Tensor, source: Tensor, alpha: float = 1
) -> None:
    values.index_add_(0, at.flatten(), source.expand(at.shape).flatten(), alpha=alpha)


def _scatter(values: Tensor, at: Tensor, _dim: int, _index: Tensor, source: Tensor | float) -> None:
    if isinstance(source, Tensor):
        values.scatter_(0, at.flatten(), _within(source, at).flatten())
    else:
        values.scatter_(0, at.flatten(), source)


def _scatter_add(values: Tensor, at: Tensor, _dim: int, _index: Tensor, source: Tensor) -> None:
    values.scatter_add_(0, at.flatten(), _within(source, at).flatten())


def _within(source: Tensor, at: Tensor) -> Tensor:
    """Return the part of ``source`` that is scattered to ``at``."""
    return source[tuple(slice(size) for size in at.shape)]


CHANGES: Final[dict[str, Callable[..., None]]] = {
    "index_put_": _index_put,
    "index_add_": _index_add,
    "scatter_": _scatter,
    "scatter_add_": _scatter_add,
}
"""in-place operators that may write few elements, as functions that write at given indices of a
one-dimensional tensor"""
