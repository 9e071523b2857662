"""Records the lines of a program that branch on values that no kernel computed.

Operators with data-dependent output sizes are recognized as such. A number that a program reads
back records how the program uses it: see uncertain_numbers.py.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.errors import DeviceError
from pytest_gpumem.source_lines import OWN_FOLDER, is_users, package_path, shown_path, users_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    Site = tuple[str, int, str]
    """file and line of user code, and the line of PyTorch that branches ("" if user code
    branches)"""
    Row = tuple[str, int, str, int, int, int]
    """a site; the number of values that it branched on; how many rows or elements operators
    selected there by such values; and how many they selected from"""

MAX_READ: Final = 20_000
"""maximum number of uncomputed values that one line may branch on: no generated text is so long,
and a loop that waits for such values fails within seconds"""
MAX_SIZE: Final = 8
"""while no values are computed: bytes of the largest copy to the host that may be a size, which an
operator reads back; larger copies count as tensors"""
MAX_SITES: Final = 3
"""maximum number of lines that a note names"""
OPTIMIZERS: Final = str(Path("torch", "optim"))
FORWARDING_FILES: Final = (
    "torch/_ops.py",
    "torch/_tensor.py",
    "torch/overrides.py",
    "/functional.py",
)
"""PyTorch's files whose functions only forward calls: reads there are attributed to the callers"""
SCALER: Final = str(Path("torch", "amp", "grad_scaler.py"))
NO_OVERFLOW: Final = (
    "the gradients of torch.amp.GradScaler are assumed to be finite: if they overflow on a "
    "real GPU, it skips the optimizer's first steps, and the optimizer's state is "
    "allocated later"
)


@dataclass
class Guesses:
    """Counts, per line, the unknown values (or the assumed ones) that a program branched on."""

    lines: Counter[Site] = field(default_factory=Counter)
    selected: Counter[Site] = field(default_factory=Counter)
    """per line: the number of rows or elements that operators selected by such values"""
    candidates: Counter[Site] = field(default_factory=Counter)
    """per line: the number of rows or elements that operators selected from"""
    unseen: dict[object, Site] = field(default_factory=dict)
    """for each integer read back whose use was not observed, so that it may have become a size: the
    line that read it"""

    def all_lines(self) -> Counter[Site]:
        """Return the number of values per line, including those that may have become sizes."""
        return self.lines + Counter(self.unseen.values())

    def total(self) -> int:
        """Return the number of values that the program branched on or may have used as sizes."""
        return self.lines.total() + len(self.unseen)

    def where(self, root: Path) -> str:
        """Return the lines as text, first those that select rows; "" if no line is known."""
        sites = sorted(
            (site for site, _ in self.all_lines().most_common() if site[0]),
            key=lambda site: site not in self.candidates,
        )
        named = []
        for site in sites[:MAX_SITES]:
            line = f"{shown_path(site[0], root)}:{site[1]}"
            if site[2]:
                line += f" through {site[2]}"
            if site in self.candidates:
                line = f"{self.selected[site]:,} of {self.candidates[site]:,} taken at {line}"
            named.append(line)
        unnamed = len(sites) - MAX_SITES
        also = f" and {unnamed} more" if unnamed > 0 else ""
        return f" ({', '.join(named)}{also})" if named else ""

    def rows(self) -> list[Row]:
        """Return all counts, one row per line, with absolute paths."""
        return [
            (
                str(Path(site[0]).absolute()) if site[0] else "",
                *(site[1], site[2], count, self.selected[site], self.candidates[site]),
            )
            for site, count in self.all_lines().items()
        ]

    def add(self, rows: Sequence[Row]) -> None:
        """Add the counts of another process."""
        for filename, line, within, count, selected, candidates in rows:
            site = filename, line, within
            self.lines[site] += count
            if candidates:
                self.selected[site] += selected
                self.candidates[site] += candidates


class _ReadPurpose(threading.local):
    """The purpose of this thread's reads."""

    purpose = ""
    """"number": a tensor method returns the value as a number; "shown": the value is printed;
    "kept": the value stays in a tensor; "": unknown"""
    guesses: Guesses | None = None
    """counts the branches on the number being read; None if the number is known"""


class Decisions:
    """Counts per line the unknown and the assumed values that a program branches on.

    A value that is only shown or logged is not counted: no figure depends on it.
    """

    def __init__(
        self, set_endless: Callable[[str], None] | None = None, max_read: int = MAX_READ
    ) -> None:
        """Start with zero counts.

        Args:
            set_endless: called with the error's text before a copy fails.
            max_read: number of values after which a line's loop counts as endless.
        """
        self._set_endless = set_endless
        self._max_read = max_read
        self.here = _ReadPurpose()
        self.computes = False
        """whether values are computed, so that every operator is seen"""
        self.answered = False
        """whether the running operator copies known or queued values to the host; ``seen`` then
        records nothing"""
        self.clear()

    def clear(self) -> None:
        """Reset all counts."""
        self._unknown = Guesses()
        self._assumed = Guesses()
        self._bounds: dict[Site, None] = {}
        """lines where a result's size is an upper bound"""
        self.any_read = self._any_overflow = False

    def holds(self, guesses: Guesses) -> bool:
        """Return whether guesses belong to the running test: a number may outlive its test."""
        return guesses is self._unknown or guesses is self._assumed

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of unknown and of assumed values that the program branched on."""
        return self._unknown.total(), self._assumed.total()

    def rows(self) -> tuple[list[Row], list[Row]]:
        """Return the counts of unknown and of assumed values, for another process's ``add``."""
        return self._unknown.rows(), self._assumed.rows()

    def add(self, rows: Sequence[Sequence[Row]]) -> None:
        """Add the counts that another process returned from ``rows``."""
        unknown, assumed = rows
        self._unknown.add(unknown)
        self._assumed.add(assumed)

    @contextmanager
    def purpose(self, purpose: str) -> Iterator[None]:
        """Set the purpose of this thread's reads in a block, unless an outer block has set it."""
        here, outer = self.here, self.here.purpose
        here.purpose = outer or purpose
        try:
            yield
        finally:
            here.purpose = outer

    def seen(self, size: int) -> bool:
        """Record a copy of unknown bytes; the native library calls this on any thread.

        Args:
            size: bytes of the copy; 0: a library returned a number that is an upper bound.

        Returns:
            whether the copy must fail, because its loop would not end.
        """
        if self.answered:
            return False
        if not self.computes and size > MAX_SIZE and not self.here.purpose:
            self.any_read = True  # probably a tensor's elements, not a size
            return False
        try:
            self._read(self._unknown if size else self._assumed)
        except DeviceError as endless:
            if self._set_endless is not None:
                self._set_endless(str(endless))
            return True
        return False

    def seen_assumed(self) -> None:
        """Record that an assumed value is read.

        Raises:
            DeviceError: the loop that reads the value would not end.
        """
        self._read(self._assumed)

    def seen_bound(self) -> None:
        """Record that the size of an operator's result is an upper bound."""
        self._bounds[site_of_read(sys._getframe(1))] = None

    def bounds_named(self, root: Path) -> str:
        """Return the lines where a size is an upper bound; "" if there are none."""
        lines = dict.fromkeys(
            f"{shown_path(site[0], root)}:{site[1]}" for site in self._bounds if site[0]
        )
        unnamed = len(lines) - MAX_SITES
        also = f" and {unnamed} more" if unnamed > 0 else ""
        named = f"{', '.join([*lines][:MAX_SITES])}{also}"
        return named or ("lines that are not known" if self._bounds else "")

    def _read(self, guesses: Guesses) -> None:
        here = self.here
        if here.purpose == "shown":
            return
        self.any_read = True
        if here.purpose == "number":
            here.guesses = guesses
        elif here.purpose != "kept":
            self.decide(guesses)

    def decide(self, guesses: Guesses) -> None:
        """Count a branch on a value.

        Raises:
            DeviceError: the branching loop would not end.
        """
        caller = frame = sys._getframe(1)
        while caller.f_back is not None and caller.f_code.co_filename.startswith(OWN_FOLDER):
            caller = caller.f_back
        code = caller.f_code
        if code.co_name == "__init__" and OPTIMIZERS in code.co_filename:
            return  # an optimizer's constructor checks its arguments; no figure depends on it
        while caller.f_back is not None and caller.f_code.co_filename.endswith(SCALER):
            # An unknown flag is read as zero: no gradient overflowed, as in a normal training step,
            # and the optimizer steps. No shape depends on the flag.
            if caller.f_code.co_name == "_maybe_opt_step":
                self._any_overflow = True
                return
            caller = caller.f_back
        site = site_of_read(frame)
        guesses.lines[site] += 1
        if site[0] and guesses.lines[site] >= self._max_read:
            raise DeviceError(
                f"{shown_path(site[0], Path.cwd())}:{site[1]}",
                f"this line read {guesses.lines[site]:,} values that the virtual GPU did not "
                "compute, and a loop that waits for such values does not end",
                'compute all values (values="full"), guard the loop with '
                "`if gpu_memory.computes:`, or limit its iterations",
            )

    def seen_selection(self, selected: int, candidates: int, counts: tuple[int, int]) -> None:
        """Record how many rows or elements an operator selected by uncomputed values.

        Args:
            selected: the number of rows or elements of its output.
            candidates: the number that it selected from.
            counts: the value of ``counts`` before the operator ran.
        """
        site = site_of_read(sys._getframe(1))
        if site[0]:
            guesses = self._unknown if self.counts[0] > counts[0] else self._assumed
            guesses.selected[site] += selected
            guesses.candidates[site] += candidates

    def notes(self, root: Path) -> list[str]:
        """Return sentences on the counted values; file names are relative to ``root``."""
        sentences = []
        for guesses, event, consequence in (
            (
                self._unknown,
                "read back from the virtual GPU",
                "shapes that depend on them are not predicted",
            ),
            (self._assumed, "assumed", "the figures hold for finite, evenly spread values"),
        ):
            total = guesses.total()
            if total:
                values = f"{total} values were" if total > 1 else "1 value was"
                sentences.append(f"{values} {event}{guesses.where(root)}: {consequence}")
        return sentences + [NO_OVERFLOW] * self._any_overflow


def site_of_read(frame: FrameType | None) -> Site:
    """Return the user's line in a stack of frames, and the innermost line of PyTorch below it."""
    line, within = users_line(frame), ""
    while frame is not None and not within:
        filename = frame.f_code.co_filename
        if is_users(filename):
            break
        if not filename.startswith(OWN_FOLDER) and not filename.endswith(FORWARDING_FILES):
            path = package_path(filename)
            within = f"{path}:{frame.f_lineno}" if path.startswith("torch/") else ""
        frame = frame.f_back
    return (line.filename, line.line, within) if line else ("", 0, within)
