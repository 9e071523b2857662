"""Notes on runs of code that Inductor compiled for a GPU: their figures are less certain.

CUDA graphs of ``torch.compile(mode="reduce-overhead")`` outlive a test, with their memory, until
``torch.compiler.reset()``. A later test that runs the same compiled code records its own graphs in
addition, without a warm-up run: its peak differs from the one that it has when it runs alone.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CALLS: Final = Patch(
    "torch._inductor.output_code",
    "CompiledFxGraph.__call__",
    reason="a note says that compiled code ran",
)
LESS_SURE: Final = (
    "compiled code ran (torch.compile): on a GPU, peak reserved may be some percent higher than "
    "predicted; the reason is not known"
)
REPLAYS: Final = Patch(
    "torch._inductor.cudagraph_trees",
    "CUDAGraphTreeManager.run",
    reason="a note says that CUDA graphs ran beside those of earlier tests",
)
BESIDE_OTHERS: Final = (
    'earlier tests left CUDA graphs of torch.compile(mode="reduce-overhead"): a test that runs '
    "such code after them has another peak than alone (call torch.compiler.reset() before each "
    "such test, in a fixture)"
)


def preceded_by(call_first: Callable[..., object]) -> Callable[[Any], Any]:
    """Return a wrapper for PyTorch functions that first calls ``call_first`` with the arguments."""

    def wrapper(function: Any, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        call_first(*args, **options)
        return function(*args, **options)

    return wrapped_by(wrapper)


class CompiledCode:
    """Records calls of compiled graphs, and whether earlier runs' CUDA graphs still exist."""

    def __init__(self) -> None:
        self._ran = self._replayed = self._had_graphs = False

    def begin(self) -> None:
        """Reset the recorded calls, and look for CUDA graphs of earlier runs."""
        self._ran = self._replayed = False
        self._had_graphs = any_graphs()

    def notes(self) -> list[str]:
        """Return sentences on compiled code that a reader of the figures needs."""
        beside_others = self._had_graphs and self._replayed
        return [BESIDE_OTHERS] * beside_others + [LESS_SURE] * self._ran

    def wrappers(self) -> Iterator[tuple[Patch, Callable[[Any], Any]]]:
        """Yield the functions to wrap, with their wrappers."""
        yield CALLS, preceded_by(self._note_call)
        yield REPLAYS, preceded_by(self._note_replay)

    def _note_call(self, compiled: object, *_args: object, **_options: object) -> None:
        self._ran = self._ran or "cuda" in getattr(compiled, "device_types", ("cuda",))

    def _note_replay(self, *_args: object, **_options: object) -> None:
        self._replayed = True


def any_graphs() -> bool:
    """Return whether this thread has a CUDA graph manager for any device."""
    thread = getattr(sys.modules.get(REPLAYS.module), "local", None)
    containers = getattr(thread, "tree_manager_containers", {})
    return any(getattr(each, "tree_manager", None) is not None for each in containers.values())
