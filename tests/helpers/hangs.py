"""A time limit for tests: a run of the tests ends if one hangs, and shows where."""

from __future__ import annotations

import faulthandler
from contextlib import contextmanager

from helpers.warm import HANGS
from pytest_gpumem.devices.virtual import uncaptured_stderr

LIMIT = 2 * HANGS
"""seconds for a test with its fixtures: twice the limit for a process that a test starts"""


@contextmanager
def ended_where_hanging(limit=LIMIT):
    """Print the threads' stacks and end the process if the block takes longer than ``limit``.

    This also works in native code that holds Python's global lock. pytest-xdist then reports the
    test, and replaces the worker.
    """
    faulthandler.dump_traceback_later(limit, exit=True, file=uncaptured_stderr())
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
