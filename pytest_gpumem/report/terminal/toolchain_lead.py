"""What a session leads with where a new toolchain, and no test, moved the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.judge.toolchain_change import Shift, find, moved_categories
from pytest_gpumem.judge.verdict import UPDATE_OPTION, Kind
from pytest_gpumem.report.text import encodable, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.judge.toolchain_change import Together


def moved_together(results: Iterable[Result]) -> list[Together]:
    """Return what moved beyond tolerance together with what it was measured with."""
    return find(filter(None, map(_shift, results)))


def _shift(result: Result) -> Shift | None:
    entry, measurement = result.baseline_entry, result.measurement
    if entry is None or measurement is None or measurement.out_of_memory:
        return None
    before, after = entry.provenance, measurement.provenance
    lead = None if before == after else result.lead
    if lead is None:
        return None
    if result.verdict.held_to:  # another device's, of which all differs
        return None
    key = measurement.device.key
    if not lead.excess:
        return Shift(result.nodeid, result.part, key, before, after)
    now = [it.breakdown for it in measurement.attributions]
    moved = moved_categories(entry.breakdowns, now, lead.device)
    amount = lead.difference or 0
    return Shift(result.nodeid, result.part, key, before, after, lead.peak, amount, moved)


def lead_lines(
    results: Sequence[Result], width: int = 80, *, ascii_only: bool = False
) -> list[str]:
    """Return the paragraphs that a summary leads with; none where nothing moved together."""
    groups = moved_together(results)
    texts = [it.sentence for it in groups]
    verdicts = {it.name: it.verdict for it in results if it.verdict.kind is Kind.REGRESSED}
    regressed = {name for name, verdict in verdicts.items() if verdict.failed}
    told = _names(groups)
    others = len(regressed - told)
    if regressed & told and others:
        texts.append(f"{others} more regressed otherwise: look there first")
    elif regressed & told:
        texts.append(f"if this is intended, run pytest {UPDATE_OPTION}")
    return [encodable(wrapped("gpumem: ", it, width), ascii_only=ascii_only) for it in texts]


def short_texts(results: Sequence[Result]) -> dict[str, str]:
    """Return a line in place of the section of each test that failed only by having moved so."""
    told = _names(moved_together(results))
    texts: dict[str, str] = {}
    for result in results:
        if not result.verdict.failed:
            continue
        if result.name in told and result.verdict.kind is Kind.REGRESSED:
            texts.setdefault(result.nodeid, f"{result.verdict.headline}\n{_ELSEWHERE}")
        else:
            texts[result.nodeid] = ""
    return {nodeid: text for nodeid, text in texts.items() if text}


_ELSEWHERE = "(it moved together with other tests, see the summary; -v shows all of it)"


def _names(groups: Iterable[Together]) -> set[str]:
    shifts = (it for group in groups for it in group.shifts)
    return {f"{it.nodeid} ({it.part})" if it.part else it.nodeid for it in shifts}
