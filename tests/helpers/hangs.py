"""A limit for tests that hang, so that a run of them ends by itself and says where."""

from __future__ import annotations

import faulthandler
from contextlib import contextmanager

from helpers.warm import HANGS
from pytest_gpumem.devices.virtual import uncaptured_stderr

LIMIT = 2 * HANGS
"""seconds of a test, with its fixtures: twice those after which a process of a test is ended"""


@contextmanager
def ended_where_hanging(limit=LIMIT):
    """End the process, with its threads' stacks, where what follows takes longer.

    So it does in native code that holds Python's lock. pytest-xdist tells which test it was, and
    goes on with another worker.
    """
    faulthandler.dump_traceback_later(limit, exit=True, file=uncaptured_stderr())
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
