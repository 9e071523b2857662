"""Why tests of PyTorch fail on the virtual GPU: a class for each, and the reason."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

CLASSES = {
    "a": "needs kernels' effects on large data, or real time, which are not claimed",
    "b": "needs hardware that is not claimed",
    "c": "the tests are of another version than the torch",
    "d": "ours",
    "e": "fails the same without this package",
}


class Reason(NamedTuple):
    """A failure's class, and why."""

    kind: str
    why: str


REASONS: dict[tuple[str, str], Reason] = {}
"""by file and test's name (a pattern)"""


def reason_of(path: str, name: str) -> Reason | None:
    """Return the reason of a test that fails, or None."""
    for (file, pattern), reason in REASONS.items():
        if file == path and fnmatchcase(name, pattern):
            return reason
    return None
