"""One result of a test that several ranks measured: the worst rank's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pytest_gpumem.judge.verdict import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.judge.result import Result

SEVERITY: Final = (
    Kind.OUT_OF_MEMORY,
    Kind.OVER_BUDGET,
    Kind.LEAKED,
    Kind.REGRESSED,
    Kind.INCOMPARABLE,
    Kind.NO_BASELINE,
)
"""of failures, the worst first"""


def merged(ranks: Sequence[Sequence[Result]], *, shrinkage_fails: bool) -> list[Result]:
    """Return a test's results, one for the whole test and one for each part.

    Args:
        ranks: what each rank measured.
        shrinkage_fails: whether the fullest rank's peak has to be as high as its baseline.
    """
    parts: dict[str, list[Result]] = {}
    for results in ranks:
        for result in results:
            parts.setdefault(result.part, []).append(result)
    return [_worst(found, shrinkage_fails=shrinkage_fails) for found in parts.values()]


def _worst(results: Sequence[Result], *, shrinkage_fails: bool) -> Result:
    worst = max(results, key=_badness)
    verdict = worst.verdict
    if verdict.kind is Kind.IMPROVED and shrinkage_fails:
        verdict = replace(verdict, failed=True)
    if len(results) > 1 and worst.rank is not None:
        why = "failed" if verdict.failed else "held most"
        verdict = replace(verdict, notes=(*verdict.notes, f"of the ranks, {worst.rank} {why}"))
    return replace(worst, verdict=verdict)


def _badness(result: Result) -> tuple[bool, int, int, int]:
    failed, kind = result.verdict.failed, result.verdict.kind
    rank = SEVERITY.index(kind) if failed and kind in SEVERITY else len(SEVERITY)
    peak = result.measurement.peak_allocated if result.measurement else 0
    return failed, -rank, peak, -(result.rank or 0)
