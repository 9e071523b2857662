"""Bisect a list of versions until the first bad one is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Halving:
    """Searches for the first bad version, if the first one is good and the last one bad."""

    versions: Sequence[str]
    """all versions, from the good one to the bad one"""
    last_good: int = 0
    """index of the last version known to be good"""
    first_bad: int = field(init=False)
    """index of the first version known to be bad"""
    skipped: set[int] = field(default_factory=set)
    """indexes of versions that could not be tried"""

    def __post_init__(self) -> None:
        self.first_bad = len(self.versions) - 1

    @property
    def next_index(self) -> int | None:
        """The index of the version to try: nearest to the middle; None if none is left."""
        between = range(self.last_good + 1, self.first_bad)
        middle = (self.last_good + self.first_bad) / 2
        candidates = [index for index in between if index not in self.skipped]
        return min(candidates, key=lambda index: abs(index - middle), default=None)

    @property
    def trials_left(self) -> int:
        """The maximum number of versions that bisection still has to try, if none is skipped."""
        between = range(self.last_good + 1, self.first_bad)
        return sum(index not in self.skipped for index in between).bit_length()

    @property
    def untried(self) -> list[str]:
        """The versions between the last good and the first bad one, which were all skipped."""
        return list(self.versions[self.last_good + 1 : self.first_bad])

    def note(self, index: int, *, is_bad: bool) -> None:
        """Record whether a version is bad."""
        if is_bad:
            self.first_bad = index
        else:
            self.last_good = index
