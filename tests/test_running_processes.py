"""Whether another process runs: with /proc, and as macOS has it."""

from __future__ import annotations

import os

import pytest

from pytest_gpumem import processes
from pytest_gpumem.processes import is_running


@pytest.fixture(params=["proc", "no proc"])
def ended(request, monkeypatch):
    """The id of a process that has ended: a zombie where /proc tells it."""
    if request.param == "no proc":

        def read_text(self, **_):
            raise FileNotFoundError(self)

        monkeypatch.setattr(processes.Path, "read_text", read_text)
    pid = os.fork()
    if not pid:
        os._exit(0)
    if request.param == "no proc":
        os.waitpid(pid, 0)
        yield pid
        return
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield pid
    os.waitpid(pid, 0)


def test_a_process_runs_until_it_ends(ended):
    assert is_running(os.getpid())
    assert not is_running(ended)


@pytest.mark.parametrize("pid", [None, 0, -1, "1", 1.0])
def test_what_is_no_process_id_does_not_run(pid):
    assert not is_running(pid)
