"""Constants that Inductor folds while it compiles: it computes them on the device, and reads them.

What it finds becomes a part of the code: a factor of one is left out, a mask of ones is no mask.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import ModuleType

FOLDING: Final = Patch(
    "torch._inductor.constant_folding",
    "ConstantFolder.run",
    reason="Inductor reads the constants that it folds, so they are computed",
)


def compute_constants(
    module: ModuleType, computing: Callable[[], AbstractContextManager[None]]
) -> None:
    """Have the constants of graphs for a GPU computed, whatever values a run asks for.

    Args:
        module: that of FOLDING, just imported.
        computing: makes a context manager in which values are computed.
    """

    def make(run: Any) -> Any:  # noqa: ANN401 - a method of PyTorch's
        def computed(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - PyTorch's, passed on
            is_for_gpu = any(_is_on_gpu(node) for node in self.module.graph.nodes)
            with computing() if is_for_gpu else nullcontext():
                return run(self, *args, **kwargs)

        return computed

    FOLDING.wrap(module, make)


def _is_on_gpu(node: Any) -> bool:  # noqa: ANN401 - PyTorch's
    return getattr(getattr(node.meta.get("val"), "device", None), "type", "") == "cuda"
