"""Modes of PyTorch's that trace: their tensors have no values, and pass the values' key by."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

TRACERS: Final = (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode)


def keep_from(keys: torch._C.DispatchKeySet) -> None:
    """Have the tracers pass some dispatch keys by, from now on.

    A Python fallback fails beside them (``func != nullptr``, torch/csrc/utils/python_dispatch.cpp,
    as PyTorch looks for a function of the one operator). The keys are left out while a tracer is
    entered, and only then: torch.compile's guards compare a thread's keys, which must be the same
    when it makes them and when its code runs.
    """
    for tracer in TRACERS:
        for name in ("__enter__", "__exit__", "__torch_dispatch__"):
            setattr(tracer, name, _WRAPPERS[name](keys, getattr(tracer, name)))


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
