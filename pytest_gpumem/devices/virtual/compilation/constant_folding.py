"""Constants that Inductor folds while it compiles: it computes them on the device, and reads them.

What it finds becomes a part of the code: a factor of one is left out, a mask of ones is no mask.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import ModuleType

MODULE: Final = "torch._inductor.constant_folding"
"""PyTorch's module with the class that folds"""


def compute_constants(
    module: ModuleType, computing: Callable[[], AbstractContextManager[None]]
) -> None:
    """Have the constants of graphs for a GPU computed, whatever values a run asks for.

    Args:
        module: MODULE, just imported.
        computing: makes a context manager in which values are computed.
    """
    folder = getattr(module, "ConstantFolder", None)
    run = vars(folder).get("run") if folder is not None else None
    if folder is None or run is None:
        return

    @functools.wraps(run)
    def computed(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - PyTorch's, passed on
        is_for_gpu = any(_is_on_gpu(node) for node in self.module.graph.nodes)
        with computing() if is_for_gpu else nullcontext():
            return run(self, *args, **kwargs)

    folder.run = computed


def _is_on_gpu(node: Any) -> bool:  # noqa: ANN401 - PyTorch's
    return getattr(getattr(node.meta.get("val"), "device", None), "type", "") == "cuda"
