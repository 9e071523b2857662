"""Whether a step ran code that Inductor compiled for a GPU: its figures are less sure."""

from __future__ import annotations

from typing import Any, Final

from pytest_gpumem.patches import Patch

CALLS: Final = Patch(
    "torch._inductor.output_code",
    "CompiledFxGraph.__call__",
    reason="a note says that compiled code ran",
)
LESS_SURE: Final = (
    "compiled code ran (torch.compile): on a GPU, peak reserved may be some percent higher than "
    "predicted; the reason is not known"
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

    def noted(self, call: Any) -> Any:  # noqa: ANN401 - PyTorch's, and in its place
        """Return the call of compiled graphs, which is noted."""

        def called(compiled: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - PyTorch's, passed on
            __tracebackhide__ = True
            if "cuda" in getattr(compiled, "device_types", ("cuda",)):
                self._ran = True
            return call(compiled, *args, **kwargs)

        return called
