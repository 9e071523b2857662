"""Every operator that PyTorch runs, handed to a ValueMode before and after its CUDA code.

This is no TorchDispatchMode: while one is active PyTorch's own code takes other ways, with other
memory (``at::isTensorSubclassLike`` is true of every tensor then: gradients are not added in
place), and torch.compile skips frames. It is a kernel of each operator for a dispatch key that is
unused and lies below autograd: threads of autograd inherit it, and no code of PyTorch's asks for
it. A fallback, which operators that are registered later have, is not enough: PyTorch calls a
fallback of Python's neither for tensors of subclasses, nor while a mode is active.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import operator
import sys
import threading
from contextlib import contextmanager
from gc import disable, enable, isenabled
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch._subclasses.functional_tensor
import torch.fx.experimental.proxy_tensor  # with these two, the modes of TRACERS are imported

from pytest_gpumem.collector import Uncounted
from pytest_gpumem.devices.virtual.operator_functions import CalledFunctions
from pytest_gpumem.devices.virtual.values.data_dependent import COPIES, taken_of
from pytest_gpumem.devices.virtual.values.host_tensors import (
    NATIVE,
    describe,
    extents_of,
    parts_of,
    tensors_in,
)
from pytest_gpumem.devices.virtual.values.operators import OperatorCall, register, traits_of
from pytest_gpumem.devices.virtual.values.sparse_operators import opens
from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import CodeType

    from torch._ops import OpOverload

    from pytest_gpumem.devices.virtual.decisions import Decisions
    from pytest_gpumem.devices.virtual.library import NativeLibrary
    from pytest_gpumem.devices.virtual.operator_functions import OperatorFunctions
    from pytest_gpumem.devices.virtual.values.budget import Budget
    from pytest_gpumem.devices.virtual.values.operators import Traits

KEY: Final = "Fake"
"""a dispatch key that is unused and below autograd"""
_KEY: Final = torch._C._dispatch_key_parse(KEY)
_PYTHON: Final = torch._C.DispatchKey.Python
"""the key of modes and of subclasses: above ours, or below it with older versions of torch"""
_PYTHONS: Final = torch._C.DispatchKeySet(_PYTHON)
NUMBER: Final = int(_KEY)  # type: ignore[call-overload] # an enum of C++'s
IS_ABOVE_PYTHON: Final = int(_PYTHON) < NUMBER  # type: ignore[call-overload] # likewise
LOWER_KEY: Final = "FPGA"
"""another unused key, below that of Python: operators inside of a mode or of a subclass are seen by
it where ours is above, as Python's key leaves out all keys above it"""
_LOWER_KEY: Final = torch._C._dispatch_key_parse(LOWER_KEY)
_LOWER_KEYS: Final = torch._C.DispatchKeySet(_LOWER_KEY)
_BELOW_LOWER_KEY: Final = torch._C._dispatch_keyset_full_after(_LOWER_KEY)
_INCLUDED: Final = (_KEY, _LOWER_KEY) if IS_ABOVE_PYTHON else (_KEY,)
KEYS: Final = functools.reduce(operator.or_, map(torch._C.DispatchKeySet, _INCLUDED))
_KEYS_BELOW: Final = torch._C._dispatch_keyset_full_after(_KEY)
_Without = torch._C._ExcludeDispatchKeyGuard
TYPES_OF_NUMBERS: Final = {
    float: torch.float64,
    int: torch.int64,
    bool: torch.bool,
    complex: torch.complex128,
}
"""of Python, and the types of tensors that PyTorch's C++ makes of them (c10::scalar_to_tensor)"""


class Opened:
    """An operator that runs, of which the operators inside are seen."""

    def __init__(self, mode: Computer, call: OperatorCall, outer: Opened | None) -> None:
        self._mode = mode
        self._outer = outer
        self._in_python = call.traits.in_python
        self._writes = mode.thread_writes()
        self._arguments = [*extents_of(call.inputs())]
        self._targets = [*extents_of(call.written())]
        self._written: list[tuple[int, int]] = []
        """addresses that operators inside wrote, from and to, since it ran a kernel of its own"""

    def told(self) -> list[tuple[int, int]]:
        """Return the addresses of sure values, from and to."""
        return self._arguments + self._written

    def begin_inner(self, inputs: Sequence[torch.Tensor] = ()) -> None:
        """Make the values unknown that kernels of its own may have written.

        These are all that were written before, arguments that it changes, and memory that it took
        by itself, where an earlier tensor's values may lie.

        Args:
            inputs: of an operator inside that begins.
        """
        if self._mode.thread_writes() != self._writes:
            for start, end in (*self._written, *self._targets):
                self._mode.forget(start, end - start)
            self._written.clear()
            self._writes = self._mode.thread_writes()
        for start, end in () if self._in_python else extents_of(inputs):
            if not self._tells(start, end):
                self._mode.forget(start, end - start)

    def end_inner(self, call: OperatorCall, result: object) -> None:
        """Note the memory that an operator inside has written."""
        self._writes = self._mode.thread_writes()
        self._written += extents_of([*tensors_in(result), *call.written()])

    def _tells(self, start: int, end: int) -> bool:
        """Return whether the values of some addresses are sure."""
        if any(first <= start and end <= last for first, last in self.told()):
            return True
        return self._outer is not None and self._outer._tells(start, end)


class RunningCode(Protocol):
    """Code of torch.compile's that runs: compilation/graph_values.py has its values."""

    def wants(self, call: OperatorCall) -> bool:
        """Prepare for an operator inside; False: nothing that the operator reads decides."""


class RunningHere(threading.local):
    """The operators that run on this thread."""

    def __init__(self) -> None:
        self.compiled: RunningCode | None = None
        """compiled code that runs, and whose values are written as it has ended"""
        self.opened: Opened | None = None
        """the innermost one that runs of which the operators inside are seen"""
        self.count = -1
        """that such a one will read, where it is known"""


class Computer(Protocol):
    """The computer of values: mode.py's ValueMode, which documents these names."""

    budget: Budget
    count: Callable[[int], None]
    decisions: Decisions
    forget: Callable[[int, int], None]
    sizes_told: bool
    running_here: RunningHere

    def thread_writes(self) -> int:
        """Return how often this thread has launched kernels."""

    def before_opened(self, call: OperatorCall) -> Any:  # noqa: ANN401 - a plan of the computer's own
        """Prepare for an operator that is run with the operators inside of it seen."""

    def finish_opened(
        self,
        call: OperatorCall,
        result: object,
        plan: Any,  # noqa: ANN401 - of before_opened
        told: Sequence[tuple[int, int]],
    ) -> None:
        """Write such an operator's values, but for addresses that are told."""

    def before(self, call: OperatorCall) -> Any:  # noqa: ANN401 - a plan of the computer's own
        """Prepare for an operator; the plan may have its result."""

    def after(self, call: OperatorCall) -> None:
        """Look at the copies to the host that an operator has made."""

    def finish(self, call: OperatorCall, result: object, plan: Any) -> None:  # noqa: ANN401 - of before
        """Write an operator's values."""

    def write_computed(self, call: OperatorCall, result: object, host: object) -> None:
        """Write an operator's values, which the native library has computed on the host."""

    def affords_native(self, call: OperatorCall, result: object, known_bytes: int) -> bool:
        """Return whether the native library may compute an operator, and take its cost off."""

    def look_away(self) -> None:
        """Let every kernel make all values unknown."""

    def look_again(self) -> None:
        """Let kernels keep values known again."""


class Interception:
    """The one mode that sees operators, on the threads that inherit it."""

    mode: Computer | None = None
    functions: OperatorFunctions
    _registered: Final[list[torch.library.Library]] = []

    @classmethod
    def prepared(cls, library: NativeLibrary) -> OperatorFunctions:
        """Return the native library's functions, which are the same for all modes."""
        if not hasattr(cls, "functions"):
            called = CalledFunctions(describe, _finish, _end_budget, _affords, _refund)
            cls.functions = library.operator_functions(NUMBER, called)
            NATIVE.over = cls.functions.over
        return cls.functions

    @classmethod
    def register(cls) -> None:
        """Give every operator the kernels of ours, once a process."""
        if cls._registered:
            LATE.register()
            return
        with Uncounted():  # so many objects begin a pass over all that imports have made
            cls._registered.extend(_registrations())
        LATE.begin()
        keep_from(KEYS)
        let_higher_order_operators_pass(_INCLUDED)
        # torch.library takes the fallback back as Python ends, and no operator runs without it.
        atexit.register(cls.end)

    @classmethod
    def begin(cls, mode: Computer) -> None:
        """Hand operators to a mode from now on."""
        cls.register()
        cls.mode = mode
        _include()
        SEEN_THREADS.begin()

    @classmethod
    def end(cls) -> None:
        """Let operators run by themselves."""
        SEEN_THREADS.end()
        for key in _INCLUDED:
            torch._C._dispatch_tls_set_dispatch_key_included(key, False)  # noqa: FBT003
        cls.mode = None


@contextmanager
def seen_while_tracing() -> Iterator[None]:
    """Have operators on real tensors seen in a block, where tracers are entered but disabled."""
    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    excluded = [key for key in _INCLUDED if is_excluded(key)]
    for key in excluded:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)  # noqa: FBT003
    try:
        yield
    finally:
        for key in excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)  # noqa: FBT003


def _include() -> None:
    """Have this thread's operators seen, and those of threads of autograd's that it begins."""
    for key in _INCLUDED:
        torch._C._dispatch_tls_set_dispatch_key_included(key, True)  # noqa: FBT003


class _SeenThreads:
    """Has the operators seen of threads that Python's code starts, as DataParallel's does.

    Python calls a function that is given to ``threading.setprofile`` as such a thread begins.
    """

    def __init__(self) -> None:
        self._others: Any = None
        """the function that was given before"""

    def begin(self) -> None:
        """Begin with threads that are started from now on."""
        if threading.getprofile() != self._begin_thread:
            self._others = threading.getprofile()
            threading.setprofile(self._begin_thread)

    def end(self) -> None:
        """Leave new threads alone."""
        if threading.getprofile() == self._begin_thread:
            threading.setprofile(self._others)

    def _begin_thread(self, *event: Any) -> None:  # noqa: ANN401 - a frame, an event, its argument
        _include()
        sys.setprofile(self._others)
        if self._others is not None:
            self._others(*event)


SEEN_THREADS: Final = _SeenThreads()


def _intercept(traits: Traits, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
    """Run a CUDA operator, and have a mode compute its values."""
    __tracebackhide__ = True
    mode = Interception.mode
    if mode is None:
        with _Without(KEYS):
            return traits.op._op(*args, **kwargs)
    # What is made here would have Python's collector run earlier than on a GPU. An operator of
    # another library may run Python's code of its own.
    collects = isenabled() and traits.op.namespace == "aten"
    if collects:
        disable()
    try:
        for place in () if traits.takes_numbers else traits.tensors:
            # A loop makes nothing: what is made here the collector counts.
            if place < len(args) and type(args[place]) in TYPES_OF_NUMBERS:
                args = _tensors_of_numbers(traits.tensors, args)
                break
        with _Without(KEYS):
            return _run(mode, OperatorCall(traits, args, kwargs))
    except BaseException as error:
        # This frame is in the error's traceback and must not keep tensors alive by it.
        del args, kwargs
        _raise_unwrapped(error)
        raise
    finally:
        if collects:
            enable()


def _finish(traits: Traits, args: Any, kwargs: Any, result: object, *host: object) -> None:  # noqa: ANN401 - as the operator
    """Have a mode write the values of an operator that has run; the native library calls this.

    Where the library has computed them, ``host`` is the host's result.
    """
    __tracebackhide__ = True
    mode = Interception.mode
    if mode is None:
        return
    try:
        with _Without(KEYS):
            call = OperatorCall(traits, args, kwargs or {})
            if host:
                mode.write_computed(call, result, host[0])
            else:
                mode.finish(call, result, None)
    except BaseException as error:
        del args, kwargs, result, host, call
        _raise_unwrapped(error)
        raise


def _affords(traits: Traits, args: Any, kwargs: Any, result: object, known_bytes: int) -> bool:  # noqa: ANN401 - as the operator
    """Take an operator's cost off a test's budget; the native library asks, and computes it."""
    mode = Interception.mode
    if mode is None:
        return False
    call = OperatorCall(traits, args, kwargs or {})
    return mode.affords_native(call, result, known_bytes)


def _refund() -> None:
    """Give the cost back that was taken last; the native library calls this."""
    if Interception.mode is not None:
        Interception.mode.budget.refund()


def _end_budget() -> None:
    """End a test's budget: so much is unknown; the native library calls this."""
    if Interception.mode is not None:
        Interception.mode.budget.end()


def _intercept_later(op: OpOverload, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
    """Run an operator that was registered after the kernels were."""
    __tracebackhide__ = True
    try:
        return _intercept(traits_of(op), *args, **kwargs)
    except BaseException:
        del args, kwargs
        raise


def _above_python(name: str, kernel: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
    """Have a mode or a subclass handle an operator first, where our key is above theirs."""
    __tracebackhide__ = True
    tensors = tensors_in([*args, *kwargs.values()])
    is_pythons = torch._ops.key_extractor(tensors, _PYTHONS).has(_PYTHON)
    del tensors
    try:
        if is_pythons:
            op = LATE.operator(name)
            return op.redispatch(_PYTHONS, *_numbers_as_tensors(op, args), **kwargs)
        with _Without(_LOWER_KEYS):
            return kernel(*args, **kwargs)
    except BaseException:
        del args, kwargs  # as in _intercept
        raise


def _below_python(_name: str, kernel: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
    """Run an operator inside of a mode or of a subclass, where our key is above theirs."""
    __tracebackhide__ = True
    try:
        with _Without(KEYS):
            return kernel(*args, **kwargs)
    except BaseException:
        del args, kwargs
        raise


def _pass_lower_key(name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
    """Run an operator that our lower key is passed by for: BackendSelect's kernels do not do so."""
    __tracebackhide__ = True
    tensors = tensors_in([*args, *kwargs.values()])
    keys = functools.reduce(operator.or_, map(torch._C._dispatch_keys, tensors))
    return operator_named(name).redispatch(keys & _BELOW_LOWER_KEY, *args, **kwargs)


_AROUND: Final[dict[str, Callable[..., Any]]] = (
    {KEY: _above_python, LOWER_KEY: _below_python} if IS_ABOVE_PYTHON else {}
)
"""what calls an operator's kernel, by the dispatch keys that are included"""
_REGISTERED: Final = (KEY, *(_AROUND.keys() - {KEY}))
"""the dispatch keys for which operators have kernels of ours"""


def _present_operator(name: str) -> OpOverload:
    """Return the operator that has a full name now."""
    namespace, _, operator = name.partition("::")
    packet, _, overload = operator.partition(".")
    op: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return op


@functools.cache
def operator_named(name: str) -> OpOverload:
    """Return the operator of a full name: its object is made here, and most operators have none."""
    return _present_operator(name)


def _registrations() -> list[torch.library.Library]:
    """Register the kernels of all operators, and those of operators that are registered later."""
    fallback = torch.library.Library("_", "IMPL")
    for key in _REGISTERED:
        fallback.fallback(_later(_AROUND.get(key)), key)
    names = torch._C._dispatch_get_all_op_names()
    LATE.known.update(names)
    return [fallback, *register(names, _REGISTERED, _kernel_of)]


class LateOperators:
    """Operators that were registered after ours: where our key is above Python's they need kernels.

    There PyTorch calls no fallback of Python's while a mode is active, and fails ("func !=
    nullptr"). So they get kernels as a run begins, and as a mode is entered.
    """

    def __init__(self) -> None:
        self.known: set[str] = set()
        """all operators with a kernel"""
        self._names: set[str] = set()
        self._seen: tuple[int, ...] = ()
        self._libraries: list[torch.library.Library] = []

    def operator(self, name: str) -> OpOverload:
        """Return an operator: a late one may be another one than it was."""
        return _present_operator(name) if name in self._names else operator_named(name)

    def begin(self) -> None:
        """Look for such operators whenever a mode is entered."""
        if not IS_ABOVE_PYTHON:
            return

        def registering(enter: Callable[[object], Any]) -> Callable[[object], Any]:
            def entered(mode: object) -> Any:  # noqa: ANN401 - as the function
                self.register()
                return enter(mode)

            return entered

        MODES.wrap(torch.utils._python_dispatch, registering)

    def register(self) -> None:
        """Give all operators a kernel that have come since."""
        # Python's definitions, libraries of C++ that it loaded, and modules that may be such.
        sources = torch.library._defs, torch.ops.loaded_libraries, sys.modules
        seen = tuple(map(len, sources))
        if not IS_ABOVE_PYTHON or seen == self._seen:
            return
        self._seen = seen
        names = set(torch._C._dispatch_get_all_op_names()) - self.known
        self.known |= names
        self._names |= names
        self._libraries += register(sorted(names), _REGISTERED, _kernel_of_late)


MODES: Final = Patch(
    "torch.utils._python_dispatch",
    "TorchDispatchMode.__enter__",
    reason="operators that were registered late get kernels before a mode is entered",
    versions="older ones, whose key Python is below Fake",
)
LATE: Final = LateOperators()


def _kernel_of_late(name: str, key: str, *, passes: bool) -> Callable[..., Any]:
    """Return the kernel of an operator that may be registered again, with another schema."""
    if passes:
        return _kernel_of(name, key, passes=True)

    def late(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
        __tracebackhide__ = True
        try:
            return _intercept_later(_present_operator(name), *args, **kwargs)
        except BaseException:
            del args, kwargs
            raise

    around = _AROUND.get(key)
    return late if around is None else functools.partial(around, name, late)


def _later(around: Callable[..., Any] | None) -> Callable[..., Any]:
    if around is None:
        return _intercept_later

    def later(op: OpOverload, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
        __tracebackhide__ = True
        try:
            return around(op.name(), functools.partial(_intercept_later, op), *args, **kwargs)
        except BaseException:
            del args, kwargs
            raise

    return later


def _kernel_of(name: str, key: str, *, passes: bool) -> Callable[..., Any]:
    """Return an operator's kernel.

    Args:
        name: the operator's full name.
        key: the dispatch key that the kernel is for.
        passes: whether the dispatcher is to pass the key by.
    """
    if passes:
        if key == KEY or not torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect"):
            passed: Callable[..., Any] = torch.library.fallthrough_kernel
            return passed
        return functools.partial(_pass_lower_key, name)

    def first(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
        """Run the operator, and have its next calls begin without this function."""
        __tracebackhide__ = True
        traits = traits_of(operator_named(name))
        places = [sum(1 << place for place, _ in at) for at in (traits.written, traits.unread)]
        places.append(sum(1 << place for place in traits.tensors))
        slow = functools.partial(_intercept, traits)
        # The operator's own function takes longer, above all with arguments by name (torch.empty).
        boxed = functools.partial(torch._C._dispatch_call_boxed, traits.op._handle)
        functions = boxed, traits.op._op if traits.takes_numbers else None
        Interception.functions.know(
            kernel, slow, traits, traits.host, *functions, traits.ways, *places
        )
        try:
            return slow(*args, **kwargs)
        except BaseException:
            del args, kwargs
            raise

    kernel = Interception.functions.kernel(first)
    around = _AROUND.get(key)
    return kernel if around is None else functools.partial(around, name, kernel)


def _numbers_as_tensors(op: OpOverload, args: Sequence[Any]) -> list[Any]:
    """Return arguments for a redispatch: PyTorch's own call takes a number in a tensor's place.

    None stays: it stands for a tensor that is not there, such as attention's seed before torch 2.7.
    """
    with torch._C._DisableTorchDispatch(), _Without(KEYS):
        return [
            argument
            if argument is None
            or isinstance(argument, torch.Tensor)
            or str(declared.type) != "Tensor"
            else torch.tensor(argument, device="cpu")
            for argument, declared in zip(args, op._schema.arguments, strict=False)
        ]


def _tensors_of_numbers(places: Sequence[int], args: Sequence[Any]) -> tuple[Any, ...]:
    """Return arguments with tensors in the place of numbers, for an operator that takes no number.

    Where PyTorch's C++ gives an operator a tensor that it has made of a number, as the constants of
    ``torch.jit.trace`` are, kernels in Python get the number (``is_wrapped_number``).
    """
    return tuple(
        torch.tensor(argument, dtype=TYPES_OF_NUMBERS[type(argument)], device="cpu")
        if place in places and type(argument) in TYPES_OF_NUMBERS
        else argument
        for place, argument in enumerate(args)
    )


@functools.cache
def _frames() -> set[CodeType]:
    """Return the functions that run operators."""
    return {function.__code__ for function in (_run_closed, _run_opened)}


def is_of_an_operators_own(address: int) -> bool:
    """Return whether the operator that runs reads memory of its own, and none of its arguments.

    Its kernels would have written that: values known at that address are of an earlier
    tensor, of which PyTorch uses the block again. Called by the native library, on any thread.
    """
    running = Interception.functions.running()
    if running is None:
        frame = sys._getframe(1)
        if frame.f_code not in _frames():
            return False
        variables = frame.f_locals
        running = variables["call"].args, variables["call"].kwargs
        if type(variables) is dict:  # before Python 3.13 a copy, which would keep the call alive
            variables.clear()
    args, kwargs = running
    return not any(
        0 <= address - part.untyped_storage().data_ptr() < part.untyped_storage().nbytes()
        for tensor in tensors_in([*args, *(kwargs or {}).values()])
        for part in parts_of(tensor)
    )


def _raise_unwrapped(error: BaseException) -> None:
    """Raise the error behind a ctypes.ArgumentError, which names it in a text alone."""
    if type(error) is ctypes.ArgumentError:
        for kind in (RecursionError, MemoryError):
            if f": {kind.__name__}: " in str(error):
                raise kind(str(error).partition(f"{kind.__name__}: ")[2]) from error


def _run(mode: Computer, call: OperatorCall) -> Any:  # noqa: ANN401 - as the operator
    """Run an operator that may read values, or write some that are computed."""
    __tracebackhide__ = True
    traits = call.traits
    code = mode.running_here.compiled
    if code is not None and not code.wants(call):
        return _run_unseen(call)
    is_opened = (traits.opened or traits.may_open) and opens(traits, call.inputs())
    run = _run_opened if is_opened and traits.op._schema.name not in COPIES else _run_closed
    try:
        if traits.copies and call.copies_floats_to_host():
            with mode.decisions.purpose("kept"):
                return run(mode, call)
        return run(mode, call)
    except BaseException:
        del call
        raise


def _run_unseen(call: OperatorCall) -> Any:  # noqa: ANN401 - as the operator
    """Run an operator whose values nobody looks at."""
    __tracebackhide__ = True
    try:
        return call.op._op(*call.args, **call.kwargs)
    except BaseException:
        del call
        raise


def _run_closed(mode: Computer, call: OperatorCall) -> Any:  # noqa: ANN401 - as the operator
    """Run an operator of which nothing inside is seen."""
    __tracebackhide__ = True
    op, traits, args, kwargs = call.op, call.traits, call.args, call.kwargs
    here, plan = mode.running_here, None
    if here.opened is not None:
        here.opened.begin_inner(call.inputs())
    counts = mode.decisions.counts if traits.data_dependent else (0, 0)
    if traits.written or traits.data_dependent or traits.reads_back or traits.copies:
        plan = mode.before(call)
    # It reads memory of its own back, which may lie where something else was known.
    blind = traits.data_dependent and not mode.sizes_told and (plan is None or plan.result is None)
    if blind:
        mode.look_away()
    mode.count(1)
    try:
        result = op._op(*args, **kwargs)
    except BaseException:
        del args, kwargs, plan
        call = call.without_arguments()
        raise
    finally:
        mode.count(-1)
        mode.decisions.answered = False
        if blind:
            mode.look_again()
        if traits.data_dependent:
            mode.after(call)  # last: it may fail
    if traits.data_dependent and mode.decisions.counts != counts:
        taken = taken_of(op._schema.name, args, result)
        if taken is not None:
            mode.decisions.seen_taken(*taken, counts)
    mode.finish(call, result, plan)
    if here.opened is not None:
        here.opened.end_inner(call, result)
    return result


def _run_opened(mode: Computer, call: OperatorCall) -> Any:  # noqa: ANN401 - as the operator
    """Run an operator of which those inside are handed to the mode as well."""
    __tracebackhide__ = True
    op, args, kwargs = call.op, call.args, call.kwargs
    here = mode.running_here
    outer = here.opened
    if outer is not None:
        outer.begin_inner(call.inputs())
    plan = mode.before_opened(call)
    numbers_as_tensors = _numbers_as_tensors(op, args)
    keys = _KEYS_BELOW & functools.reduce(
        operator.or_, (torch._C._dispatch_keys(tensor) for tensor in call.inputs())
    )
    opened = here.opened = Opened(mode, call, outer)
    mode.count(1)
    Interception.functions.count_opened(1)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)  # noqa: FBT003
    try:
        result = op._handle.redispatch_boxed(keys, *numbers_as_tensors, **kwargs)
    except BaseException:
        del args, kwargs, numbers_as_tensors, plan
        call = call.without_arguments()
        raise
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, True)  # noqa: FBT003
        Interception.functions.count_opened(-1)
        here.opened, here.count = outer, -1
        mode.count(-1)
    opened.begin_inner()
    mode.finish_opened(call, result, plan, opened.told())
    if outer is not None:
        outer.end_inner(call, result)
    return result


# -- modes of PyTorch's that trace: their tensors have no values, and pass the values' key by --

TRACERS: Final = Patch(
    "torch",
    *(
        f"{tracer}.{method}"
        for tracer in (
            "_subclasses.fake_tensor.FakeTensorMode",
            "_subclasses.functional_tensor.FunctionalTensorMode",
            "fx.experimental.proxy_tensor.ProxyTorchDispatchMode",
        )
        for method in ("__enter__", "__exit__", "__torch_dispatch__")
    ),
    reason="tensors that are traced have no values, and a fallback of Python's fails beside a mode",
)
HIGHER_ORDER: Final = Patch(
    "torch._ops",
    "_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS",
    reason="higher-order operators have no kernel for the key of values",
)


def keep_from(keys: torch._C.DispatchKeySet) -> None:
    """Have the tracers pass some dispatch keys by, from now on.

    A Python fallback fails beside them (``func != nullptr``, torch/csrc/utils/python_dispatch.cpp,
    as PyTorch looks for a function of the one operator). The keys are left out while a tracer is
    entered, and only then: torch.compile's guards compare a thread's keys, which must be the same
    when it makes them and when its code runs.
    """
    methods = TRACERS.values(torch)
    TRACERS.put(
        torch,
        {
            name: _WRAPPERS[name.rpartition(".")[2]](keys, method)
            for name, method in methods.items()
        },
    )


def let_higher_order_operators_pass(keys: Iterable[torch._C.DispatchKey]) -> None:
    """Have higher-order operators pass keys by: they have no kernel for them, and no fallback.

    These are cond, flex_attention, DTensor's random operators. The operators inside of them are
    seen by themselves.
    """
    HIGHER_ORDER.wrap(torch._ops, lambda passed: [*passed, *keys])  # of new ones
    for higher_order in torch._ops._higher_order_ops.values():
        for key in keys:
            higher_order.fallthrough(key)


_guards: Final[list[Any]] = []
"""of the tracers that are entered, the innermost last"""


def _entering(keys: torch._C.DispatchKeySet, enter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(enter)
    def entered(mode: object) -> Any:  # noqa: ANN401 - as the function
        result = enter(mode)
        guard = torch._C._ExcludeDispatchKeyGuard(keys)
        guard.__enter__()
        _guards.append(guard)
        return result

    return entered


def _leaving(_keys: torch._C.DispatchKeySet, leave: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(leave)
    def left(*args: Any) -> Any:  # noqa: ANN401 - as the function
        if _guards:
            _guards.pop().__exit__(None, None, None)
        return leave(*args)

    return left


def _without(keys: torch._C.DispatchKeySet, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the function
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return function(*args, **kwargs)

    return traced


_WRAPPERS: Final = {"__enter__": _entering, "__exit__": _leaving, "__torch_dispatch__": _without}
