"""CUDA graphs of ``torch.compile(mode="reduce-overhead")`` that an earlier test has left.

They outlive the test, with their memory, until ``torch.compiler.reset()``. A later test that runs
the same compiled code records graphs of its own beside them, at once and without a run before, and
has another peak than alone.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from pytest_gpumem.patches import Patch

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


class EarlierGraphs:
    """Notes that a run uses such graphs while there are some of earlier runs."""

    def __init__(self) -> None:
        self._had_some = self._ran = False

    def begin(self) -> None:
        """Look for graphs of earlier runs."""
        self._ran, self._had_some = False, any_graphs()

    def notes(self) -> list[str]:
        """Return a sentence if graphs of this run were recorded, or run, beside earlier ones."""
        return [BESIDE_OTHERS] * (self._had_some and self._ran)

    def noted(self, run: Any) -> Any:  # noqa: ANN401 - PyTorch's, and in its place
        """Return the call of graphs, which is noted."""

        def called(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - PyTorch's, passed on
            __tracebackhide__ = True
            self._ran = True
            return run(*arguments, **options)

        return called


def any_graphs() -> bool:
    """Return whether this thread has managers of such graphs, one a device."""
    thread = getattr(sys.modules.get(REPLAYS.module), "local", None)
    containers = getattr(thread, "tree_manager_containers", {})
    return any(getattr(each, "tree_manager", None) is not None for each in containers.values())
