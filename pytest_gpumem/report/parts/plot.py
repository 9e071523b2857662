"""A baseline's history as SVG: a small line without axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

SPARK_WIDTH, SPARK_HEIGHT = 64, 16


def sparkline(levels: Sequence[int], limit: int | None = None) -> str:
    """Return a small line of figures, the oldest on the left; "" of fewer than two.

    It stands on zero, and its whole height is the limit: a change is as high as it matters.

    Without a ``limit``, in bytes, the highest figure has the whole height.
    """
    if len(levels) < 2:  # noqa: PLR2004 - a line has two ends
        return ""
    low, high = min(levels), max(levels)
    top = max(high, limit or 0, 1)
    step = (SPARK_WIDTH - 4) / (len(levels) - 1)
    places = [
        (2 + index * step, SPARK_HEIGHT - 2 - (SPARK_HEIGHT - 4) * level / top)
        for index, level in enumerate(levels)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    x, y = places[-1]
    words = f"{len(levels)} figures, from {low / MIB:.2f} to {high / MIB:.2f} MiB"
    if limit:
        words += f", of {limit / MIB:.2f} MiB allowed"
    return (
        f'<svg class="spark" viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}" role="img" '
        f'aria-label="history: {words}"><title>{words}</title><path class="floor" '
        f'd="M0 {SPARK_HEIGHT - 0.5}H{SPARK_WIDTH}"/><polyline points="{path}"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/></svg>'
    )
