"""``torch.compile``'s limits of compilations a function, in a process with two of a kind."""

from __future__ import annotations

import sys
from typing import Final

from pytest_gpumem.patches import Patch

COMPILER: Final = "torch._dynamo.convert_frame"
"""PyTorch's module that counts the compilations of each function"""
LIMITS: Final = Patch(
    "torch._dynamo.config",
    *("recompile_limit", "accumulated_recompile_limit"),
    *("cache_size_limit", "accumulated_cache_size_limit"),  # their names before torch 2.7
    reason="a process compiles a function twice: for steps with values and for steps without",
)


class RecompileLimits:
    """Doubles the limits in a process whose steps compile with values and without.

    Tensors of a step with values have a dispatch key more, and guards compare those: what was
    compiled in a step without is compiled again. On a GPU both are the same, and a function that
    stays within the limit there would leave it here: with ``fullgraph=True`` that is an error.
    """

    def __init__(self) -> None:
        self._compiled: set[bool] = set()
        """whether steps that compiled had values"""
        self._values: bool | None = None
        """whether the step that runs has; None between tests"""
        self._frames = 0
        """functions that had been compiled when it began"""
        self._originals: dict[str, int] = {}

    def begin(self, *, values: bool) -> None:
        """Note that a step with or without values begins, in which PyTorch may compile."""
        self.end()
        self._values, self._frames = values, _compiled_frames()
        config = sys.modules.get(LIMITS.module)
        if config is None or not self._compiled - {values}:
            return
        # Some of the names are others' aliases: all are read before the first is written.
        self._originals = LIMITS.values(config)
        LIMITS.put(config, {name: 2 * limit for name, limit in self._originals.items()})

    def end(self) -> None:
        """Note that the step has ended, and give the limits back, but for those that it has set."""
        if self._values is not None and _compiled_frames() != self._frames:
            self._compiled.add(self._values)
        self._values = None
        if self._originals:
            config, originals = sys.modules[LIMITS.module], self._originals
            doubled = LIMITS.values(config).items()
            own = {name for name, limit in doubled if limit == 2 * originals[name]}
            LIMITS.put(config, {name: originals[name] for name in own})
            self._originals = {}


def _compiled_frames() -> int:
    counts = getattr(sys.modules.get(COMPILER), "FRAME_COMPILE_COUNTER", {})
    return sum(counts.values())
