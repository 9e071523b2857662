"""How many results were compared with baselines, and why the rest was not: a sentence a device."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_gpumem.judge.verdict import UNCOMPARED_IN_TABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.judge.result import Result

MOST_REASONS = 4
"""reasons that a sentence gives, the most frequent first"""


def comparison_sentences(results: Sequence[Result]) -> dict[str, str]:
    """Return a sentence for each device, by its key: "9 of 10 compared, 1 missing"."""
    keys = dict.fromkeys(it.device_key for it in results if it.measurement)
    return {key: _sentence([it for it in results if it.device_key == key]) for key in keys}


def tells_more_than_table(results: Sequence[Result]) -> bool:
    """Whether the sentences tell what the table of tests does not.

    They do of several devices, of another device's baselines, and of baselines that exist and could
    not be compared with.
    """
    several = len({it.device_key for it in results if it.measurement}) > 1
    return several or any(
        it.verdict.held_to or it.verdict.uncompared not in UNCOMPARED_IN_TABLE for it in results
    )


def _sentence(results: Sequence[Result]) -> str:
    reasons = Counter(it.verdict.uncompared for it in results)
    compared = reasons.pop("", 0)
    devices = dict.fromkeys(it.verdict.held_to for it in results if it.verdict.held_to)
    against = f" with {', '.join(devices)}'s" if devices else ""
    shown = [f"{number} {reason}" for reason, number in reasons.most_common(MOST_REASONS)]
    hidden = len(reasons) - len(shown)
    shown += [f"and {hidden} more reasons"] if hidden else []
    return ", ".join([f"{compared} of {len(results)} compared{against}", *shown])
