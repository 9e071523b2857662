"""Equivalents for the CPU of operators that are CUDA's alone, or that have other outputs there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

EQUIVALENTS: Final[dict[OpOverload, Callable[..., Any]]] = {}
"""functions of an operator's arguments as CPU tensors, which return what the CUDA operator does"""
