"""What a report is about: the results of a session, before any wording or layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.judge.result import Result, count_kinds

# At run time too: msgspec reads the annotations of Result (report/wire.py).

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.baselines.store import UpdateSummary
    from pytest_gpumem.judge.verdict import Kind


@dataclass(frozen=True)
class Report:
    """All that a session has to tell; every renderer starts from this."""

    results: tuple[Result, ...] = ()
    updates: UpdateSummary | None = None
    """what became of the baselines, in a run that updates them"""
    device: str = ""
    """the session's device, in words"""
    options: Mapping[str, str] = field(default_factory=dict)
    """the options that bear on the verdicts, by name"""
    remarks: tuple[str, ...] = ()
    """sentences about the session: what was skipped, what could not be read"""

    @property
    def counts(self) -> dict[Kind, int]:
        """How many results are of each kind, in the order of :class:`Kind`, without zeros."""
        return count_kinds(self.results)
