"""Baselines of tests that are gone, found after pytest has collected all tests. Pure."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pytest_gpumem.nodeids import module_of, without_card

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_gpumem.baselines.key import Key

MAX_NAMES: Final = 3
"""tests that one line of the terminal still names"""


@dataclass
class Collection:
    """The tests and files that a session of pytest has collected."""

    tests: set[str] = field(default_factory=set)
    """the nodeids of all tests, also of those that were deselected"""
    files: set[str] = field(default_factory=set)
    """the nodeids of collectors without an error, test files among them"""
    skipped: set[str] = field(default_factory=set)
    """the test files that were left out as a whole or in part, on purpose"""
    partial: str = ""
    """the reason why some tests are missing here; "" if none is"""
    broken: str = ""
    """the reason why even of collected files some tests may be missing here; "" if none are"""

    def take(self, nodeid: str, outcome: str) -> None:
        """Take pytest's report on one file, class or folder: "passed", "failed" or "skipped"."""
        if outcome == "passed":
            self.files.add(nodeid)
        elif outcome == "skipped":
            self.skipped.add(module_of(nodeid))
        else:
            self.broken = f"{nodeid or 'something'} could not be collected"
            self.partial = self.partial or self.broken


def find_stale(
    collection: Collection, keys: Iterable[Key], exists: Callable[[str], bool]
) -> list[Key]:
    """Return the keys of baselines without a test; none where the collection is not complete.

    A test is gone if its file is, or if its file was collected and the test was not in it. A file
    that was left out, or skipped on this machine, tells nothing about its tests. A name with a
    card's name among its parameters is the test's that ``--gpumem-cards`` runs on that card.
    """
    from pytest_gpumem.devices.cards import CARDS

    if collection.partial:
        return []
    tests = collection.tests
    there: dict[str, bool] = {}  # a look at the disk for each file, not for each test
    stale = set()
    for key in keys:
        module, nodeid = key.module, key.nodeid
        if module not in there:
            there[module] = False
            with suppress(OSError):  # a file's content may name what is too long for any path
                there[module] = exists(module)
        is_gone = not there[module]
        if not is_gone and module in collection.files and module not in collection.skipped:
            is_gone = nodeid not in tests and without_card(nodeid, CARDS) not in tests
        if is_gone:
            stale.add(key)
    return sorted(stale, key=lambda key: (key.nodeid, key.device))


def stale_line(stale: Iterable[Key], words: Iterable[str] = ()) -> str:
    """Return a line that names stale baselines; "" where none is.

    ``words`` are those of the command line by which pytest collects the same tests again.
    """
    names = [f"{key.nodeid} on {key.device}" for key in stale]
    if not names:
        return ""
    number = len(names)
    if number > MAX_NAMES:
        names = [*names[:MAX_NAMES], f"{number - MAX_NAMES} more"]
    have = "baseline has" if number == 1 else "baselines have"
    command = shlex.join(["gpumem", "prune", "--delete", *words])
    return f"gpumem: {number} {have} no test any more ({command} removes them): {', '.join(names)}"
