"""The record of a session that every renderer starts from, before any wording or layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.judge.result import Result, count_kinds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.baselines.key import Key
    from pytest_gpumem.baselines.store import UpdateSummary
    from pytest_gpumem.judge.verdict import Kind


@dataclass(frozen=True)
class Report:
    """The results of a session, and its circumstances."""

    results: tuple[Result, ...] = ()
    updates: UpdateSummary | None = None
    """the fate of the baselines, in a run that updates them"""
    device: str = ""
    """the session's device, in words"""
    options: Mapping[str, str] = field(default_factory=dict)
    """the options that bear on the verdicts, by name"""
    remarks: tuple[str, ...] = ()
    """sentences about the session: skipped tests, files that cannot be read"""
    arguments: tuple[str, ...] = ()
    """files and folders of its command line, and options that left tests out; not in JSON"""

    histories: Mapping[Key, Sequence[int]] = field(default_factory=dict)
    """peaks allocated that the tests' committed baselines have had, the oldest first, in bytes"""

    @property
    def counts(self) -> dict[Kind, int]:
        """How many results are of each kind, in the order of :class:`Kind`, without zeros."""
        return count_kinds(self.results)
