"""Whether a step ran code that Inductor compiled for a GPU: its figures are less sure."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from types import ModuleType

OUTPUT: Final = "torch._inductor.output_code"
"""PyTorch's module with the class of compiled graphs, new ones and those of a cache"""
LESS_SURE: Final = (
    "code of torch.compile ran: published peaks of compiled steps differ from the virtual GPU's by "
    "several percent, and the cause is not known"
)


class CompiledCode:
    """Notes the calls of compiled graphs."""

    def __init__(self) -> None:
        self._ran = False

    def begin(self) -> None:
        """Forget the calls of the last run."""
        self._ran = False

    def notes(self) -> list[str]:
        """Return sentences that a reader of the figures has to know about compiled code."""
        return [LESS_SURE] * self._ran

    def install(self, module: ModuleType) -> None:
        """Wrap the call of compiled graphs; ``module`` is :data:`OUTPUT`, just imported."""
        graph = getattr(module, "CompiledFxGraph", None)
        call = vars(graph).get("__call__") if graph is not None else None
        if graph is None or call is None:
            return

        @functools.wraps(call)
        def noted(compiled: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - PyTorch's, passed on
            __tracebackhide__ = True
            if "cuda" in getattr(compiled, "device_types", ("cuda",)):
                self._ran = True
            return call(compiled, *args, **kwargs)

        graph.__call__ = noted
