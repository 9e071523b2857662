"""Watches the memory that PyTorch's compiler allocates for itself to compile and time kernels.

Only a first run needs this memory: a later run finds the graphs, and the fastest configuration of
each kernel, in the caches of Inductor or of the process. Memory that the compiler has freed when it
ends is not counted, so that a step's peak is the same with cold and with warm caches.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.torch_import import IMPORTS
from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

REASON: Final = "memory of the compiler itself is not counted as the step's"
WATCHED: Final = (
    Patch("torch._inductor.compile_fx", *("compile_fx", "_compile_fx_inner"), reason=REASON),
    Patch(
        "torch._inductor.runtime.triton_heuristics",
        "CachingAutotuner.autotune_to_one_config",
        "CachingAutotuner.coordinate_descent_tuning",
        "CachingAutotuner._combo_sequential_autotune",
        reason=REASON,
    ),
    Patch("triton.runtime.autotuner", "Autotuner._bench", reason=REASON),
)
"""the functions that compile a graph or time a kernel"""


class CompileWatch:
    """Enters a context manager around each call of the compiler."""

    def __init__(self) -> None:
        self._around: Callable[[], AbstractContextManager[None]] | None = None
        self._works = False
        self._installed = False

    def install(self) -> None:
        """Wrap the functions now or when they are imported; do nothing the second time."""
        if self._installed:
            return
        self._installed = True
        for patch in WATCHED:
            wrap = functools.partial(patch.wrap, make=self.watching)
            if patch.module in sys.modules:
                wrap(sys.modules[patch.module])
            else:
                IMPORTS.call_after(patch.module, wrap)

    @contextmanager
    def watched(self, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Enter ``around()`` whenever the compiler runs within this block."""
        self.install()
        outer, self._around = self._around, around
        try:
            yield
        finally:
            self._around = outer

    def watching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a compiler function: its outermost call runs inside ``around()``."""

        def watching(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - PyTorch's, passed on
            __tracebackhide__ = True
            if self._around is None or self._works:
                return function(*arguments, **options)
            self._works = True
            try:
                with self._around():
                    return function(*arguments, **options)
            finally:
                self._works = False

        return watching


COMPILER: Final = CompileWatch()
