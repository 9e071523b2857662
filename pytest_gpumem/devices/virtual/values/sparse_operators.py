"""Operators on sparse and nested tensors: PyTorch implements them with other operators.

The inner operators are intercepted one by one, so the sizes that they read back are correct. The
outer operator's own kernels may write any part of its result: the CPU's operator computes that part
if it returns a tensor of the same form; otherwise the part is unknown.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from pytest_gpumem.devices.virtual.values.few_nonzeros import MAX_FEW, FewNonzeros
from pytest_gpumem.devices.virtual.values.host_tensors import (
    PLAIN,
    extents_of,
    indices_of,
    is_plain,
    is_sparse,
    of_parts,
    over_device_memory,
    paired,
    parts_of,
    tensors_in,
)
from pytest_gpumem.devices.virtual.values.operators import SELECTS, HostCall, on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.devices.virtual.library import NativeLibrary
    from pytest_gpumem.devices.virtual.values.known import KnownValues
    from pytest_gpumem.devices.virtual.values.operators import OperatorCall, Traits

    Compute = Callable[[OperatorCall, Any, Any], tuple[Any] | None]
    """takes a call and its arguments on the host; returns the result in a tuple, or None if the
    host cannot compute it"""

MAX_REPLACED_VALUES: Final = 1 << 22
"""maximum number of elements in an operator's inputs for computing the indices of its result with
ones in place of values"""


def intercepts_inner(traits: Traits, inputs: Sequence[Tensor]) -> bool:
    """Return whether to intercept the inner operators of an operator on the device.

    They are intercepted if the operator takes or creates sparse or nested tensors, or is a Python
    function.
    """
    has_layout, on_device = traits.opened, traits.copies  # copies may go to the device
    for tensor in inputs:
        on_device = on_device or tensor.is_cuda
        if (tensor.layout is not torch.strided or tensor.is_nested) and type(tensor) in PLAIN:
            has_layout = True  # operators on a wrapper's parts are intercepted anyway
    return has_layout and on_device


class SparseOperators:
    """Computes the parts of sparse tensors on the host."""

    def __init__(
        self,
        values: KnownValues,
        are_readable: Callable[[Sequence[Tensor]], bool],
        compute: Compute,
        note_few: Callable[[Tensor, Callable[[], FewNonzeros]], bool],
    ) -> None:
        self._values = values
        self._are_readable = are_readable
        self._compute = compute
        self._note_few = note_few

    def prepared(self, call: OperatorCall) -> HostCall | None:
        """Return the call to compute on the host; None if some of its inputs are unknown."""
        are_seen = all(is_sparse(tensor) or is_plain(tensor) for tensor in call.inputs())
        if not (are_seen and self._are_known(call.parts())):
            return None
        return self._host_call(
            call, lambda tensor: of_parts(tensor, [*map(over_device_memory, parts_of(tensor))])
        )

    def _are_known(self, parts: Sequence[Tensor]) -> bool:
        """Return whether parts are known and can be read; False while a graph is captured."""
        is_captured = torch.cuda.is_current_stream_capturing()
        are_readable = not is_captured and self._are_readable(parts)
        return are_readable and all(map(self._values.is_known, parts))

    def nonzeros(self, call: OperatorCall) -> int:
        """Return the number of nonzeros in an operator's sparse result; -1: unknown."""
        sparse = [tensor for tensor in call.inputs() if is_sparse(tensor)]
        if len(sparse) > 1 or call.name in SELECTS:
            result = self._of_indices(call)
            if isinstance(result, Tensor) and is_sparse(result):
                return result._nnz()
        return -1

    def finish(
        self,
        call: OperatorCall,
        result: object,
        host_call: HostCall | None,
        up_to_date: Sequence[tuple[int, int]],
    ) -> None:
        """Write the parts that an operator's own kernels wrote, or mark them as unknown.

        Args:
            call: the operator's call, which has run.
            result: its result.
            host_call: returned by ``prepared``.
            up_to_date: start and end addresses of memory whose known values are up to date.
        """
        written, outputs = call.written(), tensors_in(result)
        read = [tensor for tensor in call.inputs() if all(tensor is not each for each in written)]
        up_to_date = [*up_to_date, *extents_of(read)]
        for start, end in extents_of((*outputs, *written)):
            if not any(first <= start and end <= last for first, last in up_to_date):
                self._values.forget_range(start, end)
        made = [part for tensor in (*outputs, *written) for part in parts_of(tensor)]
        if all(map(self._is_computed, made)):
            return
        if call.name == "_to_dense" and self._is_few(call, result):
            return
        if host_call is not None:
            computed = self._compute(call, host_call.args, host_call.kwargs)
            pairs = [*paired(result, computed[0]), *host_call.copies] if computed else []
            for tensor, values in pairs:
                self._fill(tensor, values, assumed=host_call.assumed)
        elif not written and isinstance(result, Tensor) and is_sparse(result):
            host = self._of_indices(call)
            if isinstance(host, Tensor) and is_sparse(host):
                assumed = self._values.are_assumed(call.parts())
                self._fill(result, host, only_indices=True, assumed=assumed)

    def _is_few(self, call: OperatorCall, result: object) -> bool:
        """Record the nonzeros of a large ``to_dense()`` result; False if unknown or too many."""
        sparse = call.args[0]
        if not isinstance(result, Tensor) or not is_sparse(sparse):
            return False
        *indices, values = parts_of(sparse)
        if values.numel() > MAX_FEW or not self._are_known(indices):
            return False
        if self._values.are_assumed(indices):
            return False
        is_sure = self._are_known([values]) and not self._values.are_assumed([values])

        def few() -> FewNonzeros:
            host = values if is_sure else None
            ones = (
                torch.ones(values.shape, dtype=values.dtype)
                if host is None
                else over_device_memory(host)
            )
            return FewNonzeros.of_sparse(
                of_parts(sparse, [*map(over_device_memory, indices), ones]), assumed=not is_sure
            )

        return self._note_few(result, few)

    def spread(self, sparse: Tensor) -> None:
        """Assume that a sparse tensor's indices are distinct and evenly spread."""
        indices = sparse._indices()
        shape = sparse.shape[: sparse.sparse_dim()]
        count, places = indices.shape[1], shape.numel()
        flat = torch.arange(count).mul(places).div(max(count, 1), rounding_mode="floor")
        values = torch.stack(torch.unravel_index(flat, shape)) if places else flat.new_zeros(0)
        if values.shape == indices.shape:
            self._values.write(indices, values, assumed=True)

    def _is_computed(self, part: Tensor) -> bool:
        return self._values.is_known(part) and not self._values.are_assumed([part])

    def _of_indices(self, call: OperatorCall) -> Any:  # noqa: ANN401 - an operator's result
        """Compute an operator with ones in place of values, for the indices of its result.

        None if indices are unknown, inputs are too large, or the host cannot compute the operator.
        """
        sparse = [tensor for tensor in call.inputs() if is_sparse(tensor)]
        indices = [part for tensor in sparse for part in indices_of(tensor)]
        indices += [
            tensor
            for tensor in call.inputs()
            if not (is_sparse(tensor) or tensor.is_floating_point() or tensor.is_complex())
        ]
        if not sparse or not self._are_known(indices):
            return None
        if call.name == "_coalesce":  # neither the values nor their shape matter
            slim = torch.ones(sparse[0]._nnz())
            shape = sparse[0].shape[: sparse[0].sparse_dim()]
            host = over_device_memory(indices[0])
            host_call = HostCall([torch.ops.aten._sparse_coo_tensor_unsafe(host, slim, shape)], {})
        elif sum(part.numel() for part in call.parts()) > MAX_REPLACED_VALUES:
            return None
        else:
            host_call = self._host_call(call, _of_ones)
        computed = self._compute(call, host_call.args, host_call.kwargs)
        return computed[0] if computed else None

    def _host_call(self, call: OperatorCall, host_of: Callable[[Tensor], Tensor]) -> HostCall:
        assumed = self._values.are_assumed(call.parts())
        return on_host(call, host_of, lambda generator: generator, assumed=assumed)

    def _fill(
        self, tensor: Tensor, host: Tensor | None, *, assumed: bool, only_indices: bool = False
    ) -> None:
        """Write a result's unknown parts with the values of the host's result.

        Nothing is written if the two results differ in layout, in shapes, or in a known part.
        """
        if host is None or host.layout is not tensor.layout:
            return
        parts = [*zip(parts_of(tensor), parts_of(host), strict=False)]
        if only_indices:
            parts = parts[:-1]
        known = [(part, values) for part, values in parts if self._is_computed(part)]
        unknown = [(part, values) for part, values in parts if not self._is_computed(part)]
        is_same_form = all(part.shape == values.shape for part, values in parts)
        if is_same_form and all(
            torch.equal(over_device_memory(part), values) for part, values in known
        ):
            for part, values in unknown:
                if 0 not in part.stride():  # skip expanded tensors, which repeat one number
                    self._values.write(part, values, assumed=assumed, whole=True)


def _of_ones(tensor: Tensor) -> Tensor:
    """Return a host tensor with the same indices, and ones for values."""
    parts = parts_of(tensor)
    if not is_sparse(tensor) and not tensor.is_floating_point():
        return over_device_memory(tensor)
    ones = torch.ones(parts[-1].shape, dtype=tensor.dtype)
    return of_parts(tensor, [*map(over_device_memory, parts[:-1]), ones])


# -- running operators --


class OpenOperator:
    """A running operator whose inner operators are intercepted."""

    def __init__(
        self, library: NativeLibrary, call: OperatorCall, outer: OpenOperator | None
    ) -> None:
        self._library = library
        self._outer = outer
        self._in_python = call.traits.in_python
        self._writes = library.thread_writes()
        self._arguments = [*extents_of(call.inputs())]
        self._targets = [*extents_of(call.written())]
        self._written: list[tuple[int, int]] = []
        """start and end addresses of the memory that inner operators have written since this
        operator last launched a kernel itself"""

    def up_to_date(self) -> list[tuple[int, int]]:
        """Return start and end addresses of memory whose known values are certainly up to date."""
        return self._arguments + self._written

    def begin_inner(self, inputs: Sequence[Tensor] = ()) -> None:
        """Mark values as unknown that the operator's own kernels may have written.

        These are the values that inner operators have written so far, the arguments that the
        operator changes, and memory that it allocated itself, where an earlier tensor's values may
        be known.

        Args:
            inputs: inputs of the inner operator that begins.
        """
        forget = self._library.forget
        if self._library.thread_writes() != self._writes:
            for start, end in (*self._written, *self._targets):
                forget(start, end - start)
            self._written.clear()
            self._writes = self._library.thread_writes()
        for start, end in () if self._in_python else extents_of(inputs):
            if not self._is_up_to_date(start, end):
                forget(start, end - start)

    def end_inner(self, call: OperatorCall, result: object) -> None:
        """Record the memory that an inner operator has written."""
        self._writes = self._library.thread_writes()
        self._written += extents_of([*tensors_in(result), *call.written()])

    def _is_up_to_date(self, start: int, end: int) -> bool:
        """Return whether known values between two addresses are certainly up to date."""
        if any(first <= start and end <= last for first, last in self.up_to_date()):
            return True
        return self._outer is not None and self._outer._is_up_to_date(start, end)


class RunningHere(threading.local):
    """The operators running on this thread."""

    def __init__(self) -> None:
        self.compiled: Callable[[OperatorCall], bool] | None = None
        """while compiled code runs, a function that writes the values that an inner operator reads
        back, or returns False if it reads none (compilation/graph_values.py)"""
        self.opened: OpenOperator | None = None
        """the innermost running operator whose inner operators are intercepted"""
        self.count = -1
        """the number of selected elements that the opened operator will read back; -1: unknown"""
