"""Which results were held to baselines, which not and why: a sentence for each device."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.judge.result import Result

MOST_REASONS = 4
"""reasons that a sentence gives, the most frequent first"""


def compared(results: Sequence[Result]) -> dict[str, str]:
    """Return what there is to say of each device, by its key.

    "5 held to its own baselines, 2 not: 2 with baselines of virtual-T4 only"
    """
    keys = dict.fromkeys(it.device_key for it in results if it.measurement)
    return {key: _sentence([it for it in results if it.device_key == key]) for key in keys}


def is_news(results: Sequence[Result]) -> bool:
    """Whether that tells more than a table does: there are several devices, or baselines of others.

    What has no baseline anywhere, or wants none, is in the table as such.
    """
    several = len({it.device_key for it in results if it.measurement}) > 1
    return several or any(
        it.verdict.held_to or it.verdict.uncompared.startswith("with ") for it in results
    )


def _whose(results: Sequence[Result]) -> str:
    """Return whose baselines: this device's own, or those that --gpumem-against names."""
    others = dict.fromkeys(it.verdict.held_to for it in results if it.verdict.held_to)
    return f"{', '.join(others)}'s" if others else "its own"


def _sentence(results: Sequence[Result]) -> str:
    reasons = Counter(it.verdict.uncompared for it in results)
    held = reasons.pop("", 0)
    text = f"{held} held to {_whose(results)} {'baseline' if held == 1 else 'baselines'}"
    if not reasons:
        return text
    shown = [f"{number} {reason}" for reason, number in reasons.most_common(MOST_REASONS)]
    more = len(reasons) - len(shown)
    shown += [f"and {more} more reasons"] if more else []
    return f"{text}, {reasons.total()} not: {'; '.join(shown)}"
