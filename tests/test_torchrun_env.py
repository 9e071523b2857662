"""Which rank of torchrun's a process is, and how ranks tell each other."""

from __future__ import annotations

import itertools
import os
import threading

import pytest

from pytest_gpumem.session.torchrun import Exchange
from pytest_gpumem.torchrun_env import current_rank

ENVIRONMENT = {
    "TORCHELASTIC_RUN_ID": "abc",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def rank_of(number, **changed):
    return current_rank({**ENVIRONMENT, "RANK": str(number), "LOCAL_RANK": str(number), **changed})


def test_it_is_told_by_torchruns_variables():
    rank = rank_of(1)
    assert rank[:4] == (1, 4, 1, 2)
    assert not rank.reports
    first = rank_of(0)
    assert (first.reports, first.key) == (True, rank.key)
    assert (first.peers, first.elsewhere) == (range(1, 2), range(2, 4))


@pytest.mark.parametrize(
    "changed", [{"WORLD_SIZE": "1"}, {"RANK": "x"}, {"TORCHELASTIC_RUN_ID": None}, {"RANK": None}]
)
def test_others_are_none(changed):
    values = {**ENVIRONMENT, **changed}
    assert current_rank({k: v for k, v in values.items() if v is not None}) is None


def test_another_run_or_restart_is_another():
    keys = {rank_of(0).key, rank_of(0, MASTER_PORT="1").key}
    assert len(keys | {rank_of(0, TORCHELASTIC_RESTART_COUNT="1").key}) == 3


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return tmp_path


@pytest.fixture
def pair(temporary):
    first, second = Exchange(rank_of(0)), Exchange(rank_of(1))
    first.begin()
    second.begin()
    return first, second


@pytest.fixture
def folder(pair, temporary):
    """The ranks' folder."""
    (found,) = temporary.iterdir()
    return found


def test_what_one_gives_the_first_takes(pair):
    first, second = pair
    threading.Timer(0.2, second.send, [{"a": [1, None]}]).start()
    assert first.receive() == {1: {"a": [1, None]}}


def test_the_others_stay_until_the_first_has_done(pair):
    first, second = pair
    steps = []

    def end():
        steps.append("first")
        first.done()

    threading.Timer(0.2, end).start()
    second.wait_until_done()
    assert steps == ["first"]


def test_what_an_earlier_run_left_is_not_taken(pair):
    first, second = pair
    second.send({"old": 1})
    first.done()
    first.begin()
    second.begin()
    threading.Timer(0.2, second.send, [{"new": 1}]).start()
    assert first.receive() == {1: {"new": 1}}
    steps = []
    threading.Timer(0.2, lambda: (steps.append("first"), first.done())).start()
    second.wait_until_done()
    assert steps == ["first"]


def test_a_rank_that_died_is_not_waited_for(pair):
    first, second = pair
    pid = os.fork()
    if not pid:
        second.begin()
        os._exit(0)
    assert first.receive() == {1: None}
    os.waitpid(pid, 0)


def test_nor_for_long_one_that_never_came(temporary, monkeypatch):
    first, second = Exchange(rank_of(0)), Exchange(rank_of(1))
    first.begin()
    seconds = itertools.count(step=30)
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))

    def waited():
        began = next(seconds)
        assert first.receive() == {1: None}
        return next(seconds) - began

    assert 30 < waited() <= 120
    second.begin()
    assert 600 < waited() <= 720


@pytest.mark.usefixtures("temporary")
def test_ranks_of_another_machine_wait_for_nobody():
    other = Exchange(rank_of(3))
    other.begin()
    other.wait_until_done()


def test_what_is_no_json_counts_as_nothing(pair, folder):
    first, second = pair
    second.send({})
    (result,) = folder.glob("result*")
    result.write_text("][")
    assert first.receive() == {1: None}


def test_the_folder_is_this_users_alone(folder):
    assert folder.stat().st_mode & 0o777 == 0o700
    assert str(os.getuid()) in folder.name


def test_a_link_in_its_place_is_refused(pair, folder, tmp_path):
    first, _ = pair
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        first.begin()
