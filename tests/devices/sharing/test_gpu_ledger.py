"""The ledger of shared GPUs: who runs beside whom, whose turn it is, and entries of the dead."""

import json
from itertools import count

import pytest
from helpers.virtual_gpu import start_python

from pytest_gpumem.devices.sharing import gpu_ledger
from pytest_gpumem.devices.sharing.gpu_ledger import MAX_OVERTAKEN, GpuLedger, LedgerEntry, admits

FREE = {"A": (80, 80), "B": (80, 80)}


def waiting(nbytes, *, alone=False, ticket=9):
    return LedgerEntry("own", nbytes, "waiting", alone, ticket)


def neighbour(nbytes, state="running", *, alone=False, ticket=1):
    return LedgerEntry("neighbour", nbytes, state, alone, ticket)


def overtaken(nbytes, times):
    return LedgerEntry("neighbour", nbytes, "waiting", alone=False, ticket=8, overtaken=times)


HOLDS = LedgerEntry("runs on B", {"B": 80}, "running", alone=False, held={"A": 49, "B": 1})


@pytest.mark.parametrize(
    ("own", "entries", "free", "admitted"),
    [
        # the sum fits, exactly, or by one byte not
        (waiting({"A": 30}), [neighbour({"A": 50})], FREE, True),
        (waiting({"A": 31}), [neighbour({"A": 50})], FREE, False),
        # memory of a process whose tests wait or are over counts
        (waiting({"A": 30}), [neighbour({"A": 49}), neighbour({"A": 2}, "idle")], FREE, False),
        # on each of several GPUs; a GPU of others' does not count
        (waiting({"A": 9, "B": 31}), [neighbour({"B": 50})], FREE, False),
        (waiting({"A": 80}), [neighbour({"B": 80}, alone=True)], FREE, True),
        # alone is alone, on both sides
        (waiting({"A": 1}, alone=True), [neighbour({"A": 1})], FREE, False),
        (waiting({"A": 1}), [neighbour({"A": 1}, alone=True)], FREE, False),
        # where no test runs the next one does, whatever it takes
        (waiting({"A": 99}), [neighbour({"A": 9}, "idle")], FREE, True),
        # memory of a process without an entry
        (waiting({"A": 30}), [neighbour({"A": 20})], {"A": (29, 80)}, False),
        # what another test waits for is not taken yet, and a small one may overtake it, ...
        (waiting({"A": 1}), [neighbour({"A": 80}, "waiting", ticket=8)], FREE, True),
        # ... but not for ever
        (waiting({"A": 1}), [overtaken({"A": 80}, MAX_OVERTAKEN - 1)], FREE, True),
        (waiting({"A": 1}), [overtaken({"A": 80}, MAX_OVERTAKEN)], FREE, False),
        (waiting({"A": 1}), [overtaken({"B": 80}, MAX_OVERTAKEN)], FREE, True),
        (waiting({"A": 1}, ticket=7), [overtaken({"A": 80}, MAX_OVERTAKEN)], FREE, True),
        # what a process holds of a GPU counts, whichever its test waits for or runs on
        (waiting({"A": 30}), [HOLDS, neighbour({"A": 1})], FREE, True),
        (waiting({"A": 31}), [HOLDS, neighbour({"A": 1})], FREE, False),
        (waiting({"A": 1}), [neighbour({"A": 80}, "waiting", ticket=10)], FREE, True),
        (waiting({"A": 1}), [neighbour({"B": 80}, "waiting", ticket=8)], FREE, True),
    ],
)
def test_a_test_runs_beside_others_where_the_sum_fits(own, entries, free, admitted):
    assert admits(own, entries, free) is admitted


def entries(folder):
    return [LedgerEntry(**fields) for fields in json.loads((folder / "ledger.json").read_bytes())]


def test_an_entry_says_what_its_process_does(tmp_path):
    folder = tmp_path / "ledger"
    ledger, neighbours = GpuLedger(folder), GpuLedger(folder)
    ledger.enter({"A": 50}, lambda: FREE, alone=False)
    neighbours.enter({"A": 30}, lambda: FREE, alone=False)
    assert [(entry.state, entry.nbytes) for entry in entries(folder)] == [
        ("running", {"A": 50}),
        ("running", {"A": 30}),
    ]
    ledger.leave({"A": 1})
    assert {entry.state: entry.nbytes["A"] for entry in entries(folder)} == {
        "running": 30,
        "idle": 1,
    }
    assert folder.stat().st_mode & 0o077 == 0


def test_one_that_waits_is_next_when_the_other_leaves(tmp_path, monkeypatch):
    """The looks at the ledger are counted, not timed: at the third one the other has left."""
    ledger, neighbours = GpuLedger(tmp_path), GpuLedger(tmp_path)
    neighbours.enter({"A": 60}, lambda: FREE, alone=False)
    looks = count(1)

    def wait(_seconds):
        assert {entry.state for entry in entries(tmp_path)} == {"running", "waiting"}
        if next(looks) == 3:
            neighbours.leave({"A": 0})

    monkeypatch.setattr(gpu_ledger.time, "sleep", wait)
    ledger.enter({"A": 60}, lambda: FREE, alone=False)
    assert next(looks) == 4
    assert {entry.state: entry.nbytes["A"] for entry in entries(tmp_path)} == {
        "idle": 0,
        "running": 60,
    }


def test_a_test_that_is_overtaken_often_enough_is_next(tmp_path, monkeypatch):
    """A large one waits for all of the GPU; at each of its looks a small one comes and begins."""
    small = GpuLedger(tmp_path)
    small.enter({"A": 1}, lambda: FREE, alone=False)
    begun = []

    def come_and_go(_seconds):
        if len(begun) < MAX_OVERTAKEN:
            another = GpuLedger(tmp_path)
            begun.append(another)
            another.enter({"A": 1}, lambda: FREE, alone=False)
            return
        (large,) = (entry for entry in entries(tmp_path) if entry.state == "waiting")
        assert large.overtaken == MAX_OVERTAKEN
        late = LedgerEntry("late", {"A": 1}, "waiting", alone=False, ticket=large.ticket + 1)
        assert not admits(late, entries(tmp_path), FREE)
        for ledger in (small, *begun):
            ledger.leave({"A": 0})

    monkeypatch.setattr(gpu_ledger.time, "sleep", come_and_go)
    GpuLedger(tmp_path).enter({"A": 80}, lambda: FREE, alone=True)
    assert len(begun) == MAX_OVERTAKEN


def test_an_interrupted_wait_leaves_the_queue(tmp_path, monkeypatch):
    ledger, neighbours = GpuLedger(tmp_path), GpuLedger(tmp_path)
    neighbours.enter({"A": 60}, lambda: FREE, alone=True)

    def interrupt(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_ledger.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ledger.enter({"A": 1}, lambda: FREE, alone=False)
    assert {entry.state for entry in entries(tmp_path)} == {"running", "idle"}


def test_a_process_that_was_killed_holds_nothing(tmp_path):
    code = """
    import sys, time
    from pathlib import Path
    from pytest_gpumem.devices.sharing.gpu_ledger import GpuLedger

    ledger = GpuLedger(Path(sys.argv[1]))
    ledger.enter({"A": 60}, lambda: {}, alone=True)
    print("entered", flush=True)
    sys.stdin.read()
    """
    process = start_python(code, str(tmp_path))
    assert process.stdout.readline() == "entered\n"
    assert [entry.state for entry in entries(tmp_path)] == ["running"]
    process.kill()
    with process:
        process.wait()
    GpuLedger(tmp_path).enter({"A": 60}, lambda: FREE, alone=True)
    assert [entry.state for entry in entries(tmp_path)] == ["running"]
    assert len(list(tmp_path.glob("*.process"))) == 1


def test_a_ledger_that_cannot_be_read_is_begun_anew(tmp_path):
    (tmp_path / "ledger.json").write_text("[" * 100_000)
    GpuLedger(tmp_path).enter({"A": 60}, lambda: FREE, alone=True)
    assert [entry.nbytes for entry in entries(tmp_path)] == [{"A": 60}]
