"""Call functions before and after each call of a module.

``Module.__call__`` is wrapped, because PyTorch warns of its own global hooks
(``register_module_forward_hook``) at each call of a module of ``torch.compile``: where warnings are
errors, a test would fail only because it is recorded.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.patches import Patch
from pytest_gpumem.recording.wrapped_functions import WRAPPED

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module

CALLS: Final = Patch(
    "torch.nn",
    "Module.__call__",
    reason="a report names the modules that run, by hooks that torch.compile does not see",
)


def hook_calls(
    stack: ExitStack, before: Callable[..., None], after: Callable[..., None] | None = None
) -> None:
    """Call functions at each call of a module, until the stack is closed.

    ``before`` gets a module and its positional arguments, before its own hooks run. ``after`` gets
    a module, its positional and keyword arguments and its output (None after an error), after
    ``forward`` and before its own hooks.
    """
    import torch

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_module(module: Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the module
            __tracebackhide__ = True
            if "_modules" not in module.__dict__:
                return call(module, *args, **kwargs)  # raises, because __init__ did not run
            before(module, args)
            if after is None:
                return call(module, *args, **kwargs)
            if module._forward_hooks:
                return call_before_hooks(call, after, module, args, kwargs)
            output = None
            try:
                output = call(module, *args, **kwargs)
                return output
            finally:
                after(module, args, kwargs, output)

        return call_module

    WRAPPED.wrap(stack, dict.fromkeys(CALLS.values(torch.nn).values(), around))


def call_before_hooks(
    call: Callable[..., Any],
    after: Callable[..., None],
    module: Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # noqa: ANN401 - as the module
    """Call a module that has forward hooks, and ``after`` before these hooks run.

    FSDP's hook frees the unsharded parameters, which ``after`` looks at.
    """
    __tracebackhide__ = True
    ended = False

    def end(*call: Any) -> None:  # noqa: ANN401 - as a hook
        nonlocal ended
        ended = True
        after(*call)

    with ExitStack() as stack:
        hook = module.register_forward_hook(end, prepend=True, with_kwargs=True)
        WRAPPED.hook(stack, hook)
        output = None
        try:
            output = call(module, *args, **kwargs)
            return output
        finally:
            if not ended:  # forward raised, or compiled code ran without the hook
                after(module, args, kwargs, output)
