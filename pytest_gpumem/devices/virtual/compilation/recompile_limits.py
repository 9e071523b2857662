"""Doubles ``torch.compile``'s limits on compilations if only some steps compute values."""

from __future__ import annotations

import sys
from typing import Final

from pytest_gpumem.patches import Patch

COMPILER: Final = "torch._dynamo.convert_frame"
"""PyTorch's module that counts the compilations of each function"""
LIMITS: Final = Patch(
    "torch._dynamo.config",
    *("recompile_limit", "accumulated_recompile_limit"),
    *("cache_size_limit", "accumulated_cache_size_limit"),  # the limits' names before 2.7
    reason="a process compiles a function twice: for steps with values and for steps without",
)


class RecompileLimits:
    """Doubles the limits in a process that compiles in steps with values and in steps without.

    Tensors of a step that computes values have an additional dispatch key, and guards compare keys:
    code compiled in a step without values is compiled again. A real GPU does not need that second
    compilation, so a function within the limit there could exceed it here, which is an error with
    ``fullgraph=True``.
    """

    def __init__(self) -> None:
        self._compiled: set[bool] = set()
        """the kinds of steps that have compiled code: with values (True), without values (False)"""
        self._values: bool | None = None
        """whether the running step computes values; None between tests"""
        self._frames = 0
        """number of compiled functions when the step began"""
        self._originals: dict[str, int] = {}

    def begin(self, *, values: bool) -> None:
        """Start a step with or without values; double the limits if the other kind has compiled."""
        self.end()
        self._values, self._frames = values, _compiled_frames()
        config = sys.modules.get(LIMITS.module)
        if config is None or not self._compiled - {values}:
            return
        # Some names are aliases of others: read all before writing the first.
        self._originals = LIMITS.values(config)
        LIMITS.put(config, {name: 2 * limit for name, limit in self._originals.items()})

    def end(self) -> None:
        """End the step, and restore the limits except those that the step has set."""
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
