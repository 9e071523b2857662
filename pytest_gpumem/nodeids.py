"""Parts of pytest's node ids."""

from __future__ import annotations


def split(nodeid: str) -> tuple[str, str]:
    """Return a nodeid's test module and the test in it."""
    module, _, test = nodeid.partition("::")
    return module, test
