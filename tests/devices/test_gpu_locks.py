"""Locks of shared GPUs: whose turn it is, and processes that were killed."""

import os
from pathlib import Path

import pytest
from filelock import FileLock, Timeout
from helpers.virtual_gpu import start_python

from pytest_gpumem.devices.cuda import lock_folder, locked

HOLD = """
import signal, sys, tempfile
from pytest_gpumem.devices.cuda import locked

tempfile.tempdir, *gpus = sys.argv[1:]
with locked(gpus):
    print("locked", flush=True)
    signal.pause()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the locks, in a temporary folder of the test's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return lock_folder()


def is_locked(gpu):
    """Whether some process has a GPU."""
    try:
        with FileLock(lock_folder() / f"{gpu}.lock", timeout=0):
            return False
    except Timeout:
        return True


def test_each_gpu_is_locked_in_the_block_alone(folder):
    with locked(["GPU-b", "GPU-a"]):
        assert [is_locked(gpu) for gpu in ("GPU-a", "GPU-b", "GPU-c")] == [True, True, False]
        assert folder.stat().st_mode & 0o077 == 0
        with locked(["GPU-c"]):
            assert is_locked("GPU-c")
    assert [is_locked(gpu) for gpu in ("GPU-a", "GPU-b", "GPU-c")] == [False, False, False]


def test_several_gpus_are_locked_in_one_order_whatever_the_order_they_are_named_in(monkeypatch):
    """Else two processes would wait for each other for ever."""
    order = []
    acquire = FileLock.acquire

    def watched(lock, *arguments, **options):
        order.append(Path(lock.lock_file).name)
        return acquire(lock, *arguments, **options)

    monkeypatch.setattr(FileLock, "acquire", watched)
    for gpus in (["b", "a", "c"], ["c", "b", "a"]):
        with locked(gpus):
            pass
    assert order == ["a.lock", "b.lock", "c.lock"] * 2


def test_a_mig_instance_of_an_older_driver_has_a_lock(folder):
    """Its name has slashes: CUDA's list of visible devices has "MIG-GPU-<UUID>/<GI>/<CI>"."""
    with locked(["MIG-GPU-8932f937/1/0"]):
        assert is_locked("MIG-GPU-8932f937-1-0")


def test_the_next_process_waits_and_a_process_that_was_killed_holds_nothing(tmp_path):
    process = start_python(HOLD, str(tmp_path), "GPU-a", "GPU-b")
    assert process.stdout.readline() == "locked\n"
    assert is_locked("GPU-a")
    following = start_python(HOLD, str(tmp_path), "GPU-b")
    assert is_locked("GPU-b")
    process.kill()
    with process:
        process.wait()
    assert following.stdout.readline() == "locked\n"
    assert not is_locked("GPU-a")
    following.kill()
    with following:
        following.wait()


def test_an_error_in_the_block_opens_the_locks():
    with pytest.raises(KeyboardInterrupt), locked(["GPU-a"]):
        raise KeyboardInterrupt
    assert not is_locked("GPU-a")


def test_each_user_has_a_folder(folder, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    assert lock_folder() != folder
