"""Computes operators on the host, within a test's budget.

If the result of an operator decides sizes or branches, small unknown inputs are assumed.
"""

from __future__ import annotations

import functools
import zlib
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from pytest_gpumem.devices.virtual.library import LIMITS
from pytest_gpumem.devices.virtual.values.budget import Budget
from pytest_gpumem.devices.virtual.values.deferred import DeferredValues
from pytest_gpumem.devices.virtual.values.host_tensors import (
    available_memory,
    in_types_of_the_host,
    is_plain,
    over_device_memory,
    tensors_in,
)
from pytest_gpumem.devices.virtual.values.known import Assumptions, KnownValues
from pytest_gpumem.devices.virtual.values.operators import (
    FALSE_FOR,
    TRUE_FOR,
    HostCall,
    OperatorCall,
    on_host,
)
from pytest_gpumem.devices.virtual.values.unknown_results import SHARE_OF_HOST, UnknownResults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.devices.virtual.library import NativeLibrary
    from pytest_gpumem.devices.virtual.operator_functions import OperatorFunctions

P = ParamSpec("P")
R = TypeVar("R")

MAX_FLOATS: Final = 1 << 16
"""maximum number of elements of a floating-point tensor whose values are assumed: losses, norms and
a layer's router outputs have fewer, weights and activations have more"""
PASSED_ON: Final = (torch.OutOfMemoryError, MemoryError, RecursionError)
"""exceptions that are raised again, because they do not mean that the CPU lacks an operator: memory
or stack ran out"""


def without_function_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function to run without the program's TorchFunctionModes, such as a default device.

    These modes are active if no Python call led to the operator: in TorchScript, for example.
    """

    @functools.wraps(function)
    def unseen(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._len_torch_function_stack():
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return unseen


class OneThread:
    """Limits the host to one thread, for small tensors.

    A second thread saves 50 us in a cosine of 65,536 numbers, and costs 2 ms on a busy machine.
    """

    __slots__ = ("_threads",)

    def __init__(self, full: bool) -> None:  # noqa: FBT001 - for each operator: a name takes time
        """Limit the threads, unless ``full``: all values are computed, also of large tensors."""
        self._threads = 1 if full else torch.get_num_threads()

    def __enter__(self) -> None:
        if self._threads > 1:
            torch.set_num_threads(1)

    def __exit__(self, *_error: object) -> None:
        if self._threads > 1:
            torch.set_num_threads(self._threads)


class HostComputer:
    """Decides which operators the host computes, and computes them."""

    def __init__(self, library: NativeLibrary, functions: OperatorFunctions, *, full: bool) -> None:
        """Start with a whole budget.

        Args:
            library: the virtual GPU's library.
            functions: the native library's operator functions.
            full: whether all values are computed, without a budget.
        """
        self._library = library
        self._known_bytes = functions.known_bytes
        self.full = full
        self.budget = Budget(library, full=full)
        self.values = KnownValues(library, functions.put)
        self.deferred = DeferredValues(library, self.values, self.computed, self._affords_sorting)
        self.assumptions = Assumptions()
        self.unknown = UnknownResults()
        self._lost_before = library.lost_to_kernels()
        self._impossible: set[str] = set()
        """full names of operators that the CPU does not support"""

    def begin(self) -> None:
        """Reset what the last test left, except for known values."""
        self.unknown = UnknownResults()
        self._lost_before = self._library.lost_to_kernels()
        self.values.refused = 0
        self.values.drop_stale()
        self.assumptions = Assumptions()
        self.renew()

    @property
    def lost_to_kernels(self) -> bool:
        """Whether kernels outside of PyTorch's operators have made values unknown in this run."""
        return self._library.lost_to_kernels() > self._lost_before

    def notes(self, *, decided: bool) -> list[str]:
        """Return sentences on unknown results; ``decided``: the step branched on unknown values."""
        refused, lost = self.values.refused + self.budget.refused, self.lost_to_kernels
        return self.unknown.notes(full=self.full, decided=decided, refused=refused, lost=lost)

    def renew(self) -> None:
        """Reset the budget, and restart the sequence of assumed values, before a run."""
        self.budget = Budget(self._library, full=self.full)
        self.assumptions.begin_again()
        if self.full:
            most = int(available_memory() * SHARE_OF_HOST)
            self._library.set_value_limits(most, 1 << 62, most)
        else:
            self._library.set_value_limits(LIMITS.largest, LIMITS.budget, LIMITS.backed)

    @contextmanager
    def separately(self) -> Iterator[None]:
        """Give the block a budget of its own, and restore the test's afterwards."""
        budget, rest = self.budget, self._library.value_budget()
        self.renew()
        try:
            yield
        finally:
            self.budget = budget
            if not self.full:
                self._library.set_value_limits(budget.largest, rest, LIMITS.backed)

    def is_small(self, tensor: Tensor) -> bool:
        """Return whether a tensor is small enough that unknown values of it are assumed."""
        if self.full:
            return True
        if tensor.nbytes > LIMITS.small:
            return False
        is_float = tensor.is_floating_point() or tensor.is_complex()
        return not is_float or tensor.numel() <= MAX_FLOATS

    def fits(self, tensor: Tensor) -> bool:
        """Return whether a tensor is small enough to be computed from known inputs."""
        return self.full or tensor.nbytes <= self.budget.largest

    def could_be_known(self, tensor: Tensor) -> bool:
        """Return whether a tensor is known, assumed, or deferred (computed once it is read)."""
        return self.values.is_known(tensor) or self.deferred.covers(tensor)

    def are_readable(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these tensors are small, or known and not too large to read."""
        large = [tensor for tensor in tensors if not (is_plain(tensor) and self.is_small(tensor))]
        if not all(map(is_plain, large)):
            return False
        too_large = (tensor.nbytes for tensor in large if not self.fits(tensor))
        return sum(too_large) <= LIMITS.backed_small and all(map(self.could_be_known, large))

    @without_function_modes
    def make_known(self, tensor: Tensor) -> bool:
        """Compute a tensor unless it is known; return False if it cannot be computed."""
        return self.values.is_known(tensor) or self.deferred.computed(tensor)

    def reads(self, tensor: Tensor) -> bool:
        """Compute a tensor that is to be read; return False if it is too large or unknown."""
        return self.are_readable([tensor]) and self.make_known(tensor)

    def assume(self, tensor: Tensor) -> bool:
        """Write assumed values to a small unknown tensor; return False if host memory is short."""
        return self.values.write(tensor, self.assumptions.of_tensor(tensor), assumed=True)

    def plan(
        self,
        call: OperatorCall,
        inputs: Sequence[Tensor],
        *,
        decides: bool,
        fresh: Sequence[Tensor] = (),
        result: object = None,
    ) -> HostCall | None:
        """Return how to compute an operator on the host; None if it is not computed.

        Args:
            call: the operator's call.
            inputs: all tensors among its arguments.
            decides: whether sizes or branches depend on the result: then unknown inputs are
                assumed.
            fresh: the new tensors among the operator's results, if it has run.
            result: the operator's result, if it has run.
        """
        known_bytes = self._known_bytes(call.args, call.kwargs)
        read: Sequence[Tensor] = ()
        written = call.written()
        if known_bytes is None:
            unread = {id(tensor) for tensor in call.unread()}
            read = [tensor for tensor in inputs if id(tensor) not in unread]
            assumes = decides and call.name not in TRUE_FOR | FALSE_FOR
            if not (
                all(map(is_plain, inputs))
                and self.are_readable(read)
                and all(map(self.fits, written))
                and (assumes or all(map(self.could_be_known, read)))
            ):
                return None
        if torch.cuda.is_current_stream_capturing():
            self.unknown.captured = True
            return None  # captured operators do not run yet
        if not self.budget.affords(call, inputs, [*fresh, *written], result, known_bytes):
            return None
        if not all(self.make_known(tensor) or self.assume(tensor) for tensor in read):
            return None
        assumed = self.values.are_assumed(inputs)

        def generator(given: torch.Generator) -> torch.Generator:
            return torch.Generator().manual_seed(_seed(given))

        return on_host(call, over_device_memory, generator, assumed=assumed)

    @without_function_modes
    def compute(self, call: OperatorCall, plan: HostCall, device: int) -> tuple[Any] | None:
        """Compute an operator on the host; return its result in a tuple, None if that failed."""
        function, full_name = call.traits.host, call.op._name
        if full_name in self._impossible:
            return None
        try:
            with self._seeded(call, device) if call.traits.random else nullcontext():
                return (in_types_of_the_host(function, plan.args, plan.kwargs),)
        except PASSED_ON:
            raise
        except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError) as error:
            reason = str(error).partition("\n")[0]
            if "the 'CPU' backend" in reason:
                reason = "the CPU does not have it"
                self._impossible.add(full_name)
            self.unknown.failures.setdefault(call.name, reason)
            return None

    def _affords_sorting(self, elements: int) -> bool:
        return self.budget.affords_sorting(elements)  # the current one: renew() replaces it

    def computed(self, call: OperatorCall, args: Any, kwargs: Any) -> tuple[Any] | None:  # noqa: ANN401 - an operator's
        """Compute an operator from host arguments; None if it is too costly, or failed."""
        affords, inputs = self.budget.affords, call.inputs()
        if call.traits.in_python and not affords(call, inputs, call.written(), None):
            return None
        with OneThread(self.full):
            return self.compute(call, HostCall(args, kwargs), 0)

    def writes_computed(self, written: Sequence[Tensor]) -> bool:
        """Return whether all written tensors can be computed, and none is deferred.

        A deferred tensor that is small enough is computed, and then no longer deferred.
        """
        for tensor in written:
            if not (is_plain(tensor) and self.fits(tensor)):
                return False
        if not written:
            return False
        if len(written) > 1 or not self.deferred.covers(written[0]):
            return True
        is_deferred = self.deferred.covers(written[0], self.budget.largest)
        return not is_deferred and self.deferred.computed(written[0])

    def affords_native(self, call: OperatorCall, result: object, known_bytes: int) -> bool:
        """Return whether the native library may compute an operator; if so, deduct its cost.

        Args:
            call: the operator's call, with known arguments only.
            result: the operator's new tensors; None if it writes its arguments and has not run.
            known_bytes: bytes of the operator's arguments.
        """
        written = call.written()
        if written and not self.writes_computed(written):
            return False
        made = tensors_in(result)
        return self.budget.affords(call, call.inputs(), [*made, *written], result, known_bytes)

    @contextmanager
    def _seeded(self, call: OperatorCall, device: int) -> Iterator[None]:
        """Seed the host's own generator from the GPU's, and restore it afterwards."""
        state = torch.default_generator.get_state()
        seed = _seed(torch.cuda.default_generators[device])
        torch.default_generator.manual_seed(seed ^ zlib.crc32(call.name.encode()))
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


def _seed(generator: torch.Generator) -> int:
    """Return a seed that depends on a generator's seed and on how many numbers it has drawn."""
    mixed = generator.initial_seed() * 0x9E3779B97F4A7C15
    return (mixed + generator.get_offset() * 0xD1B54A32D192ED03) % (1 << 63)
