"""The mode that computes CUDA operators on the host, and writes the results to device memory.

interception.py passes each operator to it.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from pytest_gpumem.devices.virtual.decisions import Decisions
from pytest_gpumem.devices.virtual.library import LIMITS
from pytest_gpumem.devices.virtual.operator_functions import CalledFunctions
from pytest_gpumem.devices.virtual.values.data_dependent import BYTE_MASKS, masks_of, selection_of
from pytest_gpumem.devices.virtual.values.dispatch_keys import (
    INCLUDED,
    KEYS,
    KEYS_BELOW,
    Without,
    keys_of,
    numbers_as_tensors,
)
from pytest_gpumem.devices.virtual.values.host_computer import (
    HostComputer,
    OneThread,
    without_function_modes,
)
from pytest_gpumem.devices.virtual.values.host_tensors import (
    describe,
    is_plain,
    is_sparse,
    paired,
    parts_of,
    span,
    tensors_in,
)
from pytest_gpumem.devices.virtual.values.interception import Interception, raise_unwrapped
from pytest_gpumem.devices.virtual.values.operator_table import BOUNDED, COPIES
from pytest_gpumem.devices.virtual.values.operators import (
    ASSUMED,
    COMPARING,
    COUNTED,
    RAISES,
    RETURNS_ARGUMENTS,
    SELECTS,
    UNSCALES,
    HostCall,
    OperatorCall,
)
from pytest_gpumem.devices.virtual.values.sparse_operators import (
    OpenOperator,
    RunningHere,
    SparseOperators,
    intercepts_inner,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from pytest_gpumem.devices.virtual.library import NativeLibrary
    from pytest_gpumem.devices.virtual.operator_functions import OperatorFunctions
    from pytest_gpumem.devices.virtual.values.few_nonzeros import FewNonzeros
    from pytest_gpumem.devices.virtual.values.operator_table import Answer, Arguments
    from pytest_gpumem.devices.virtual.values.operators import Traits


class ValueMode:
    """Computes operators' values while it is entered.

    Only the operators of the thread that enters it, and of the threads that this thread starts, are
    computed.
    """

    current: ClassVar[ValueMode | None] = None
    """the entered mode; None if values are not computed"""

    def __init__(
        self,
        library: NativeLibrary,
        scope: Literal["auto", "full"] = "auto",
        decisions: Decisions | None = None,
    ) -> None:
        """Create a mode without entering it.

        Args:
            library: the virtual GPU's library.
            scope: whether values are computed within a budget ("auto"), or all of them ("full").
            decisions: records assumed values that the step reads back.
        """
        self._library = library
        functions = prepared_functions(library)
        self.host = HostComputer(library, functions, full=scope == "full")
        self.values, self.deferred = self.host.values, self.host.deferred
        self.count, self.forget = library.count_operators, library.forget
        self.in_operator = library.in_operator
        self.sizes_queued = False
        """whether all sizes that the running operator reads back are queued"""
        self.running_here = RunningHere()
        self.sparse = SparseOperators(
            self.values, self.host.are_readable, self.host.computed, self._note_few
        )
        self.decisions = decisions or Decisions()

    def __enter__(self) -> Self:
        self.host.begin()
        self._library.compute_values(1)
        self._library.on_known_read(is_of_an_operators_own)
        self.decisions.computes = True
        ValueMode.current = self
        Interception.begin(self.run)
        self._library.short_ways(not self.host.full)
        return self

    def __exit__(self, *_error: object) -> None:
        self._library.short_ways(0)
        Interception.end()
        ValueMode.current = None
        self._library.on_known_read(None)
        self._library.compute_values(0)
        self.decisions.computes = False
        self._library.set_value_limits(LIMITS.small, 0, LIMITS.backed_small)

    def notes(self) -> list[str]:
        """Return sentences on unknown results, if the step branched on any or requests all."""
        return self.host.notes(decided=any(self.decisions.counts))

    # -- running a CUDA operator --

    def run(self, call: OperatorCall) -> Any:  # noqa: ANN401 - as the operator
        """Run an operator that may read values, or write values that are computed."""
        __tracebackhide__ = True
        traits, wants = call.traits, self.running_here.compiled
        try:
            if wants is not None and not wants(call):  # compiled code reads nothing back
                return call.op._op(*call.args, **call.kwargs)
            is_opened = (traits.opened or traits.may_open) and intercepts_inner(
                traits, call.inputs()
            )
            is_opened = is_opened and traits.op._schema.name not in COPIES
            run = self._run_opened if is_opened else self._run_closed
            if traits.copies and call.copies_floats_to_host():
                with self.decisions.purpose("kept"):
                    return run(call)
            return run(call)
        except BaseException:
            del call  # the error's traceback has this frame, and would keep the call
            raise

    def _run_closed(self, call: OperatorCall) -> Any:  # noqa: ANN401 - as the operator
        """Run an operator without intercepting the operators that it calls."""
        __tracebackhide__ = True
        traits, here, plan = call.traits, self.running_here, None
        if here.opened is not None:
            here.opened.begin_inner(call.inputs())
        counts = self.decisions.counts if traits.data_dependent else (0, 0)
        if traits.written or traits.data_dependent or traits.reads_back or traits.copies:
            plan = (self._before_read if traits.reads_back else self._before_other)(call)
        sizes_are_queued = self.sizes_queued or (plan is not None and plan.result is not None)
        # The operator reads back memory that its own kernels wrote: values stored for that address
        # belong to an earlier tensor.
        reads_unknown = traits.data_dependent and not sizes_are_queued
        if reads_unknown:
            self._library.compute_values(0)
        self.count(1)
        try:
            result = call.op._op(*call.args, **call.kwargs)
        except BaseException:
            call, plan = call.without_arguments(), None
            raise
        finally:
            self.count(-1)
            self.decisions.answered = False
            if reads_unknown:
                self._library.compute_values(1)
            if traits.data_dependent:
                self.after(call)  # last, because it may raise
        if traits.data_dependent and self.decisions.counts != counts:
            taken = selection_of(call.op._schema.name, call.args, result)
            if taken is not None:
                self.decisions.seen_selection(*taken, counts)
        self.finish(call, result, plan)
        if here.opened is not None:
            here.opened.end_inner(call, result)
        return result

    def _run_opened(self, call: OperatorCall) -> Any:  # noqa: ANN401 - as the operator
        """Run an operator, and intercept the operators that it calls as well."""
        __tracebackhide__ = True
        here = self.running_here
        outer = here.opened
        if outer is not None:
            outer.begin_inner(call.inputs())
        plan = self.before_opened(call)
        args = numbers_as_tensors(call.op, call.args)
        keys = KEYS_BELOW & keys_of(call.inputs())
        opened = here.opened = OpenOperator(self._library, call, outer)
        self.count(1)
        Interception.functions.count_opened(1)
        torch._C._dispatch_tls_set_dispatch_key_excluded(INCLUDED[0], False)  # noqa: FBT003
        try:
            result = call.op._handle.redispatch_boxed(keys, *args, **call.kwargs)
        except BaseException:
            del args, plan, call
            raise
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(INCLUDED[0], True)  # noqa: FBT003
            Interception.functions.count_opened(-1)
            here.opened, here.count = outer, -1
            self.count(-1)
        opened.begin_inner()
        self.finish_opened(call, result, plan, opened.up_to_date())
        if outer is not None:
            outer.end_inner(call, result)
        return result

    # -- operators inside of others --

    @without_function_modes
    def before_opened(self, call: OperatorCall) -> HostCall | None:
        """Set the number of nonzeros that an operator reads back; return the call to compute.

        The result is None if one of the call's inputs is unknown.
        """
        if call.name in COUNTED:
            self._library.tell_nonzeros(self.sparse.nonzeros(call))
        elif call.name in SELECTS:
            self.running_here.count = self.sparse.nonzeros(call)
        return self.sparse.prepared(call)

    @without_function_modes
    def finish_opened(
        self,
        call: OperatorCall,
        result: object,
        plan: HostCall | None,
        up_to_date: Sequence[tuple[int, int]],
    ) -> None:
        """Write the results of ``_run_opened``, except at the addresses in ``up_to_date``."""
        with OneThread(self.host.full):
            self.sparse.finish(call, result, plan, up_to_date)

    # -- before and after a CUDA operator --

    @without_function_modes
    def _before_other(self, call: OperatorCall) -> HostCall | None:
        """Prepare an operator that writes its arguments, or copies values to the host.

        Returns:
            the call to compute on the host; None if nothing is computed, or if ``finish`` decides.
        """
        traits = call.traits
        masks = masks_of(call.op._schema.name, call.args) if traits.data_dependent else None
        self.sizes_queued = masks == []  # indices are integers, not read back
        copies = None if self.sizes_queued else COPIES.get(call.op._schema.name)
        reads = copies is not None or (traits.copies and call.copies_to_host())
        if not reads and not self.host.writes_computed(call.written()):
            return None
        inputs = call.inputs()
        if not any([tensor.is_cuda for tensor in inputs]):  # noqa: C419 - a generator is slower
            return None
        plan = self.host.plan(call, inputs, decides=reads)
        if not reads:
            return plan
        if plan is None and copies is not None and call.name == "nonzero":
            plan = self._nonzero_of_few(call)
        self._queue_sizes(call, plan, copies, masks)
        if self.values.are_assumed(masks or filter(is_plain, call.parts())):
            self.decisions.seen_assumed()
        if plan is None and copies is not None and call.name in COMPARING:
            self.decisions.seen_assumed()
            plan = HostCall(call.args, call.kwargs, assumed=True, result=(True,))
            self._queue(copies(True, call.by_name()))  # noqa: FBT003 - True is its result
        self.decisions.answered = plan is not None or self.sizes_queued
        if plan is not None and plan.result is None and copies is not None:
            device = next(tensor.get_device() for tensor in inputs if tensor.is_cuda)
            with OneThread(self.host.full):
                result = self.host.compute(call, plan, device)
            if result is None and call.name in RAISES:
                result = (None,)
            if result is not None:
                plan = plan._replace(result=result)
                self._queue(copies(result[0], call.by_name()))
        return plan

    @without_function_modes
    def _before_read(self, call: OperatorCall) -> HostCall | None:
        """Compute the number that ``item()`` reads; return its operator's call, None if unknown."""
        tensor, self.sizes_queued = call.args[0], False
        if not tensor.is_cuda:
            return None
        host = self.host
        if self.running_here.count >= 0:  # an operator of SELECTS reads a size
            self.values.write(tensor, torch.tensor(self.running_here.count, dtype=tensor.dtype))
            self.running_here.count = -1
        is_answered = host.are_readable([tensor])
        if is_answered and torch.cuda.is_current_stream_capturing():
            host.unknown.captured = True
            is_answered = False  # captured operators do not run yet
        is_answered = is_answered and (host.make_known(tensor) or host.assume(tensor))
        if is_plain(tensor) and self.values.are_assumed([tensor]):
            self.decisions.seen_assumed()
        self.decisions.answered = is_answered
        return HostCall(call.args, call.kwargs) if is_answered else None

    def _nonzero_of_few(self, call: OperatorCall) -> HostCall | None:
        """Return a call of ``nonzero`` with its result, for a large tensor with few nonzeros.

        The result is None if the nonzeros are not recorded, or a CUDA graph is being captured.
        """
        tensor: Tensor = call.args[0]
        few = self.deferred.few_of(tensor)
        if few is None or torch.cuda.is_current_stream_capturing():
            return None
        result = few.nonzero(tensor.shape)
        if few.assumed:
            self.decisions.seen_assumed()
        self._queue(COPIES[call.op._schema.name](result, call.by_name()))
        return HostCall(call.args, call.kwargs, assumed=few.assumed, result=(result,))

    def _note_few(self, tensor: Tensor, few_of: Callable[[], FewNonzeros]) -> bool:
        """Record the nonzero elements of a large result; return False if they are not recorded."""
        if self.host.fits(tensor) or not is_plain(tensor) or not tensor.is_contiguous():
            return False
        if torch.cuda.is_current_stream_capturing():
            return False
        return self.deferred.note_few(tensor, few_of())

    def _queue_sizes(
        self,
        call: OperatorCall,
        plan: HostCall | None,
        copies: Callable[[Any, Arguments], Sequence[Answer]] | None,
        masks: Sequence[Tensor] | None,
    ) -> None:
        """Queue the sizes, or their bounds, that an operator on unknown values reads back."""
        if plan is not None or copies is None or torch.cuda.is_current_stream_capturing():
            return
        if masks and self.host.are_readable(masks):
            if call.name == "_coalesce" and not self.host.could_be_known(masks[0]):
                self.sparse.spread(call.args[0])
            self.sizes_queued = all(
                self.host.make_known(mask) or self.host.assume(mask) for mask in masks
            )
            if self.sizes_queued:
                self._queue(copies(None, call.by_name()))
                return
        mask = masks[0] if masks and masks[0].dtype in BYTE_MASKS else None
        few = self.deferred.few_of(mask) if masks and mask is not None and len(masks) == 1 else None
        share: float | Fraction = 1
        if mask is not None and few is not None:
            share = Fraction(int(few.values.count_nonzero()), mask.numel())
        elif mask is not None and self.host.assumptions.masks_declared:
            share = self.host.assumptions.masks
        elif mask is not None or call.op._schema.name in BOUNDED:
            share = self.host.assumptions.bound
            self.decisions.seen_bound()
        else:
            return
        if few is None or few.assumed:
            self.decisions.seen_assumed()
        self._queue(copies(None, call.by_name(share)))
        self.sizes_queued = True

    def _queue(self, answers: Sequence[Answer]) -> None:
        for forms in answers:
            self._library.queue_copy(*(forms if isinstance(forms, tuple) else (forms,)))

    def after(self, call: OperatorCall) -> None:
        """Record a failure if a CUDA operator did not copy the queued bytes to the host."""
        faults = self._library.drop_queued_copies()
        if faults:
            self.host.unknown.failures.setdefault(
                call.name,
                f"its copies to the host differ from the torch versions that are known: {faults}",
            )

    @without_function_modes
    def finish(self, call: OperatorCall, result: object, plan: HostCall | None) -> None:  # noqa: C901 - each case is short
        """Write an operator's values once the CUDA operator has run, or make them unknown."""
        traits = call.traits
        if traits.carried or traits.reads_back:
            return
        if plan is None and isinstance(result, Tensor) and is_sparse(result):
            self.finish_opened(call, result, self.sparse.prepared(call), ())
            return
        if plan is None and self._defer_or_forget(call, result):
            return
        written = [*filter(is_plain, call.written())]
        outputs = [*filter(is_plain, tensors_in(result))]
        on_device = [tensor for tensor in (*outputs, *written) if tensor.is_cuda]
        if plan is None and not on_device:
            return
        returned = call.inputs() if call.name in RETURNS_ARGUMENTS else ()
        addresses = {tensor.data_ptr() for tensor in (*written, *returned)}
        fresh = [tensor for tensor in outputs if tensor.data_ptr() not in addresses]
        if traits.allocates:
            plan = None
        elif plan is None and not written and all(map(self.host.fits, fresh)):
            # Sizes and branches depend on masks and integers: small ones are computed even if
            # their inputs have to be assumed.
            are_real = all(tensor.is_floating_point() or tensor.is_complex() for tensor in fresh)
            decides = not are_real and all(map(self.host.is_small, fresh))
            plan = self.host.plan(call, call.inputs(), decides=decides, fresh=fresh, result=result)
        if plan is not None:
            device = on_device[0].get_device() if on_device else 0
            with OneThread(self.host.full):
                host = plan.result or self.host.compute(call, plan, device)
                if host is not None and self._write(call, fresh, result, host[0], plan):
                    return
        leave = self._leave_unknown if call.name in ASSUMED or traits.allocates else None
        for tensor in (*fresh, *written):
            if not tensor.is_cuda or self._is_filled(call, tensor):
                continue
            if leave is not None:
                leave(call, tensor)
            else:
                self.forget(tensor.data_ptr(), span(tensor))

    def _defer_or_forget(self, call: OperatorCall, result: object) -> bool:
        """Defer a single large result or mark it as unknown; return False for other results."""
        if type(result) is not Tensor or result.layout is not torch.strided:
            return False
        written = call.written() if call.traits.written else ()
        if written and not (len(written) == 1 and result is written[0]):
            return False
        if result.is_cuda:
            host = self.host
            is_float = result.is_floating_point() or result.is_complex()
            fits = host.fits(result)
            is_computed = fits if is_float or host.full else result.nbytes <= LIMITS.small
            if is_computed and not (written and self.deferred.covers(result, host.budget.largest)):
                return False
            if self.deferred.add(call, result):
                return True
            if fits:
                return False
            if not self._is_filled(call, result):
                self.forget(result.data_ptr(), span(result))
        return True

    def _is_filled(self, call: OperatorCall, tensor: Tensor) -> bool:
        """Return whether a tensor is filled: by the library's plain copy, or with zeros here.

        ``zero_`` is a memset since torch 2.15, but a kernel before, which the library does not run.
        A tensor with gaps is not filled: its ``zero_`` is always a kernel.
        """
        if call.name != "zero_":
            return call.traits.copies and call.copies_bytes_to(tensor)
        if span(tensor) != tensor.nbytes:
            return False
        if not torch.cuda.is_current_stream_capturing():  # captured operators do not run yet
            self._library.fill_zeros(tensor.data_ptr(), tensor.nbytes)
        return True

    def _write(
        self,
        call: OperatorCall,
        fresh: Sequence[Tensor],
        result: object,
        host: object,
        plan: HostCall,
    ) -> bool:
        """Write the host's results; return False if CUDA's have another structure.

        A result that the host lacks, or has in another size, is assumed or becomes unknown.
        """
        pairs = paired(result, host)
        if not isinstance(result, Tensor) and len(pairs) != len(tensors_in(result)):
            return False
        for tensor, copy in plan.copies:
            is_same = tensor.shape == copy.shape  # out= may differ if CUDA's operator resized it
            if not is_same or not self.values.write(tensor, copy, assumed=plan.assumed):
                self.values.forget(tensor)
        are_fresh = set(map(id, fresh))
        for tensor, values in pairs:
            if id(tensor) not in are_fresh:
                continue
            if plan.assumed and self.host.assumptions.is_mask_with_set_share(call, tensor):
                self.host.assume(tensor)
            elif (
                values is None
                or values.shape != tensor.shape
                or not self.values.write(tensor, values, assumed=plan.assumed)
            ):
                self._leave_unknown(call, tensor)
        return True

    def _leave_unknown(self, call: OperatorCall, tensor: Tensor) -> None:
        if call.name == UNSCALES and tensor is call.args[1]:
            return  # gradients are assumed to be finite: the flag stays zero
        values, allocates = None, call.traits.allocates
        if torch.cuda.is_current_stream_capturing():
            pass
        elif not allocates and self.host.is_small(tensor):
            values = self.host.assumptions.of_result(call, tensor)
        elif (
            allocates
            and self.host.fits(tensor)
            and self.running_here.opened is None  # an outer operator may still write to it
            and self.values.accept(tensor)
        ):
            return
        if values is None:
            self.values.forget(tensor)
        else:
            self.values.write(tensor, values, assumed=True)


# -- functions that the native library calls --


def prepared_functions(library: NativeLibrary) -> OperatorFunctions:
    """Return the native library's operator functions, which are the same for all modes."""
    called = CalledFunctions(describe, _finish, _end_budget, _affords, _refund)
    return Interception.prepared(library, called)


def _finish(traits: Traits, args: Any, kwargs: Any, result: object, *host: object) -> None:  # noqa: ANN401 - as the operator
    """Write an operator's values after it has run.

    If the library has computed them, ``host`` is the host's result.
    """
    __tracebackhide__ = True
    mode = ValueMode.current
    if mode is None:
        return
    try:
        with Without(KEYS):
            plan = HostCall((), {}, result=(host[0],)) if host else None
            mode.finish(OperatorCall(traits, args, kwargs or {}), result, plan)
    except BaseException as error:
        del args, kwargs, result, host, plan
        raise_unwrapped(error)
        raise


def _affords(traits: Traits, args: Any, kwargs: Any, result: object, known_bytes: int) -> bool:  # noqa: ANN401 - as the operator
    """Deduct an operator's cost before the library computes it; False if too little is left."""
    mode = ValueMode.current
    call = OperatorCall(traits, args, kwargs or {})
    return mode is not None and mode.host.affords_native(call, result, known_bytes)


def _refund() -> None:
    """Return the last deducted cost to the budget."""
    if ValueMode.current is not None:
        ValueMode.current.host.budget.refund()


def _end_budget() -> None:
    """End a test's budget, because too many results are unknown."""
    if ValueMode.current is not None:
        ValueMode.current.host.budget.end()


def is_of_an_operators_own(address: int) -> bool:
    """Return whether an address that the running operator reads lies outside its arguments.

    On a GPU the operator's kernels have written that memory: values stored for the address belong
    to an earlier tensor whose block PyTorch reuses. The native library calls this on any thread.
    """
    running = Interception.functions.running()
    if running is None:
        frame = sys._getframe().f_back  # None in one of PyTorch's own threads
        runners = {ValueMode._run_closed.__code__, ValueMode._run_opened.__code__}
        if frame is None or frame.f_code not in runners:
            return False
        variables = frame.f_locals
        running = variables["call"].args, variables["call"].kwargs
        if type(variables) is dict:  # a copy before Python 3.13: it would keep the call alive
            variables.clear()
    args, kwargs = running
    return not any(
        0 <= address - part.untyped_storage().data_ptr() < part.untyped_storage().nbytes()
        for tensor in tensors_in([*args, *(kwargs or {}).values()])
        for part in parts_of(tensor)
    )
