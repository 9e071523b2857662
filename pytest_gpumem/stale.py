"""Which baselines have no test any more, after pytest has collected all that there is. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_gpumem.moves import Key

SOME: Final = 3
"""tests that a line still names"""
PRUNE: Final = "gpumem prune --delete"


@dataclass
class Collection:
    """What a session of pytest has collected."""

    tests: set[str] = field(default_factory=set)
    """the nodeids of all tests, also of those that were deselected"""
    files: set[str] = field(default_factory=set)
    """the nodeids of what was collected without an error, test files among them"""
    skipped: set[str] = field(default_factory=set)
    """the test files of which something was not collected, on purpose"""
    partial: str = ""
    """why this is not all that there is; "" if it is"""

    def take(self, nodeid: str, outcome: str) -> None:
        """Take pytest's report on one file, class or folder: "passed", "failed" or "skipped"."""
        if outcome == "passed":
            self.files.add(nodeid)
        elif outcome == "skipped":
            self.skipped.add(nodeid.partition("::")[0])
        else:
            self.partial = self.partial or f"{nodeid or 'something'} could not be collected"


def find_stale(
    collection: Collection, keys: Iterable[Key], exists: Callable[[str], bool]
) -> list[Key]:
    """Return the baselines whose tests are gone; none where not all was collected.

    A test is gone if its file is, or if that was collected and the test was not in it. Of a file
    that was left out, or skipped on this machine, nobody knows.

    Args:
        collection: what there is.
        keys: of the baselines.
        exists: says whether there is such a test file.
    """
    if collection.partial:
        return []
    there: dict[str, bool] = {}
    stale = []
    for key in keys:
        module = key.module
        if module not in there:
            there[module] = exists(module)
        known = module in collection.files and module not in collection.skipped
        if not there[module] or (known and key.nodeid not in collection.tests):
            stale.append(key)
    return sorted(set(stale), key=lambda key: (key.nodeid, key.device))


def stale_line(stale: Iterable[Key]) -> str:
    """Return a line that says which baselines are stale; "" where none is."""
    names = [f"{key.nodeid} on {key.device}" for key in stale]
    if not names:
        return ""
    more = len(names) - SOME
    if more > 0:
        names = [*names[:SOME], f"{more} more"]
    several = more + SOME > 1
    what = f"{more + SOME} baselines are of tests" if several else "1 baseline is of a test"
    gone = "that are gone" if several else "that is gone"
    return f"gpumem: {what} {gone} ({PRUNE} removes them): {', '.join(names)}"
