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

FOLDING: Final = Patch(
    "torch._inductor.constant_folding",
    "ConstantFolder.run",
    reason="Inductor reads the constants that it folds, so they are computed",
)


def with_constants(computing: Callable[[], AbstractContextManager[None]], run: Any) -> Any:  # noqa: ANN401 - a method of PyTorch's
    """Return the folding of constants, which are computed whatever values a run asks for.

    Args:
        computing: makes a context manager in which values are computed.
        run: folds.
    """

    def computed(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - PyTorch's, passed on
        is_for_gpu = any(_is_on_gpu(node) for node in self.module.graph.nodes)
        with computing() if is_for_gpu else nullcontext():
            return run(self, *args, **kwargs)

    return computed


def _is_on_gpu(node: Any) -> bool:  # noqa: ANN401 - PyTorch's
    return getattr(getattr(node.meta.get("val"), "device", None), "type", "") == "cuda"
