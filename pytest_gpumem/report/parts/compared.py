"""How many results were compared with baselines, and why the rest was not: a sentence a device."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_gpumem.judge.verdict import UNCOMPARED_IN_TABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.judge.result import Result

MAX_REASONS = 4
"""reasons that a sentence gives, the most frequent first"""


def comparison_sentences(results: Sequence[Result]) -> dict[str, str]:
    """Return a sentence for each device, by its key: "9 of 10 compared, 1 missing"."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.measurement:
            groups.setdefault(result.device_key, []).append(result)
    sentences = {}
    for key, members in groups.items():
        reasons = Counter(result.verdict.uncompared for result in members)
        compared = reasons.pop("", 0)
        devices = dict.fromkeys(result.verdict.held_to for result in members)
        against = ", ".join(filter(None, devices))
        shown = [f"{number} {reason}" for reason, number in reasons.most_common(MAX_REASONS)]
        hidden = len(reasons) - len(shown)
        shown += [f"and {hidden} more reasons"] if hidden else []
        baselines = f" with those of {against}" if against else ""
        lead = f"{compared} of {len(members)} compared{baselines}"
        sentences[key] = ", ".join([lead, *shown])
    return sentences


def tells_more_than_table(results: Sequence[Result]) -> bool:
    """Whether the sentences tell more than the table of tests.

    They do of several devices, of another device's baselines, and of baselines that exist and could
    not be compared with.
    """
    devices = {result.device_key for result in results if result.measurement}
    verdicts = [result.verdict for result in results]
    return len(devices) > 1 or any(
        verdict.held_to or verdict.uncompared not in UNCOMPARED_IN_TABLE for verdict in verdicts
    )
