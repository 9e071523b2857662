"""Which baselines have no test any more, after pytest has collected all that there is. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_gpumem.baselines.key import Key

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
    that was left out, or skipped on this machine, nobody knows. One with a card's name at the end
    of its own is the test's that ``--gpumem-cards`` runs on that card.

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
        if not there[module] or (known and not _has(collection.tests, key.nodeid)):
            stale.append(key)
    return sorted(set(stale), key=lambda key: (key.nodeid, key.device))


def _has(tests: set[str], nodeid: str) -> bool:
    """Whether a test is among those, as it is or with a card's name added to its own."""
    return nodeid in tests or (nodeid.endswith("]") and _without_card(nodeid) in tests)


def _without_card(nodeid: str) -> str:
    """Return "t.py::test[8-rank0]" for "t.py::test[8-T4-rank0]", as the test is on no card."""
    from pytest_gpumem.devices.cards import CARDS

    cards = "|".join(re.escape(name) for name in CARDS)
    found = re.search(rf"(\[|-)(?:{cards})(?:-(rank\d+))?\]$", nodeid)
    if found is None:
        return nodeid
    before = nodeid[: found.start()]
    if found[1] == "[":
        return f"{before}[{found[2]}]" if found[2] else before
    return f"{before}-{found[2]}]" if found[2] else f"{before}]"


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
