"""A test that hangs ends by itself, and is named."""

import subprocess
import sys

import pytest
from helpers.hangs import LIMIT
from helpers.paths import ROOT, TESTS
from helpers.warm import HANGS

HANGING = f"""
import ctypes, sys
sys.path[:0] = [{str(ROOT)!r}, {str(TESTS)!r}]
from helpers.hangs import ended_where_hanging

def lock_twice():
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(lock)

with ended_where_hanging(0.1):
    lock_twice()
"""


def test_what_hangs_in_native_code_ends_and_says_where():
    done = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=HANGS, check=False
    )
    assert done.returncode == 1
    assert "in lock_twice" in done.stderr


def test_each_test_has_a_limit_that_no_busy_machine_reaches(request, monkeypatch):
    limits = []
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *args, **_: limits.append(args))
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", lambda: limits.append(None))
    plugin = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    protocol = plugin.pytest_runtest_protocol(request.node, None)
    next(protocol)
    assert limits == [(LIMIT,)]
    with pytest.raises(StopIteration):
        protocol.send(None)
    assert limits == [(LIMIT,), None]
    assert LIMIT > HANGS
