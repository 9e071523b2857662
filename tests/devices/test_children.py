"""The folder in which a process's children leave their peaks."""

import os

import pytest

from pytest_gpumem.devices.children import ChildWatch


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return lambda: sorted(tmp_path.iterdir())


def in_a_fork(work):
    """Run something in a fork that ends without Python's exit functions; return whether it did."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def watch_one_test(watch, *, left_by_others=False):
    with watch.watching("auto"):
        if left_by_others:
            (watch._own_folder() / "4711.part").touch()
    assert watch.children() == []


def test_a_fork_without_exit_functions_leaves_no_folder(folders):
    assert in_a_fork(lambda: watch_one_test(ChildWatch()))
    assert folders() == []


def test_a_fork_may_run_several_tests(folders):
    def work():
        watch = ChildWatch()
        watch_one_test(watch)
        watch_one_test(watch)

    assert in_a_fork(work)
    assert folders() == []


def test_a_fork_leaves_a_folder_that_others_use(folders):
    assert in_a_fork(lambda: watch_one_test(ChildWatch(), left_by_others=True))
    assert len(folders()) == 1


def test_the_folder_of_a_process_that_is_no_fork_stays_for_servers_of_fixtures(folders):
    watch = ChildWatch()
    watch_one_test(watch)
    assert len(folders()) == 1
