"""A conftest.py that follows tests through the package: files entered, moves between files, calls.

``benchmarks.house.figures`` copies this file beside a suite. Counted as calls are calls of the
package's functions, and resumptions of its generators; a call from another file of the package,
directly or through other code, is a move. Bodies of modules and classes are not counted. Threads
are not followed.
"""

import inspect
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import pytest_gpumem

PACKAGE = f"{Path(pytest_gpumem.__file__).parent}/"
VIRTUAL = f"{PACKAGE}devices/virtual/"
KERNEL = tuple(
    f"{PACKAGE}{room}/" for room in ("baselines", "devices", "judge", "meter", "plugin", "testrun")
)


def is_kernel(name: str) -> bool:
    """Return whether a file is in one of the rooms that measure and judge a test."""
    return name.startswith(KERNEL) and not name.startswith(VIRTUAL)


class Walk:
    """The files, moves and calls of one test, in the whole package and in its kernel."""

    def __init__(self) -> None:
        self.parts = {
            "package": (lambda name: name.startswith(PACKAGE), set[str](), [0, 0]),
            "kernel": (is_kernel, set[str](), [0, 0]),
        }

    def follow(self, frame: FrameType, event: str, _argument: object) -> None:
        """Count a call; sys.setprofile calls this function."""
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(PACKAGE):
            return
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return
        for belongs, files, counts in self.parts.values():
            if not belongs(name):
                continue
            files.add(name)
            counts[1] += 1
            caller = frame.f_back
            while caller is not None and not belongs(caller.f_code.co_filename):
                caller = caller.f_back
            counts[0] += caller is None or caller.f_code.co_filename != name


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Follow a test from its set-up to its reports; append its counts to $WALKS."""
    walk = Walk()
    sys.setprofile(walk.follow)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        with Path(os.environ["WALKS"]).open("a", encoding="utf-8") as lines:
            told = {part: [len(files), *counts] for part, (_, files, counts) in walk.parts.items()}
            lines.write(json.dumps([item.name, told]) + "\n")
