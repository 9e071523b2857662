"""Handles dispatch modes and tensor subclasses before torch 2.13.

In these versions our dispatch key is above the Python key: our kernel runs first, and passes the
operator to the mode or the subclass. The Python key excludes all keys above itself, so a second key
below it intercepts the operators that the mode or the subclass calls. Newer versions do not need
this.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_gpumem.devices.virtual.values.dispatch_keys import (
    INCLUDED,
    IS_ABOVE_PYTHON,
    KEY,
    KEYS,
    LOWER_KEY,
    NAMES,
    PYTHON,
    Without,
    keys_of,
    numbers_as_tensors,
    operator_named,
    present_operator,
)
from pytest_gpumem.devices.virtual.values.host_tensors import tensors_in
from pytest_gpumem.devices.virtual.values.operators import register
from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

MODES: Final = Patch(
    "torch.utils._python_dispatch",
    "TorchDispatchMode.__enter__",
    reason="operators that were registered late get kernels before a mode is entered",
    versions="before torch 2.13",
)
_PYTHONS: Final = torch._C.DispatchKeySet(PYTHON)
_LOWER: Final = INCLUDED[-1]


def _above_python(name: str, kernel: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
    """Pass an operator to the mode or subclass that handles it; without one, call our kernel."""
    __tracebackhide__ = True
    tensors = tensors_in([*args, *kwargs.values()])
    is_pythons = torch._ops.key_extractor(tensors, _PYTHONS).has(PYTHON)
    del tensors
    try:
        if is_pythons:
            op = present_operator(name) if name in LATE.names else operator_named(name)
            return op.redispatch(_PYTHONS, *numbers_as_tensors(op, args), **kwargs)
        with Without(torch._C.DispatchKeySet(_LOWER)):
            return kernel(*args, **kwargs)
    except BaseException:
        del args, kwargs  # the error's traceback would keep tensors alive
        raise


def _below_python(_name: str, kernel: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
    """Run an operator that a mode or a subclass calls."""
    __tracebackhide__ = True
    try:
        with Without(KEYS):
            return kernel(*args, **kwargs)
    except BaseException:
        del args, kwargs
        raise


_AROUND: Final = {KEY: _above_python, LOWER_KEY: _below_python} if IS_ABOVE_PYTHON else {}
"""wrappers of an operator's kernel, by dispatch key"""


def around(name: str, key: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator's kernel for a dispatch key; from torch 2.13 on, return it unchanged."""
    return functools.partial(_AROUND[key], name, kernel) if key in _AROUND else kernel


def fallback(key: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the fallback kernel for operators registered later; it receives the operator."""
    if key not in _AROUND:
        return kernel

    def later(op: OpOverload, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
        __tracebackhide__ = True
        try:
            return _AROUND[key](op.name(), functools.partial(kernel, op), *args, **kwargs)
        except BaseException:
            del args, kwargs
            raise

    return later


def passed(name: str, key: str) -> Callable[..., Any]:
    """Return a kernel that makes an operator skip a dispatch key."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # An operator's kernel for BackendSelect does not skip LOWER_KEY, which is below it, even if the
    # kernel for LOWER_KEY is a fallthrough.
    if key != KEY and has_kernel(name, "BackendSelect"):

        def pass_lower_key(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the operator
            __tracebackhide__ = True
            below = torch._C._dispatch_keyset_full_after(_LOWER)
            keys = keys_of(tensors_in([*args, *kwargs.values()])) & below
            return operator_named(name).redispatch(keys, *args, **kwargs)

        return pass_lower_key
    fallthrough: Callable[..., Any] = torch.library.fallthrough_kernel
    return fallthrough


class LateOperators:
    """Registers our kernels for operators that are registered after the first run began.

    While a mode is active, PyTorch fails ("func != nullptr") instead of calling a Python fallback.
    So these operators get kernels when a run begins, and when a mode is entered.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self.names: set[str] = set()
        self._seen: tuple[int, ...] = ()
        self._libraries: list[torch.library.Library] = []
        self._kernel_of: Callable[..., Callable[..., Any]]

    def begin(self, known: list[str], kernel_of: Callable[..., Callable[..., Any]]) -> None:
        """Register kernels for new operators whenever a mode is entered from now on."""
        self._known.update(known)
        self._kernel_of = kernel_of
        if not IS_ABOVE_PYTHON:
            return

        @wrapped_by
        def register_and_enter(enter: Callable[[object], Any], mode: object) -> Any:  # noqa: ANN401 - as the function
            self.register()
            return enter(mode)

        MODES.wrap(torch.utils._python_dispatch, register_and_enter)

    def register(self) -> None:
        """Register a kernel for each operator that is new since the last call."""
        # New operators come from Python definitions, loaded C++ libraries, and extension modules.
        sources = torch.library._defs, torch.ops.loaded_libraries, sys.modules
        seen = tuple(map(len, sources))
        if not IS_ABOVE_PYTHON or seen == self._seen:
            return
        self._seen = seen
        names = set(torch._C._dispatch_get_all_op_names()) - self._known
        self._known |= names
        self.names |= names
        self._libraries += register(sorted(names), NAMES, self._kernel_of)


LATE: Final = LateOperators()
