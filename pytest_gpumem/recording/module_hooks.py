"""Register global module hooks, like PyTorch's, that ``torch.compile`` does not see.

When a module has other hooks, its call runs PyTorch's own code for hooks, with dictionaries of
global hooks that contain ours and then the user's.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.patches import Patch
from pytest_gpumem.recording.wrapped_functions import WRAPPED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.nn import Module

CALLS: Final = Patch(
    "torch.nn",
    "Module.__call__",
    reason="a report names the modules that run, by hooks that torch.compile does not see",
)


class _Both:
    """Two dictionaries of hooks, with the operations that PyTorch uses."""

    __slots__ = ("_ours", "_users")

    def __init__(self, ours: Mapping[Any, Any], users: Mapping[Any, Any]) -> None:
        self._ours, self._users = ours, users

    def __bool__(self) -> bool:
        return bool(self._ours or self._users)

    def __contains__(self, key: object) -> bool:
        return key in self._ours or key in self._users

    def items(self) -> list[tuple[Any, Any]]:
        return [*self._ours.items(), *self._users.items()]


class ModuleHooks:
    """Runs functions before and after each call of a module."""

    def __init__(self) -> None:
        self._before: dict[str, Callable[..., None]] = {}
        self._after: dict[str, Callable[..., None]] = {}
        self._numbers = itertools.count()
        self._wrapped = ExitStack()
        """restores ``Module.__call__``"""

    def register(
        self, stack: ExitStack, before: Callable[..., None], after: Callable[..., None]
    ) -> None:
        """Call functions at each call of a module, until the stack is closed.

        ``before`` gets a module and its positional arguments, before its other hooks run. ``after``
        gets a module, its positional and keyword arguments and its output (None after an error),
        after ``forward`` and before its other hooks.
        """
        key = f"gpumem {next(self._numbers)}"
        self._before[key], self._after[key] = before, after

        def remove() -> None:
            del self._before[key], self._after[key]
            if not self._before:
                self._wrapped.close()

        stack.callback(remove)
        if len(self._before) == 1:
            import torch

            calls = CALLS.values(torch.nn).values()
            WRAPPED.wrap(self._wrapped, dict.fromkeys(calls, self._around_call))

    def _around_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        own: Any = torch.nn.Module._call_impl
        ours = {
            "_global_forward_pre_hooks": self._before,
            "_global_forward_hooks": self._after,
            "_global_forward_hooks_with_kwargs": self._after,
            "_global_forward_hooks_always_called": self._after,
        }
        both = {name: _Both(hooks, own.__globals__[name]) for name, hooks in ours.items()}
        hooked = FunctionType(own.__code__.replace(), {**own.__globals__, **both}, own.__name__)
        forward_hooks, forward_pre_hooks, backward_hooks, backward_pre_hooks = (
            own.__globals__[f"_global_{name}_hooks"]
            for name in ("forward", "forward_pre", "backward", "backward_pre")
        )
        traces = torch._C._get_tracing_state
        befores, afters = self._before, self._after

        def call_module(module: Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the module
            __tracebackhide__ = True
            # PyTorch's code for hooks makes a closure that lives throughout the forward: in deep
            # modules Python's collector would start a pass earlier than without us.
            fields = module.__dict__  # reading an attribute of a module takes ten times as long
            has_hooks = (
                fields.get("_forward_hooks")
                or fields.get("_forward_pre_hooks")
                or fields.get("_backward_hooks")
                or fields.get("_backward_pre_hooks")
                or forward_hooks
                or forward_pre_hooks
                or backward_hooks
                or backward_pre_hooks
            )
            if "_forward_hooks" not in fields:
                return call(module, *args, **kwargs)  # raises: __init__ did not run
            if has_hooks and module._compiled_call_impl is None:
                return hooked(module, *args, **kwargs)
            is_others = (
                type(module)._call_impl is not own
                or "_call_impl" in fields
                or module._compiled_call_impl is not None
                or traces() is not None
            )
            for before in befores.values():
                before(module, args)
            output = None
            try:
                if is_others:
                    output = call(module, *args, **kwargs)
                else:
                    # All that PyTorch's own functions do without hooks; skipping them saves Python
                    # frames, each of which costs the allocator's history time at every allocation.
                    output = module.forward(*args, **kwargs)
                return output
            finally:
                for after in afters.values():
                    after(module, args, kwargs, output)

        return call_module


HOOKS_OF_MODULES: Final = ModuleHooks()
