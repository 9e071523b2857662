"""Lines that read values back from the virtual GPU which no kernel computed."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.virtual.decisions import PACKAGE, decides, is_test_of_while
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.source_lines import shown_path, users_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    Row = tuple[str, int, int, int, int]
    """a file, a line, the number of values that it read; rows or elements taken, and of how many"""

MOST_ROUNDS: Final = 10_000
"""values that are not computed, read by the test of one ``while``; no text that is generated is so
long, and it takes a second"""
MOST_READ: Final = 100_000
"""such values that any one line reads: a loop may end by itself, so that more are let through"""
MOST_FIRST: Final = 100
"""such values that a line reads in a run which is followed by one with values: a loop that waits
for them, as that of ``generate()``, is left early, and layers that each read one are not"""
MOST_SITES: Final = 3
"""lines that a note names"""
SCALER: Final = str(Path("torch", "amp", "grad_scaler.py"))
"""PyTorch's file with torch.amp.GradScaler"""
NO_OVERFLOW: Final = (
    "torch.amp.GradScaler's gradients are taken as finite: where they overflow, a GPU skips the "
    "optimizer's first steps, and has its state later"
)


@dataclass
class _Guesses:
    """The values of one kind, unknown or assumed, that a program decided by, by its lines."""

    lines: Counter[tuple[str, int]] = field(default_factory=Counter)
    taken: Counter[tuple[str, int]] = field(default_factory=Counter)
    """rows or elements that operators took at each line by such values"""
    offered: Counter[tuple[str, int]] = field(default_factory=Counter)
    """of so many"""

    def where(self, root: Path) -> str:
        """Return the lines, those where sizes depend on the values first."""
        sites = sorted(
            (site for site, _ in self.lines.most_common() if site[0]),
            key=lambda site: site not in self.offered,
        )
        named = []
        for site in sites[:MOST_SITES]:
            line = f"{shown_path(site[0], root)}:{site[1]}"
            if site in self.offered:
                line = f"{self.taken[site]:,} of {self.offered[site]:,} taken at {line}"
            named.append(line)
        unnamed = len(sites) - MOST_SITES
        also = f" and {unnamed} more" if unnamed > 0 else ""
        return f" ({', '.join(named)}{also})" if named else ""

    def rows(self) -> list[Row]:
        """Return all counts, a row a line; files by their absolute paths."""
        return [
            (
                str(Path(site[0]).absolute()) if site[0] else "",
                *(site[1], count, self.taken[site], self.offered[site]),
            )
            for site, count in self.lines.items()
        ]

    def add(self, rows: Sequence[Row]) -> None:
        """Add the counts of another process."""
        for filename, line, count, taken, offered in rows:
            site = filename, line
            self.lines[site] += count
            if offered:
                self.taken[site] += taken
                self.offered[site] += offered


class Readbacks:
    """Counts the values that a program decides by and that are unknown, or assumed, by its lines.

    A value that is only shown or logged is not counted: no figure depends on it.
    """

    def __init__(self, set_endless: Callable[[str], None] | None = None) -> None:
        """Count from nothing.

        Args:
            set_endless: is called with the error that a copy is about to fail with.
        """
        self._set_endless = set_endless
        self.in_sized_operator: Callable[[FrameType | None], bool] | None = None
        """asks the values' mode whether a frame runs an operator that may choose a size"""
        self._unknown = _Guesses()
        self._assumed = _Guesses()
        self.any_read = False
        """whether the program read an unknown or assumed value, be it to show it or to keep it"""
        self.answered = False
        """whether the copies of the operator that runs are of known values"""
        self._any_overflow = False
        """whether GradScaler asked if gradients overflowed that are not known"""
        self.any_known = False
        """whether the program read a value that was computed"""
        self._by_known = False
        """whether it decided by one"""
        self.rerun_follows = False
        """whether the program runs once more, with values: it need not run to its end"""

    def clear(self) -> None:
        """Begin anew."""
        self._unknown = _Guesses()
        self._assumed = _Guesses()
        self.any_read = self.any_known = self._by_known = self._any_overflow = False
        self.rerun_follows = False

    @property
    def any_unknown(self) -> bool:
        """Whether the program decided by an unknown value."""
        return bool(self._unknown.lines)

    @property
    def any_assumed(self) -> bool:
        """Whether the program decided by an assumed value."""
        return bool(self._assumed.lines)

    @property
    def any_deciding(self) -> bool:
        """Whether the program decided by any value, known or not."""
        return self._by_known or self.any_unknown or self.any_assumed

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of unknown and of assumed values that the program decided by."""
        return self._unknown.lines.total(), self._assumed.lines.total()

    def rows(self) -> tuple[list[Row], list[Row]]:
        """Return the counts of unknown and of assumed values, for another process's ``add``."""
        return self._unknown.rows(), self._assumed.rows()

    def add(self, rows: Sequence[Sequence[Row]]) -> None:
        """Add the counts that another process has from ``rows``."""
        unknown, assumed = rows
        self._unknown.add(unknown)
        self._assumed.add(assumed)

    def seen(self, size: int, sized: int = 0) -> bool:
        """Note one copy of unknown bytes; called by the native library, on any thread.

        Args:
            size: of the copy.
            sized: whether an operator chooses a size by it.

        Returns:
            whether the copy is to fail: its loop would not end, or need not.
        """
        if self.answered:
            return False
        self.any_read = True
        frame, lines = sys._getframe().f_back, self._unknown.lines
        self._any_overflow |= asks_for_infinities(frame)
        is_sized = bool(sized) or (
            self.in_sized_operator is not None and self.in_sized_operator(frame)
        )
        endless = _note(frame, size, lines, sized=is_sized, short=self.rerun_follows)
        if endless is not None and self._set_endless is not None:
            self._set_endless(str(endless))
        return endless is not None

    def seen_known(self, size: int, *, sized: bool) -> None:
        """Note that a known value of so many bytes is read; only the first that decides counts."""
        self.any_known = True
        frame = sys._getframe().f_back
        if not self._by_known and not asks_for_infinities(frame):
            self._by_known = decides(frame, size, sized=sized)

    def seen_assumed(self, size: int, *, sized: bool) -> None:
        """Note that an assumed value of so many bytes is read.

        Args:
            size: of the value.
            sized: whether an operator chooses a size by it.

        Raises:
            DeviceError: the loop that reads it would not end.
        """
        self.any_read = True
        frame = sys._getframe().f_back
        self._any_overflow |= asks_for_infinities(frame)
        endless = _note(frame, size, self._assumed.lines, sized=sized)
        if endless is not None:
            raise endless

    def seen_taken(self, taken: int, offered: int, counts: tuple[int, int]) -> None:
        """Note how many of so many rows or elements an operator took by values not computed.

        Args:
            taken: the number of rows or elements of its output.
            offered: the number that it chose from.
            counts: ``counts`` before it ran.
        """
        line = users_line(sys._getframe().f_back)
        if line is not None:
            guesses = self._unknown if self.counts[0] > counts[0] else self._assumed
            guesses.taken[line.filename, line.line] += taken
            guesses.offered[line.filename, line.line] += offered

    def notes(self, root: Path) -> list[str]:
        """Return the sentences about these values; files as seen from ``root``."""
        sentences = []
        for guesses, event, consequence in (
            (
                self._unknown,
                "read back from the virtual GPU",
                "shapes that depend on them are not predicted",
            ),
            (self._assumed, "assumed", "the figures hold for finite, evenly spread values"),
        ):
            total = guesses.lines.total()
            if total:
                values = f"{total} values were" if total > 1 else "1 value was"
                sentences.append(f"{values} {event}{guesses.where(root)}: {consequence}")
        return sentences + [NO_OVERFLOW] * self._any_overflow


def _note(
    frame: FrameType | None,
    size: int,
    sites: Counter[tuple[str, int]],
    *,
    sized: bool,
    short: bool = False,
) -> DeviceError | None:
    """Count a value; return the error that ends a loop which waits for it in vain.

    Args:
        frame: the innermost frame of Python's.
        size: bytes of the value.
        sites: the values so far, by the lines that read them.
        sized: whether an operator chooses a size by it.
        short: whether few are let through.
    """
    if asks_for_infinities(frame) or not decides(frame, size, sized=sized):
        return None
    line = users_line(frame)
    site = (line.filename, line.line) if line else ("", 0)
    sites[site] += 1
    count = sites[site]
    most = MOST_FIRST if short else MOST_ROUNDS
    bounded = short or count >= MOST_READ or is_test_of_while(*site)
    if line is None or count < most or not bounded:
        return None
    return DeviceError(
        f"{shown_path(line.filename, Path.cwd())}:{line.line}",
        f"{count:,} values were read here that the virtual GPU has not computed, and a loop that "
        "waits for them does not end",
        'compute them (values="full"), guard the loop with `if gpu_memory.computes:`, or bound it',
    )


def asks_for_infinities(frame: FrameType | None) -> bool:
    """Return whether GradScaler asks if gradients overflowed.

    Zero says that none did, as in a step that trains, and the optimizer steps. No shape depends on
    it.
    """
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.endswith(SCALER):
        if frame.f_code.co_name == "_maybe_opt_step":
            return True
        frame = frame.f_back
    return False
