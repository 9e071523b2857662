"""Equivalents for the CPU of operators that are CUDA's alone, or that have other outputs there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._ops import OpOverload


aten: Final = torch.ops.aten


# -- unique: CUDA sorts always, and its outputs that nobody asked for are empty --


def _unique2(
    values: Tensor,
    _sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    is_mask = values.dtype == torch.bool and values.numel() > 0
    unique, inverse, counts = aten._unique2(values, True, return_inverse, return_counts or is_mask)
    # Of a mask, CUDA counts always, and returns no tensor for an inverse that nobody asked for.
    return unique, None if is_mask and not return_inverse else inverse, counts


def _only_asked_for(
    result: tuple[Tensor, Tensor, Tensor], *, inverse: bool, counts: bool
) -> tuple[Tensor, Tensor, Tensor]:
    unique, inverse_indices, numbers = result
    none = inverse_indices.new_empty(0)
    return unique, inverse_indices if inverse else none, numbers if counts else none


def _unique_dim(
    values: Tensor,
    dim: int,
    _sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    result = aten.unique_dim(values, dim, True, True, True)
    return _only_asked_for(result, inverse=return_inverse, counts=return_counts)


def _unique_dim_consecutive(
    values: Tensor,
    dim: int,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    result = aten.unique_dim_consecutive(values, dim, True, True)
    return _only_asked_for(result, inverse=return_inverse, counts=return_counts)


def _unique_consecutive(
    values: Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if dim is not None:
        return _unique_dim_consecutive(values, dim, return_inverse, return_counts)
    result = aten.unique_consecutive(values, True, True)
    return _only_asked_for(result, inverse=return_inverse, counts=return_counts)


def _histc(
    values: Tensor, bins: int = 100, low: float = 0, high: float = 0, **_options: object
) -> Tensor:
    """Count whole numbers too, which the CPU's operator does not take."""
    if values.is_floating_point():
        counts: Tensor = aten.histc(values, bins, low, high)
        return counts
    numbers = values.to(torch.int64).flatten()
    if not numbers.numel():
        return values.new_zeros(bins)
    least, greatest = int(low), int(high)
    if least == greatest:
        least, greatest = int(numbers.min()), int(numbers.max())
    if least == greatest:
        least, greatest = least - 1, greatest + 1
    inside = numbers[(numbers >= least) & (numbers <= greatest)]
    places = ((inside - least) * bins // (greatest - least)).clamp(max=bins - 1)
    return torch.bincount(places, minlength=bins).to(values.dtype)


def _linalg_lstsq(
    matrices: Tensor, right: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, ...]:
    """Take the one driver that CUDA has; the CPU's own choice returns ranks as well."""
    del driver
    result: tuple[Tensor, ...] = aten.linalg_lstsq(matrices, right, rcond, driver="gels")
    return result


def _linalg_svd(
    matrices: Tensor,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
) -> tuple[Tensor, ...]:
    """Ignore the driver, one of cuSOLVER's."""
    del driver
    result: tuple[Tensor, ...] = aten._linalg_svd(matrices, full_matrices, compute_uv)
    return result


EQUIVALENTS: Final[dict[OpOverload, Callable[..., Any]]] = {
    aten._unique2.default: _unique2,
    aten.unique_dim.default: _unique_dim,
    aten.unique_dim_consecutive.default: _unique_dim_consecutive,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.histc.default: _histc,
    aten.linalg_lstsq.default: _linalg_lstsq,
    aten._linalg_svd.default: _linalg_svd,
}
"""a function of the operator's arguments as CPU tensors: it returns what the CUDA operator does"""
