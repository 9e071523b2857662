"""A test's budget for values, counted in operations and bytes, never in seconds."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from pytest_gpumem.devices.virtual.library import LIMITS
from pytest_gpumem.devices.virtual.values.host_tensors import available_memory, is_plain, span
from pytest_gpumem.devices.virtual.values.operators import NETWORKS, SOLVING, SORTING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.devices.virtual.library import NativeLibrary
    from pytest_gpumem.devices.virtual.values.operators import OperatorCall

MAX_FLOPS: Final = 1 << 30
"""maximum floating-point operations, by PyTorch's formula, of an operator that is computed: 20 ms
of one CPU thread"""
ALL_FLOPS: Final = 20 * 10**9
"""limit on the floating-point operations spent on one test's values: 0.4 s of one CPU thread"""
ASKED: Final = 256 << 20
"""when all values are computed: bytes up to which an operator needs no check of free memory"""
TINY: Final = 4096
"""maximum total bytes of the tensors of an operator that costs nothing"""
OF_ELEMENT: Final = 16
"""operations charged per element if PyTorch has no formula: computing an element takes as long as
this many operations of a matrix product"""
OF_RANDOM: Final = 256
"""operations per random number"""
OF_SORTED: Final = 1024
"""operations per sorted element"""


class Budget:
    """A test's remaining budget for values that are not small."""

    def __init__(self, library: NativeLibrary, *, full: bool) -> None:
        """Start with the whole budget.

        Args:
            library: the virtual GPU's library, which counts the bytes.
            full: whether all values are computed, without limits.
        """
        self._library = library
        self._full = full
        self.flops = ALL_FLOPS
        self._taken = 0
        """operations deducted for the last operator"""
        self.largest = LIMITS.largest
        """maximum bytes of a tensor that is computed; lowered once the budget is spent"""
        self.lost = 0
        """bytes of unknown results of compiled code"""
        self.ended = False
        self.refused = 0
        """bytes of results for which the host had no memory"""

    def affords(
        self,
        call: OperatorCall,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        result: Any,  # noqa: ANN401 - an operator's
        known_bytes: int | None = None,
    ) -> bool:
        """Return whether an operator may be computed; if so, deduct its cost.

        Args:
            call: the operator's call.
            inputs: all tensors among its arguments.
            outputs: tensors that it writes.
            result: the CUDA operator's result; None before it has run.
            known_bytes: total bytes of its inputs; None if values of some are unknown, or one is
                too large to compute.
        """
        if self._full:
            return self.has_room(sum(tensor.nbytes for tensor in outputs), inputs)
        self._taken = 0
        nbytes, total = 0, TINY + 1 if known_bytes is None else known_bytes
        for tensor in outputs:
            total += tensor.nbytes
            if tensor.nbytes > LIMITS.small:
                nbytes += tensor.nbytes
        if total <= TINY:
            return True
        flops = flops_of(call, inputs, outputs, result)
        if not nbytes and flops <= LIMITS.small * OF_ELEMENT:  # small operators are free
            return True
        if flops > MAX_FLOPS and call.traits.formula is not None:
            return False
        if flops > self.flops or nbytes > self._library.value_budget():
            self.end()
            return False
        self.flops -= flops
        self._taken = flops
        return True

    def affords_sorting(self, elements: int) -> bool:
        """Return whether this many elements may be sorted; if so, deduct the cost."""
        flops = elements * OF_SORTED
        if self._full or flops <= LIMITS.small * OF_ELEMENT:
            return True
        if flops > self.flops:
            self.end()
            return False
        self.flops -= flops
        return True

    def has_room(self, nbytes: int, inputs: Sequence[Tensor]) -> bool:
        """Return whether the host has memory for results, their copies and copies of the inputs.

        Linux overcommits memory: it kills a process that writes to more memory than is free.

        Args:
            nbytes: bytes of the results.
            inputs: tensors that may be converted, for example from half precision.
        """
        needed = 2 * nbytes
        for tensor in filter(is_plain, inputs):
            needed += min(tensor.nbytes, span(tensor))  # the span of an expanded tensor is less
        if needed <= ASKED or needed <= available_memory():
            return True
        self.refused += nbytes
        return False

    def refund(self) -> None:
        """Refund the last operator's cost, because the operator was not computed."""
        self.flops += self._taken
        self._taken = 0

    def lose(self, nbytes: int) -> None:
        """Count unknown results of compiled code; the native library counts those of operators."""
        self.lost += nbytes
        if not self._full and not self.ended and self.lost > LIMITS.lost:
            self.end()

    def end(self) -> None:
        """Compute only small tensors from now on."""
        self.ended, self.flops, self.largest = True, 0, LIMITS.small
        self._library.set_value_limits(LIMITS.small, 0, LIMITS.backed)


def _by_formula(formula: Callable[..., Any], call: OperatorCall, result: Any) -> int:  # noqa: ANN401 - an operator's
    """Return the operations that PyTorch's formula counts.

    Tuples are written ``(*items,)``, which builds them from lists: ``tuple()`` of an iterator
    allocates ten elements and shrinks the tuple, which Python's garbage collector counts each time.
    """
    of_shapes: Callable[..., int] | None = getattr(formula, "__wrapped__", None)
    if of_shapes is None:  # attention's formulas would read sequence lengths back from the device
        kwargs = {name: _on_meta(value) for name, value in call.kwargs.items()}
        flops: int = formula(*map(_on_meta, call.args), **kwargs, out_val=result)
        return flops
    named = (*((name, _shape(value)) for name, value in call.kwargs.items()),)
    return _of_shapes(of_shapes, _shape((*call.args,)), named, _shape(result))


@functools.lru_cache(maxsize=1024)
def _of_shapes(
    formula: Callable[..., int],
    shapes: tuple[Any, ...],
    named: tuple[tuple[str, Any], ...],
    result: Any,  # noqa: ANN401 - an operator's
) -> int:
    """Return the operations that a formula counts for these shapes, cached.

    PyTorch's formulas create a reference cycle at each call, which would make Python's garbage
    collector run.
    """
    return formula(*shapes, out_shape=result, **dict(named))


def _on_meta(value: Any) -> Any:  # noqa: ANN401 - an operator's argument
    """Return a meta tensor for a tensor; return anything else unchanged."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _shape(value: Any) -> Any:  # noqa: ANN401 - an operator's argument
    """Return a tensor's shape, or the shapes in a list or tuple; return anything else unchanged."""
    if isinstance(value, Tensor):
        return value.shape
    return (*map(_shape, value),) if type(value) in {tuple, list} else value


def flops_of(
    call: OperatorCall,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    result: Any,  # noqa: ANN401 - an operator's
) -> int:
    """Return the number of floating-point operations of an operator."""
    formula = call.traits.formula
    if formula is not None:
        with suppress(Exception):  # a formula may fail on unexpected arguments
            return _by_formula(formula, call, result)
    elements = sum(tensor.numel() for tensor in (*inputs, *outputs))
    if call.name in NETWORKS:
        values: Tensor = call.args[0]
        return 2 * values.shape[0] * values.shape[1] * elements
    if call.name.startswith(SOLVING):
        return elements * max((max(tensor.shape, default=1) for tensor in inputs), default=1)
    if call.traits.random:
        return elements * OF_RANDOM
    return elements * (OF_SORTED if call.name in SORTING else OF_ELEMENT)
