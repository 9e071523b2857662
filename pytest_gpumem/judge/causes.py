"""The causes of a grown peak: its source lines beside the baseline's, and what keeps their blocks.

Everything here is pure. Sizes are bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.judge.breakdown_diff import category_rows, site_rows
from pytest_gpumem.judge.verdict import Cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.judge.breakdown_diff import BreakdownRow
    from pytest_gpumem.judge.verdict import Comparison
    from pytest_gpumem.measurement import Attribution, Breakdown, Keeper

MOST_CAUSES: Final = 10
"""causes of one verdict"""


def growth_causes(
    row: Comparison, old: Sequence[Breakdown], new: Sequence[Attribution]
) -> tuple[Cause, ...]:
    """Return the causes of a grown peak; none without both breakdowns of its device.

    Categories stand in for lines that are not known.

    Args:
        row: the figure that grew.
        old: the baseline's breakdowns, one a device.
        new: the measured attributions.
    """
    if row.excess <= 0 or row.peak == "reserved" or min(len(old), len(new)) <= row.device:
        return ()
    attribution = new[row.device]
    pair = attribution.breakdown, old[row.device]
    rows = [site for site in site_rows(*pair) if (site.difference or 0) > 0]
    rows = rows or [line for line in category_rows(*pair)[:-1] if (line.difference or 0) > 0]
    return tuple(_cause(line, attribution.keepers) for line in rows[:MOST_CAUSES])


def _cause(row: BreakdownRow, keepers: Sequence[Keeper]) -> Cause:
    site = row.site
    own = tuple(
        keeper
        for keeper in keepers
        if site
        and (keeper.path, keeper.line, keeper.category) == (site.path, site.line, site.category)
    )
    return Cause(
        nbytes=row.difference or 0,
        category=site.category if site else row.name,
        site=site,
        baseline_blocks=row.baseline_blocks,
        keepers=own,
        reasons=tuple(f"kept by {keeper.text}{_steps_text(keeper.steps)}" for keeper in own),
    )


def _steps_text(steps: Sequence[int]) -> str:
    """Return the steps of training that blocks are of: ", of steps 1 and 2"; "" if not known."""
    if not steps:
        return ""
    *first, last = map(str, steps)
    return f", of steps {', '.join(first)} and {last}" if first else f", of step {last}"
