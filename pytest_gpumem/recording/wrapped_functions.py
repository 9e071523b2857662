"""Wrap PyTorch's own functions so that ``torch.compile`` compiles code without the wrappers.

Guards of compiled code compare PyTorch's functions by identity and its dictionaries of global hooks
by their keys, and Dynamo inlines the hooks. A replaced function or a registered hook would reorder
a graph's inputs, and recompile everything in the next test. So a wrapped function stays the same
object with other code, and gets its own code back while Dynamo traces.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import warnings
from contextlib import ExitStack, contextmanager
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping
    from types import CodeType, ModuleType

    Around = Callable[[Callable[..., Any]], Callable[..., Any]]
    """takes a function and returns its wrapper"""

TRACER: Final = Patch(
    "torch._dynamo.symbolic_convert",
    "InstructionTranslator.run_ctx_mgr",
    reason="Dynamo traces PyTorch's functions as they are without measuring",
)
RULES: Final = "torch._dynamo.trace_rules"
"""PyTorch's module with the folders whose frames Dynamo never traces"""
PASSED: Final[dict[Any, str]] = {
    inspect.Parameter.VAR_POSITIONAL: "*{0}",
    inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
    inspect.Parameter.VAR_KEYWORD: "**{0}",
}
"""how to pass on a parameter, by its kind; all other kinds by position"""
_TARGET: Final = "the function that is called"
"""a constant of the generated code that is replaced by the function"""


class WrappedFunctions:
    """The wrapped functions and registered hooks of PyTorch."""

    def __init__(self) -> None:
        self._own: dict[FunctionType, CodeType] = {}
        """the original code of each wrapped function"""
        self._around: dict[FunctionType, list[Around]] = {}
        """the wrappers of each wrapped function, innermost first"""
        self._hooks: list[tuple[MutableMapping[int, Any], int]] = []
        """registered hooks: dictionary and key of each"""
        self._lasting: dict[FunctionType, tuple[CodeType, list[Callable[..., Any]]]] = {}
        """functions whose code Dynamo's guards compare: for each, the code that it has while it is
        wrapped, which must never change, and the list whose first element that code calls"""
        self._traces = 0
        """number of active tracers, including nested ones"""
        self._hidden: list[tuple[MutableMapping[int, Any], int, dict[int, Any]]] = []
        """hidden hooks: the dictionary, the key, and the dictionary's content before"""

    def wrap(
        self, stack: ExitStack, arounds: Mapping[FunctionType, Around], *, traced: bool = True
    ) -> None:
        """Wrap functions until the stack is closed.

        Each of ``arounds`` takes the original function and returns the one to call instead.
        ``traced``: Dynamo traces the functions; pass False if it breaks the graph instead, because
        guards then compare the function's code.
        """
        for function, around in arounds.items():
            self._around.setdefault(function, []).append(around)
            own = self._own.setdefault(function, function.__code__)
            if not traced and function not in self._lasting:
                self._lasting[function] = lasting_code(own)
            self._renew(function)

        def unwrap() -> None:
            for function, around in arounds.items():
                self._around[function].remove(around)
                self._renew(function)

        stack.callback(unwrap)

    def _renew(self, function: FunctionType) -> None:
        own, layers = self._own[function], self._around[function]
        if not layers:
            function.__code__ = own
            del self._own[function], self._around[function]
            return
        if self._traces and function not in self._lasting:
            return
        inner: Callable[..., Any] = FunctionType(
            own, function.__globals__, own.co_name, function.__defaults__, function.__closure__
        )
        inner.__kwdefaults__ = function.__kwdefaults__
        for around in layers:
            inner = functools.update_wrapper(around(inner), inner)
        if function in self._lasting:
            function.__code__, calls = self._lasting[function]
            calls[:] = [inner]
        else:
            function.__code__ = code_that_calls(inner, own)

    def hook(self, stack: ExitStack, handle: Any) -> None:  # noqa: ANN401 - PyTorch's RemovableHandle
        """Hide a registered hook from tracers, and remove it when the stack is closed."""
        entry = handle.hooks_dict_ref(), handle.id
        self._hooks.append(entry)
        stack.callback(handle.remove)
        stack.callback(self._hooks.remove, entry)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Restore the original code and remove the hooks while the block runs."""
        self._traces += 1
        if self._traces == 1:
            for function, code in self._own.items():
                if function not in self._lasting:
                    function.__code__ = code
            for hooks, key in self._hooks:
                own_hooks = dict(hooks)
                if hooks.pop(key, None) is not None:
                    self._hidden.append((hooks, key, own_hooks))
        try:
            yield
        finally:
            self._traces -= 1
            for function in [] if self._traces else list(self._own):
                self._renew(function)
            while self._hidden and not self._traces:
                hooks, key, own_hooks = self._hidden.pop()
                kept = {key, *hooks}
                ordered = {each: hook for each, hook in own_hooks.items() if each in kept}
                hooks_now = {**ordered, **hooks}
                hooks.clear()
                hooks.update(hooks_now)


WRAPPED: Final = WrappedFunctions()


def lasting_code(own: CodeType) -> tuple[CodeType, list[Callable[..., Any]]]:
    """Return code that calls the first element of a list, and the list, to fill later."""
    calls: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the function
        __tracebackhide__ = True
        return calls[0](*args, **kwargs)

    return code_that_calls(call, own), calls


def code_that_calls(target: Callable[..., Any], own: CodeType) -> CodeType:
    """Return code that passes its arguments to another function, to replace a function's own.

    ``own`` gives the names of the arguments, and the function's name in tracebacks.
    """
    cells = tuple(CellType() for _ in own.co_freevars)
    signature = inspect.signature(FunctionType(own, {}, closure=cells))
    passed = [
        PASSED.get(parameter.kind, "{0}").format(parameter.name)
        for parameter in signature.parameters.values()
    ]
    code = _code_like(str(signature), ", ".join(passed), own.co_freevars)
    return code.replace(
        co_consts=tuple(target if const == _TARGET else const for const in code.co_consts),
        co_filename=own.co_filename,
        co_name=own.co_name,
        co_firstlineno=own.co_firstlineno,
    )


@functools.cache
def _code_like(declared: str, passed: str, free: tuple[str, ...]) -> CodeType:
    """Compile code that passes its arguments to a placeholder, which the caller replaces.

    Args:
        declared: the code's parameters, as in a signature.
        passed: the arguments of the call, as in source code.
        free: names of the code's free variables.

    Returns:
        the code; the placeholder is ``_TARGET``, among its constants.
    """
    variables = [name for name in free if not keyword.iskeyword(name)]
    source = [
        f"def outer({', '.join(variables)}):",
        f"  def call{declared}:",
        "    __tracebackhide__ = True",
        f"    return {_TARGET!r}({passed})",
        *(f"    {name}" for name in variables),  # never reached: makes it a free variable
        "  return call",
    ]
    variables_of: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # the source seems to call a string
        exec(compile("\n".join(source), __file__, "exec"), variables_of)  # noqa: S102 - written here
    code: CodeType = variables_of["outer"](*variables).__code__
    return code


class _Hiding:
    """Enters a tracer's context manager with wrappers and hooks hidden.

    A generator would add a frame to the tracebacks of errors.
    """

    def __init__(self, inner: Any) -> None:  # noqa: ANN401 - a context manager of PyTorch's
        self._inner, self._stack = inner, ExitStack()

    def __enter__(self) -> object:
        self._stack.enter_context(WRAPPED.hidden())
        return self._stack.enter_context(self._inner)

    def __exit__(self, *error: Any) -> bool:  # noqa: ANN401, PYI036 - passed on
        return bool(self._stack.__exit__(*error))


def hide_while_tracing(module: ModuleType) -> None:
    """Hide wrappers and hooks from Dynamo's tracer; ``module`` is TRACER's, just imported."""

    def hiding(context: Callable[[object], object]) -> Callable[[object], _Hiding]:
        return lambda self: _Hiding(context(self))

    TRACER.wrap(module, hiding)


def skip_own_frames(module: ModuleType) -> None:
    """Add this package to the folders that Dynamo skips; ``module`` is RULES, just imported."""
    add = getattr(module, "add", None)
    if add is not None:
        add(__package__)
