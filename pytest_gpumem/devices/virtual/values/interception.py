"""Passes the operators that PyTorch runs to a ValueMode, which runs them and computes their values.

This is not a TorchDispatchMode: while one is active PyTorch's own code takes other paths, which
allocate other memory (``at::isTensorSubclassLike`` is then true of every tensor: gradients are not
added in place), and torch.compile skips frames. Instead each operator has a kernel for an unused
dispatch key below autograd: autograd's threads inherit the key, and no PyTorch code checks for it.
A fallback kernel, which operators registered later get, is not enough: PyTorch calls a Python
fallback neither for tensor subclasses, nor while a mode is active.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import sys
import threading
from contextlib import contextmanager, nullcontext
from gc import disable, enable, isenabled
from typing import TYPE_CHECKING, Any, Final

import torch
import torch._subclasses.functional_tensor
import torch.fx.experimental.proxy_tensor  # these two import the modes of TRACERS
from torch._C import DisableTorchFunctionSubclass

from pytest_gpumem.devices.virtual.values.before_torch_2_13 import LATE, around, fallback, passed
from pytest_gpumem.devices.virtual.values.dispatch_keys import (
    INCLUDED,
    KEYS,
    NAMES,
    NUMBER,
    Without,
    operator_named,
    present_operator,
)
from pytest_gpumem.devices.virtual.values.host_tensors import NATIVE
from pytest_gpumem.devices.virtual.values.operators import OperatorCall, register, traits_of
from pytest_gpumem.patches import Patch, wrapped_by
from pytest_gpumem.recording.collector import Uncounted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._ops import OpOverload

    from pytest_gpumem.devices.virtual.library import NativeLibrary
    from pytest_gpumem.devices.virtual.operator_functions import CalledFunctions, OperatorFunctions
    from pytest_gpumem.devices.virtual.values.operators import Traits

TYPES_OF_NUMBERS: Final = {
    float: torch.float64,
    int: torch.int64,
    bool: torch.bool,
    complex: torch.complex128,
}
"""Python's number types, and the dtypes of tensors that PyTorch's C++ creates from them
(c10::scalar_to_tensor)"""


class Interception:
    """Passes operators to the one active mode, on the threads that inherit the dispatch key."""

    run: Callable[[OperatorCall], Any] | None = None
    """the mode's method that runs an operator; None if no values are computed"""
    functions: OperatorFunctions
    _registered: Final[list[torch.library.Library]] = []

    @classmethod
    def prepared(cls, library: NativeLibrary, called: CalledFunctions) -> OperatorFunctions:
        """Return the native library's functions, which are the same for all modes."""
        if not hasattr(cls, "functions"):
            cls.functions = library.operator_functions(NUMBER, called)
            NATIVE.over = cls.functions.over
        return cls.functions

    @classmethod
    def register(cls) -> None:
        """Register our kernels for every operator, once per process."""
        if cls._registered:
            LATE.register()
            return
        names = torch._C._dispatch_get_all_op_names()
        with Uncounted():  # so many new objects trigger a garbage collection of everything imported
            later = torch.library.Library("_", "IMPL")
            for key in NAMES:
                later.fallback(fallback(key, _intercept_later), key)
            cls._registered.extend([later, *register(names, NAMES, _kernel_of)])
        LATE.begin(names, _kernel_of_late)
        keep_from_tracers()
        let_higher_order_operators_pass()
        # torch.library removes the fallback at Python's exit, and no operator runs without it.
        atexit.register(cls.end)

    @classmethod
    def begin(cls, run: Callable[[OperatorCall], Any]) -> None:
        """Start passing operators to a mode."""
        cls.register()
        cls.run = run
        _include()
        SEEN_THREADS.begin()

    @classmethod
    def end(cls) -> None:
        """Stop passing operators to the mode."""
        SEEN_THREADS.end()
        for key in INCLUDED:
            torch._C._dispatch_tls_set_dispatch_key_included(key, False)  # noqa: FBT003
        cls.run = None


@contextmanager
def seen_while_tracing() -> Iterator[None]:
    """Intercept operators on real tensors in the block, although a tracer is active around it.

    A tracer excludes our keys from the thread; PyTorch's code in the block runs with the tracer
    disabled.
    """
    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    excluded = [key for key in INCLUDED if is_excluded(key)]
    for key in excluded:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)  # noqa: FBT003
    try:
        yield
    finally:
        for key in excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)  # noqa: FBT003


def _include() -> None:
    """Intercept operators of this thread, and of autograd threads that it starts."""
    for key in INCLUDED:
        torch._C._dispatch_tls_set_dispatch_key_included(key, True)  # noqa: FBT003


class _SeenThreads:
    """Intercepts the operators of threads that Python code starts, as DataParallel does.

    Python calls the function set by ``threading.setprofile`` when such a thread starts.
    """

    def __init__(self) -> None:
        self._others: Any = None
        """the profile function that was set before ours; None without one"""

    def begin(self) -> None:
        """Intercept the operators of threads that start from now on."""
        if threading.getprofile() != self._begin_thread:
            self._others = threading.getprofile()
            threading.setprofile(self._begin_thread)

    def end(self) -> None:
        """Stop intercepting in new threads."""
        if threading.getprofile() == self._begin_thread:
            threading.setprofile(self._others)

    def _begin_thread(self, *event: Any) -> None:  # noqa: ANN401 - a frame, an event, its argument
        _include()
        sys.setprofile(self._others)
        if self._others is not None:
            self._others(*event)


SEEN_THREADS: Final = _SeenThreads()


def _intercept(traits: Traits, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
    """Run a CUDA operator, and let a mode compute its values."""
    __tracebackhide__ = True
    run = Interception.run
    if run is None:
        with Without(KEYS):
            return _without_none(traits.op._op(*args, **kwargs))
    # Objects created here would make Python's garbage collector run earlier than on a GPU: disable
    # it. It stays enabled for other libraries' operators, which may run Python code of their own.
    is_own = traits.op.namespace == "aten"
    collects = is_own and isenabled()
    if collects:
        disable()
    try:
        for place in () if traits.takes_numbers else traits.tensors:
            # A plain loop, which creates no objects that the garbage collector counts.
            if place < len(args) and type(args[place]) in TYPES_OF_NUMBERS:
                args = _tensors_of_numbers(traits.tensors, args)
                break
        # The calls made here must not trigger a subclass's __torch_function__, which is for the
        # program's calls: C++ calls operators on saved tensors of subclasses, too.
        with Without(KEYS), DisableTorchFunctionSubclass() if is_own else nullcontext():
            return _without_none(run(OperatorCall(traits, args, kwargs)))
    except BaseException as error:
        # This frame is in the error's traceback, which must not keep tensors alive.
        del args, kwargs
        raise_unwrapped(error)
        raise
    finally:
        if collects:
            enable()


def _without_none(result: Any) -> Any:  # noqa: ANN401 - as the operator
    """Replace undefined tensors in an operator's list of results by empty ones.

    In Python they are None, which PyTorch accepts from a Python kernel in place of a tensor, but
    not in a list of tensors. FlashAttention 3 returns such a list.
    """
    if type(result) is list:
        for place, tensor in enumerate(result):
            if tensor is None:
                result[place] = torch.empty(0, device="cpu")
    return result


def _intercept_later(op: OpOverload | str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
    """Run an operator registered after our kernels; its name may have another schema by now."""
    __tracebackhide__ = True
    try:
        op = present_operator(op) if isinstance(op, str) else op
        return _intercept(traits_of(op), *args, **kwargs)
    except BaseException:
        del args, kwargs
        raise


def _kernel_of_late(name: str, key: str, *, passes: bool) -> Callable[..., Any]:
    """Return the kernel of an operator that may be registered again with another schema."""
    kernel = functools.partial(_intercept_later, name)
    return passed(name, key) if passes else around(name, key, kernel)


def _kernel_of(name: str, key: str, *, passes: bool) -> Callable[..., Any]:
    """Return an operator's kernel.

    Args:
        name: the operator's full name.
        key: dispatch key to register the kernel for.
        passes: whether the dispatcher should skip the key.
    """
    if passes:
        return passed(name, key)

    def first(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
        """Run the operator, and configure the native library for its next calls."""
        __tracebackhide__ = True
        traits = traits_of(operator_named(name))
        places = [sum(1 << place for place, _ in at) for at in (traits.written, traits.unread)]
        places.append(sum(1 << place for place in traits.tensors))
        slow = functools.partial(_intercept, traits)
        # traits.op._op is slower than a boxed call, above all with keyword arguments (torch.empty).
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
    return around(name, key, kernel)


def _tensors_of_numbers(places: Sequence[int], args: Sequence[Any]) -> tuple[Any, ...]:
    """Replace numbers by tensors in the arguments of an operator that accepts no numbers.

    When PyTorch's C++ passes a tensor that it created from a number, such as a constant of
    ``torch.jit.trace``, Python kernels receive the number (``is_wrapped_number``).
    """
    return tuple(
        torch.tensor(argument, dtype=TYPES_OF_NUMBERS[type(argument)], device="cpu")
        if place in places and type(argument) in TYPES_OF_NUMBERS
        else argument
        for place, argument in enumerate(args)
    )


def raise_unwrapped(error: BaseException) -> None:
    """Raise the RecursionError or MemoryError that a ctypes.ArgumentError has as text, if any."""
    if type(error) is ctypes.ArgumentError:
        for kind in (RecursionError, MemoryError):
            if f": {kind.__name__}: " in str(error):
                raise kind(str(error).partition(f"{kind.__name__}: ")[2]) from error


# -- PyTorch's tracing modes: their tensors have no values, and skip our key --

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
    reason="traced tensors have no values, and a Python fallback kernel fails inside a mode",
)
HIGHER_ORDER: Final = Patch(
    "torch._ops",
    "_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS",
    reason="higher-order operators have no kernel for the key that intercepts operators",
)


def keep_from_tracers() -> None:
    """Make the tracers skip our dispatch keys from now on.

    While a tracer is active, a Python fallback fails (``func != nullptr`` in
    torch/csrc/utils/python_dispatch.cpp), because PyTorch looks for a kernel of that one operator.
    The keys are excluded only while a tracer is entered: torch.compile's guards compare a thread's
    keys, which must be the same when the guards are created and when the code runs.
    """
    wrappers = {"__enter__": _enter, "__exit__": _leave, "__torch_dispatch__": _dispatch}
    TRACERS.put(
        torch,
        {
            name: functools.wraps(method)(wrappers[name.rpartition(".")[2]](method))
            for name, method in TRACERS.values(torch).items()
        },
    )


def let_higher_order_operators_pass() -> None:
    """Make higher-order operators skip our keys: they have no kernel or fallback for them.

    Examples are cond, flex_attention and DTensor's random operators. The operators inside them are
    intercepted one by one.
    """
    HIGHER_ORDER.wrap(torch._ops, lambda passed: [*passed, *INCLUDED])  # for later operators
    for higher_order in torch._ops._higher_order_ops.values():
        for key in INCLUDED:
            higher_order.fallthrough(key)


_guards: Final[list[Any]] = []
"""guards that exclude our keys, one for each tracer that is entered, the innermost last"""


@wrapped_by
def _enter(enter: Callable[..., Any], mode: object) -> Any:  # noqa: ANN401 - as the function
    result = enter(mode)
    _guards.append(Without(KEYS))
    _guards[-1].__enter__()
    return result


@wrapped_by
def _leave(leave: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401 - as the function
    if _guards:
        _guards.pop().__exit__(None, None, None)
    return leave(*args)


@wrapped_by
def _dispatch(dispatch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the function
    with Without(KEYS):
        return dispatch(*args, **kwargs)
