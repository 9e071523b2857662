"""Every operator that PyTorch runs, handed to a ValueMode before and after its CUDA code.

This is no TorchDispatchMode: while one is active PyTorch's own code takes other ways, with other
memory (``at::isTensorSubclassLike`` is true of every tensor then: gradients are not added in
place), and torch.compile skips frames. It is a fallback for a dispatch key that is unused and lies
below autograd: threads of autograd inherit it, and no code of PyTorch's asks for it.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from pytest_gpumem.devices.virtual.library import MOST_COPIED
from pytest_gpumem.devices.virtual.values.host_tensors import (
    NUMBERS,
    PLAIN,
    parts_of,
    ranges_of,
    span,
    tensors_in,
)
from pytest_gpumem.devices.virtual.values.operators import OperatorCall, let_pass, traits_of
from pytest_gpumem.devices.virtual.values.short_ways import makes_new
from pytest_gpumem.devices.virtual.values.sized_outputs import taken_of
from pytest_gpumem.devices.virtual.values.tracing import keep_from

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

    from pytest_gpumem.devices.virtual.readbacks import Readbacks
    from pytest_gpumem.devices.virtual.values.short_ways import ShortWay

KEY: Final = "Fake"
"""a dispatch key that is unused, below autograd and the keys of modes and of subclasses"""
_KEY: Final = torch._C._dispatch_key_parse(KEY)
NUMBER: Final = int(_KEY)  # type: ignore[call-overload] # an enum of C++'s
_KEYS: Final = torch._C.DispatchKeySet(_KEY)
FLOATS: Final = {torch.float32, torch.float16, torch.bfloat16, torch.float64}
_STRIDED: Final = torch.strided
_Without = torch._C._ExcludeDispatchKeyGuard


class Computer(Protocol):
    """The computer of values: mode.py's ValueMode, which documents these names."""

    full: bool
    begins: Callable[[], None]
    ended: Callable[..., None]
    count: Callable[[int], None]
    readbacks: Readbacks
    forget: Callable[[int, int], None]
    short_ways: dict[object, ShortWay]
    sizes_told: bool

    def before(self, call: OperatorCall) -> Any:  # noqa: ANN401 - a plan of the computer's own
        """Prepare for an operator; the plan may have its result."""

    def after(self, call: OperatorCall) -> None:
        """Look at the copies to the host that an operator has made."""

    def finish(self, call: OperatorCall, result: object, plan: Any) -> None:  # noqa: ANN401 - of before
        """Write an operator's values."""

    def look_away(self) -> None:
        """Let every kernel make all values unknown."""

    def look_again(self) -> None:
        """End that."""


class Interception:
    """The one mode that sees operators, on the threads that inherit it."""

    mode: Computer | None = None
    _registered: Final[list[torch.library.Library]] = []

    @classmethod
    def begin(cls, mode: Computer) -> None:
        """Hand operators to a mode from now on."""
        if not cls._registered:
            fallback = torch.library.Library("_", "IMPL")
            fallback.fallback(_intercept, KEY)
            cls._registered.extend([fallback, *let_pass(KEY)])
            keep_from(_KEYS)
            # torch.library takes the fallback back as Python ends, and no operator runs without it.
            atexit.register(cls.end)
        cls.mode = mode
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)  # noqa: FBT003

    @classmethod
    def end(cls) -> None:
        """Let operators run by themselves."""
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, False)  # noqa: FBT003
        cls.mode = None


def _intercept(op: OpOverload, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
    """Run a CUDA operator, and have a mode compute its values.

    Most operators of a step write one large tensor, which is unknown then. They take the short way,
    which is all that a step without small tensors pays for: each attribute that it reads counts.
    """
    __tracebackhide__ = True
    mode = Interception.mode
    if mode is None:
        with _Without(_KEYS):
            return op._op(*args, **kwargs)
    is_running = False
    try:
        operator = op._op  # a hash of OpOverload's own, and a call, run Python's code
        is_short = mode.short_ways.get(operator)
        if is_short is None or not (is_short is makes_new or is_short(args, kwargs)):
            with _Without(_KEYS):
                return _run(mode, op, args, kwargs)
        is_running = True
        mode.begins()
        result = operator(*args, **kwargs)
        if type(result) in PLAIN and result.layout is _STRIDED:
            nbytes = result.nbytes
            if nbytes > MOST_COPIED and result.dtype in FLOATS and result.is_cuda:
                if not result.is_contiguous():
                    nbytes = span(result)
                address = result.data_ptr()
                is_running = False
                mode.ended(address, nbytes)
                return result
            is_done = not result.is_cuda
        else:
            is_done = type(result) in NUMBERS
        several = type(result) is tuple and is_short is makes_new
        ranges = ranges_of(result) if several else ()
        is_running = False
        mode.ended(*ranges)
        if not (is_done or ranges):
            with _Without(_KEYS):
                mode.finish(OperatorCall(op, traits_of(op), args, kwargs), result, None)
    except BaseException as error:
        if is_running:
            mode.ended()
        # This frame is in the error's traceback and must not keep tensors alive by it.
        del args, kwargs
        _raise_unwrapped(error)
        raise
    return result


def is_of_an_operators_own(address: int) -> bool:
    """Return whether the operator that runs reads memory of its own, and none of its arguments.

    Its kernels wrote there, which do not run: what was known at that address is of an earlier
    tensor, whose block PyTorch uses again. Called by the native library, on any thread.
    """
    frame = sys._getframe(1)
    if frame.f_code not in {_intercept.__code__, _run.__code__}:
        return False
    variables = frame.f_locals
    arguments = [*variables.get("args", ()), *variables.get("kwargs", {}).values()]
    if type(variables) is dict:  # before Python 3.13 a copy, which would keep the arguments alive
        variables.clear()
    return not any(
        0 <= address - part.untyped_storage().data_ptr() < part.untyped_storage().nbytes()
        for tensor in tensors_in(arguments)
        for part in parts_of(tensor)
    )


def _raise_unwrapped(error: BaseException) -> None:
    """Raise the error behind a ctypes.ArgumentError, which names it in a text alone."""
    if type(error) is ctypes.ArgumentError:
        for kind in (RecursionError, MemoryError):
            if f": {kind.__name__}: " in str(error):
                raise kind(str(error).partition(f"{kind.__name__}: ")[2]) from error


def _run(mode: Computer, op: OpOverload, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
    """Run an operator that may read values, or write some that are computed."""
    __tracebackhide__ = True
    traits = traits_of(op)
    if not mode.full and traits.short_way is not None:
        mode.short_ways[op._op] = traits.short_way
    call = OperatorCall(op, traits, args, kwargs)
    plan = None
    counts = mode.readbacks.counts if traits.sized else (0, 0)
    if traits.written or traits.sized or traits.reads_back or traits.copies:
        plan = mode.before(call)
    # It reads memory of its own back, which may lie where something else was known.
    blind = traits.sized and not mode.sizes_told and (plan is None or plan.result is None)
    if blind:
        mode.look_away()
    mode.count(1)
    try:
        result = op._op(*args, **kwargs)
    except BaseException:
        del args, kwargs, plan
        call = call._replace(args=(), kwargs={})
        raise
    finally:
        mode.count(-1)
        mode.readbacks.answered = False
        if blind:
            mode.look_again()
        if traits.sized:
            mode.after(call)  # last: it may fail
    if traits.sized and mode.readbacks.counts != counts:
        taken = taken_of(op._schema.name, args, result)
        if taken is not None:
            mode.readbacks.seen_taken(*taken, counts)
    mode.finish(call, result, plan)
    return result
