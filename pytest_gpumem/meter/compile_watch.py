"""The memory that PyTorch's compiler allocates for itself, while it compiles and times kernels.

It does so in a first run only: a later one finds the graphs, and the fastest configuration of each
kernel, in the caches of Inductor or of the process. Memory that it has freed by its end counts for
no step, so that a step has one peak with cold caches and with warm ones.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.torch_import import IMPORTS
from pytest_gpumem.meter.peaks import NOTHING, fullest, maximum, minus
from pytest_gpumem.patches import Patch
from pytest_gpumem.recording.allocator_log import SEGMENT
from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from pytest_gpumem.measurement import Peak
    from pytest_gpumem.recording.recording import Span

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
MIN_SHARE: Final = 1000
"""memory that the compiler leaves, below this part of the peak is within the default tolerance"""


class CompileWatch:
    """Calls a measurement around the work of the compiler."""

    def __init__(self) -> None:
        self._around: Callable[[], AbstractContextManager[None]] | None = None
        self._works = False
        self._installed = False

    def install(self) -> None:
        """Wrap the functions now, or once they are imported; nothing if that is done."""
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
        """Have the compiler work inside of ``around()``, within a block."""
        self.install()
        outer, self._around = self._around, around
        try:
            yield
        finally:
            self._around = outer

    def watching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the compiler's that calls the measurement around its work."""

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


class CompilerMemory:
    """The memory that the compiler has taken in a step, one Peak a device."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        """the spans of time in which the compiler worked"""
        self._highest: list[Peak] = []
        self._left: list[int] = []
        """bytes of free memory that came into the allocators' caches"""

    def add(
        self, span: Span, highest: Sequence[Peak], before: Sequence[Peak], after: Sequence[Peak]
    ) -> None:
        """Add some work: the highest memory meanwhile, and the memory before and after."""
        self.spans.append(span)
        number = len(highest)
        left = [max(0, free(end) - free(start)) for start, end in zip(before, after, strict=True)]
        self._highest = list(map(maximum, self._highest or [NOTHING] * number, highest))
        self._left = list(map(sum, zip(self._left or [0] * number, left, strict=True)))

    def notes(self, peaks: Sequence[Peak]) -> list[str]:
        """Return a sentence about memory that matters beside the step's peaks."""
        if not self.spans:
            return []
        more = fullest(list(map(minus, self._highest, peaks))).allocated
        left, peak = max(self._left), fullest(peaks).reserved
        sentences = []
        if more >= MIB:
            sentences.append(
                f"while torch.compile compiled or timed kernels, {format_size(more)} more than the "
                "peak were allocated: they are not counted, because runs with warm caches have none"
            )
        if left >= SEGMENT and left * MIN_SHARE >= peak:
            sentences.append(
                f"torch.compile left {format_size(left)} in PyTorch's cache of free memory: peak "
                "reserved may be less with warm caches (warmup=1 leaves compilation out)"
            )
        return sentences


def free(held: Peak) -> int:
    """Return the bytes that an allocator holds and has not given to a tensor."""
    return held.reserved - held.allocated


COMPILER: Final = CompileWatch()
"""that of this process"""
