"""The mode in which operators' values are computed on the host, over the same addresses.

It is no TorchDispatchMode: while one is active PyTorch's own code takes other ways, with other
memory (``at::isTensorSubclassLike`` is true of every tensor then: gradients are not added in
place), and torch.compile skips frames. The mode is a fallback for a dispatch key that is unused and
lies below autograd: threads of autograd inherit it, and no code of PyTorch's asks for it.
"""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from pytest_gpumem.devices.virtual.library import MOST_BACKED, MOST_COPIED
from pytest_gpumem.devices.virtual.readbacks import Readbacks
from pytest_gpumem.devices.virtual.values.assumptions import FALSE_FOR, TRUE_FOR, Assumptions
from pytest_gpumem.devices.virtual.values.equivalents import EQUIVALENTS
from pytest_gpumem.devices.virtual.values.host_tensors import (
    available_memory,
    is_plain,
    map_arguments,
    over_device_memory,
    paired,
    span,
    tensors_in,
)
from pytest_gpumem.devices.virtual.values.known import KnownValues
from pytest_gpumem.devices.virtual.values.operators import (
    CARRIED,
    OperatorCall,
    let_pass,
    traits_of,
)
from pytest_gpumem.devices.virtual.values.precision import in_types_of_the_host
from pytest_gpumem.devices.virtual.values.sized_outputs import CHECKS, copies_of
from pytest_gpumem.devices.virtual.values.tracing import keep_from
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._ops import OpOverload
    from typing_extensions import Self

    from pytest_gpumem.devices.virtual.library import NativeLibrary
    from pytest_gpumem.devices.virtual.values.sized_outputs import Copies

MOST_FLOATS: Final = 1 << 16
"""elements of the largest tensor of floating-point numbers that is computed: losses, norms, the
router of a layer are no larger; weights and activations are"""
MOST_INTEGERS: Final = 1 << 20
"""elements of the largest mask, and of the largest tensor of whole numbers: a batch of a million
tokens"""
MOST_BYTES: Final = 8 * MOST_INTEGERS
UNSCALES: Final = "_amp_foreach_non_finite_check_and_unscale_"
"""GradScaler's operator, which sets its second argument where a gradient is not finite"""
SHARE_OF_HOST: Final = 0.5
"""of the host's free memory, that values take at most where all are computed"""
MOST_NAMED: Final = 3
"""operators that a note names"""
NO_MEMORY: Final = (torch.OutOfMemoryError, MemoryError)

KEY: Final = "Fake"
"""a dispatch key that is unused, below autograd and the keys of modes and of subclasses"""
_KEY: Final = torch._C._dispatch_key_parse(KEY)
_KEYS: Final = torch._C.DispatchKeySet(_KEY)
_Without = torch._C._ExcludeDispatchKeyGuard


class Plan(NamedTuple):
    """A call of an operator that is computed on the host."""

    args: Any
    """the operator's arguments as CPU tensors"""
    kwargs: Any
    copies: Sequence[tuple[Tensor, Tensor]]
    """arguments that the operator writes, and the CPU tensors that are written in their place"""
    assumed: bool
    """whether any of its inputs was assumed"""
    result: tuple[Any] | None = None
    """where it had to be computed before the CUDA operator ran"""


class ValueMode:
    """Computes operators' values while it is entered, on the threads that inherit it."""

    _registered: Final[list[torch.library.Library]] = []
    _current: ValueMode | None = None

    def __init__(
        self,
        library: NativeLibrary,
        scope: Literal["auto", "full"] = "auto",
        readbacks: Readbacks | None = None,
    ) -> None:
        """Make a mode.

        Args:
            library: the virtual GPU's.
            scope: whether small tensors are computed ("auto"), or all of them ("full").
            readbacks: notes assumed values that the step reads back.
        """
        self._library = library
        self.full = scope == "full"
        self.running = library.running_operators()
        """is more than 0 while an operator runs whose results are written here"""
        self.values = KnownValues(library)
        self.assumptions = Assumptions()
        self.failures: dict[str, str] = {}
        """operators that the host could not compute, and why"""
        self._impossible: set[OpOverload] = set()
        self.readbacks = readbacks or Readbacks()

    def __enter__(self) -> Self:
        """Begin to compute values."""
        if not ValueMode._registered:
            fallback = torch.library.Library("_", "IMPL")
            fallback.fallback(_intercept, KEY)
            ValueMode._registered.extend([fallback, *let_pass(KEY)])
            keep_from(_KEYS)
        ValueMode._current = self
        if self.full:
            most = int(available_memory() * SHARE_OF_HOST)
            self._library.set_value_limits(most, most)
        self._library.compute_values(on=True)
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)  # noqa: FBT003
        return self

    def __exit__(self, *_error: object) -> None:
        """Compute no more."""
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, False)  # noqa: FBT003
        self._library.compute_values(on=False)
        self._library.set_value_limits(MOST_COPIED, MOST_BACKED)
        ValueMode._current = None

    def notes(self) -> list[str]:
        """Return sentences on what was not computed, where all should have been."""
        sentences = []
        if self.full and self.failures:
            reasons = [f"{name}: {reason}" for name, reason in sorted(self.failures.items())]
            unnamed = len(reasons) - MOST_NAMED
            also = f"; and {unnamed} more" if unnamed > 0 else ""
            sentences.append(
                f"results of these operators were not computed, and are unknown "
                f"({'; '.join(reasons[:MOST_NAMED])}{also})"
            )
        if self.full and self.values.refused:
            sentences.append(
                f"{format_size(self.values.refused)} of values did not fit into "
                f"{SHARE_OF_HOST:.0%} of the host's free memory, and are unknown: take a smaller "
                "model or batch, or values='auto'"
            )
        return sentences

    def is_small(self, tensor: Tensor) -> bool:
        """Return whether a tensor is computed."""
        count = tensor.numel()
        if count <= MOST_FLOATS or self.full:
            return True
        return count <= MOST_INTEGERS and not (tensor.is_floating_point() or tensor.is_complex())

    # -- before and after a CUDA operator --

    def before(self, call: OperatorCall) -> Plan | None:
        """Prepare for an operator that reads values or writes its arguments.

        Returns:
            how it is computed on the host; None where it is not, or where that is seen afterwards.
        """
        traits = call.traits
        copies = copies_of(call.op) if traits.sized else None
        reads = traits.reads_back or copies is not None or (traits.copies and call.copies_to_host())
        if not reads and not (traits.written and all(map(self.is_small, call.written()))):
            return None
        inputs = call.inputs()
        if not any(tensor.is_cuda for tensor in inputs):
            return None
        plan = self.plan(call, inputs, decides=reads)
        if not reads:
            return plan
        size = min(tensor.nbytes for tensor in inputs)
        if self.values.are_assumed(inputs):
            self.readbacks.seen_assumed(size)
        else:
            self.readbacks.seen_known(size)
        if plan is None and call.name in {"equal", "allclose"}:
            # Large tensors are taken to be equal: that they are is what a test asks, mostly.
            self.readbacks.seen_assumed(1)
            plan = Plan(call.args, call.kwargs, (), assumed=True, result=(True,))
            if copies is not None:
                self._queue(copies, call, True)  # noqa: FBT003 - its result
            copies = None
        self.readbacks.answered = plan is not None
        if plan is not None and copies is not None:
            device = next(tensor.get_device() for tensor in inputs if tensor.is_cuda)
            result = self.compute(call, plan, device)
            if result is None and call.op._schema.name in CHECKS:
                result = (None,)
            if result is not None:
                plan = plan._replace(result=result)
                self._queue(copies, call, result[0])
        return plan

    def _queue(self, copies: Copies, call: OperatorCall, result: object) -> None:
        for content in copies(result, call.args, call.kwargs):
            self._library.queue_copy(content)

    def after(self, call: OperatorCall) -> None:
        """Note where a CUDA operator did not copy to the host what was queued for it."""
        faults = self._library.drop_queued_copies()
        if faults:
            self.failures.setdefault(
                call.name,
                f"its copies to the host are not those of the torch that was studied: {faults}",
            )

    def plan(self, call: OperatorCall, inputs: Sequence[Tensor], *, decides: bool) -> Plan | None:
        """Return how an operator is computed on the host; None: it is not.

        Args:
            call: the operator's.
            inputs: all tensors among its arguments.
            decides: whether its results are wanted even of unknown values, which are assumed then.
        """
        if not all(is_plain(tensor) and self.is_small(tensor) for tensor in inputs):
            return None
        unread = {id(tensor) for tensor in call.unread()}
        unknown = [
            tensor
            for tensor in inputs
            if id(tensor) not in unread and not self.values.is_known(tensor)
        ]
        if unknown and (not decides or call.name in TRUE_FOR | FALSE_FOR):
            return None
        if torch.cuda.is_current_stream_capturing():
            return None  # what is captured does not happen yet
        for tensor in unknown:
            self.assume(tensor)
        written = {id(tensor) for tensor in call.written()}
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def on_host(tensor: Tensor) -> Tensor:
            host = over_device_memory(tensor)
            if id(tensor) not in written:
                return host
            # The CUDA operator may yet copy unknown bytes there.
            return copies.setdefault(id(tensor), (tensor, host.clone()))[1]

        host_args = map_arguments(call.args, on_host, self._host_generator)
        host_kwargs = map_arguments(call.kwargs, on_host, self._host_generator)
        assumed = self.values.are_assumed(inputs)
        return Plan(host_args, host_kwargs, list(copies.values()), assumed)

    def assume(self, tensor: Tensor) -> None:
        """Give a small tensor, of which nothing is known, plausible values."""
        self.values.write(tensor, self.assumptions.of_tensor(tensor), assumed=True)

    def compute(self, call: OperatorCall, plan: Plan, device: int) -> tuple[Any] | None:
        """Return an operator's result, computed on the host; None where the host cannot."""
        function: Callable[..., Any] = EQUIVALENTS.get(call.op, call.op)
        if call.op in self._impossible:
            return None
        try:
            if call.traits.random:
                with self._seeded(call, device):
                    return (in_types_of_the_host(function, plan.args, plan.kwargs),)
            return (in_types_of_the_host(function, plan.args, plan.kwargs),)
        except NO_MEMORY:
            raise
        except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError) as error:
            reason = str(error).partition("\n")[0]
            if "the 'CPU' backend" in reason:
                reason = "the CPU does not have it"
                self._impossible.add(call.op)
            self.failures.setdefault(call.name, reason)
            return None

    def finish(self, call: OperatorCall, result: object, plan: Plan | None) -> None:  # noqa: C901 - each case is short
        """Write an operator's values once the CUDA operator has run, or make them unknown."""
        if call.name in CARRIED:
            return
        if plan is None and self._forgets(call, result):
            return
        written = call.written()
        outputs = [tensor for tensor in tensors_in(result) if is_plain(tensor)]
        if plan is None and not any(tensor.is_cuda for tensor in (*outputs, *written)):
            return
        addresses = {tensor.data_ptr() for tensor in written if is_plain(tensor)}
        fresh = [tensor for tensor in outputs if tensor.data_ptr() not in addresses]
        if call.traits.allocates:
            plan = None
        elif plan is None and not written and all(map(self.is_small, fresh)):
            decides = not all(tensor.is_floating_point() or tensor.is_complex() for tensor in fresh)
            plan = self.plan(call, call.inputs(), decides=decides)
        if plan is not None:
            host = plan.result
            if host is None:
                on_device = (tensor for tensor in (*outputs, *written) if tensor.is_cuda)
                device = next((tensor.get_device() for tensor in on_device), 0)
                host = self.compute(call, plan, device)
            if host is not None and self._write(call, fresh, result, host[0], plan):
                return
        for tensor in (*fresh, *written):
            if tensor.is_cuda and is_plain(tensor) and not call.copies_bytes_to(tensor):
                self._leave_unknown(call, tensor)

    def _forgets(self, call: OperatorCall, result: object) -> bool:
        """Make the one large tensor unknown that most operators return; False: it returns more.

        These lines are all that a step without small tensors pays for.
        """
        if type(result) is not Tensor or result.layout is not torch.strided:
            return False
        written = call.written() if call.traits.written else ()
        if written and not (len(written) == 1 and result is written[0]):
            return False
        if result.is_cuda:
            if self.is_small(result):
                return False
            if not (call.traits.copies and call.copies_bytes_to(result)):
                self._library.forget(result.data_ptr(), span(result))
        return True

    def _write(
        self, call: OperatorCall, fresh: Sequence[Tensor], result: object, host: object, plan: Plan
    ) -> bool:
        """Write the host's results; False: they are not of the CUDA operator's form.

        A single one that the host has not, or of another size, is unknown.
        """
        pairs = list(paired(result, host))
        if len(pairs) != sum(1 for _ in tensors_in(result)):
            return False
        for tensor, copy in plan.copies:
            if not self.values.write(tensor, copy, assumed=plan.assumed):
                self.values.forget(tensor)
        are_fresh = {id(tensor) for tensor in fresh}
        for tensor, values in pairs:
            if id(tensor) not in are_fresh:
                continue
            if plan.assumed and self.assumptions.are_of_mask(call, tensor):
                self.assume(tensor)
            elif (
                values is None
                or values.shape != tensor.shape
                or not self.values.write(tensor, values, assumed=plan.assumed)
            ):
                self._leave_unknown(call, tensor)
        return True

    def _leave_unknown(self, call: OperatorCall, tensor: Tensor) -> None:
        if call.name == UNSCALES and tensor is call.args[1]:
            return  # no infinity is assumed: the zero of before stays
        if torch.cuda.is_current_stream_capturing() or not self.is_small(tensor):
            values = None
        elif call.traits.allocates and self.values.accept(tensor):
            return
        else:
            values = self.assumptions.of_result(call, tensor)
        if values is None:
            self.values.forget(tensor)
        else:
            self.values.write(tensor, values, assumed=True)

    def look_away(self) -> None:
        """Let every kernel make all values unknown."""
        self._library.compute_values(on=False)

    def look_again(self) -> None:
        """End :meth:`look_away`."""
        self._library.compute_values(on=True)

    # -- random numbers --

    def _host_generator(self, generator: torch.Generator) -> torch.Generator:
        return torch.Generator().manual_seed(_seed(generator))

    @contextmanager
    def _seeded(self, call: OperatorCall, device: int) -> Iterator[None]:
        """Let the host's own generator give what depends on the GPU's, and go on as before."""
        state = torch.default_generator.get_state()
        seed = _seed(torch.cuda.default_generators[device])
        torch.default_generator.manual_seed(seed ^ zlib.crc32(call.name.encode()))
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


def _seed(generator: torch.Generator) -> int:
    """Return a seed that depends on a generator's seed and on how many numbers it has given."""
    mixed = generator.initial_seed() * 0x9E3779B97F4A7C15
    return (mixed + generator.get_offset() * 0xD1B54A32D192ED03) % (1 << 63)


def _intercept(op: OpOverload, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
    """Run a CUDA operator, and compute its values on the host."""
    __tracebackhide__ = True
    with _Without(_KEYS):
        mode = ValueMode._current
        if mode is None:
            return op._op(*args, **kwargs)
        call = OperatorCall(op, traits_of(op), args, kwargs)
        traits = call.traits
        plan = None
        if traits.written or traits.sized or traits.reads_back or traits.copies:
            plan = mode.before(call)
        # It reads memory of its own back, which may lie where something else was known.
        blind = traits.sized and (plan is None or plan.result is None)
        if blind:
            mode.look_away()
        mode.running.value += 1
        try:
            result = op._op(*args, **kwargs)  # no frame of PyTorch's, which would keep arguments
        except BaseException:
            # This frame is in the error's traceback and must not keep tensors alive by it.
            del args, kwargs, plan
            call = call._replace(args=(), kwargs={})
            raise
        finally:
            mode.running.value -= 1
            mode.readbacks.answered = False
            if traits.sized:
                mode.after(call)
            if blind:
                mode.look_again()
        mode.finish(call, result, plan)
        return result
