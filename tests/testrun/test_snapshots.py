"""The allocator's snapshots: whose are kept, under which names, and that PyTorch opens them."""

from __future__ import annotations

import pickle
import subprocess

import pytest
import torch
from helpers.warm import warm_python

from pytest_gpumem.files import atomic_file
from pytest_gpumem.recording.snapshots import (
    MAX_NAME_LENGTH,
    VIEWER,
    snapshot_name,
    write_snapshot,
)
from pytest_gpumem.sizes import MIB

SOURCE = """
@pytest.mark.gpu_memory(baseline=False)
def test_good():
    kept = mib(30)

@pytest.mark.gpu_memory(max_allocated_gib=0.05)
def test_large():
    kept = mib(100)

@pytest.mark.gpu_memory(max_gib=0.05)
def test_short():
    kept = mib(40)
    more = mib(60)

@pytest.mark.gpu_memory
def test_broken():
    kept = mib(20)
    assert False, "for another reason"
"""
LARGE, SHORT = "test_it.py--test_large.pickle", "test_it.py--test_short.pickle"


def names(suite, folder="snaps"):
    return sorted(path.name for path in (suite.path / folder).iterdir())


def sizes(path):
    """The sizes that a snapshot's history has allocated, in MiB."""
    snapshot = pickle.loads(path.read_bytes())
    events = [event for events in snapshot["device_traces"] for event in events]
    return [event["size"] / MIB for event in events if event["action"] == "alloc"]


# -- whose are kept --


def test_without_the_option_there_are_none(suite):
    session = suite.run(source=SOURCE)
    assert session.outcomes == {"passed": 1, "failed": 3}
    assert "snapshot" not in session.out
    assert not list(suite.path.rglob("*.pickle"))


def test_of_failures_each_is_kept_and_named_in_its_report(suite):
    session = suite.run("--gpumem-snapshots=snaps", source=SOURCE)
    assert session.outcomes == {"passed": 1, "failed": 3}
    assert names(suite) == [LARGE, SHORT]
    for name in (LARGE, SHORT):
        assert f"\nsnapshot: snaps/{name} (open it at {VIEWER})\n" in session.out
    assert "gpumem: 2 snapshots in snaps" in session.out
    assert sizes(suite.path / "snaps" / LARGE) == [100]
    assert sizes(suite.path / "snaps" / SHORT) == [40, 60]


def test_growth_is_a_failure_and_shrinkage_none(suite, monkeypatch):
    source = """
    import os
    @pytest.mark.gpu_memory
    def test_it(): mib(int(os.environ["SIZE"]))
    """
    monkeypatch.setenv("SIZE", "100")
    suite.run("--gpumem-update-baselines", source=source)
    monkeypatch.setenv("SIZE", "50")
    session = suite.run("--gpumem-snapshots=snaps", "--gpumem-shrinkage=fail")
    assert session.outcomes == {"failed": 1}
    assert not (suite.path / "snaps").exists()
    monkeypatch.setenv("SIZE", "150")
    suite.run("--gpumem-snapshots=snaps")
    assert sizes(suite.path / "snaps/test_it.py--test_it.pickle") == [150]


def test_a_test_that_passes_has_none_and_does_not_run_again(suite):
    source = """
    runs = []
    @pytest.mark.gpu_memory(baseline=False)
    def test_it():
        runs.append(mib(100).numel())
    def test_runs(): assert len(runs) == 1
    """
    session = suite.run("--gpumem-snapshots=snaps", source=source)
    assert session.outcomes == {"passed": 2}
    assert not (suite.path / "snaps").exists()


def test_they_are_kept_without_attribution_as_well(suite):
    arguments = "--gpumem-snapshots=snaps", "--gpumem-attribution=off"
    session = suite.run(*arguments, source=SOURCE)
    assert names(suite) == [LARGE, SHORT]
    assert "at the peak" not in session.out


MODEL = """
@pytest.mark.gpu_memory(max_allocated_gib=0.001)
def test_it():
    layer = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
    data = torch.zeros(512, 1024, device="cuda")
    getattr(torch.cuda.memory, "_set_memory_metadata", lambda text: None)("mine")
    layer(data).sum().backward()
"""


def descriptions(path):
    """What memory_viz shows beside the frames of each block of whole MiB that was allocated."""
    events = pickle.loads(path.read_bytes())["device_traces"][0]
    return [
        (event["size"] // MIB, event.get("user_metadata", ""))
        for event in events
        if event["action"] == "alloc" and event["size"] >= MIB
    ]


def test_each_block_has_its_category_after_what_the_program_says_of_it(suite):
    suite.run("--gpumem-snapshots=snaps", source=MODEL)
    own = "mine; " if hasattr(torch.cuda.memory, "_set_memory_metadata") else ""
    found = descriptions(suite.path / "snaps/test_it.py--test_it.pickle")
    expected = [(4, "parameters"), (2, "batch data"), (2, f"{own}activations"), (4, "gradients")]
    assert [each for each in found if each in expected] == expected


def test_with_attribution_off_blocks_have_no_category(suite):
    suite.run("--gpumem-snapshots=snaps", "--gpumem-attribution=off", source=MODEL)
    found = descriptions(suite.path / "snaps/test_it.py--test_it.pickle")
    assert {text for _, text in found} <= {"", "mine"}


def test_with_attribution_on_a_failure_is_not_run_again(suite):
    source = """
    runs = []
    @pytest.mark.gpu_memory(max_allocated_gib=0.05)
    def test_it():
        runs.append(mib(100).numel())
    def test_runs(): assert len(runs) == 1
    """
    session = suite.run("--gpumem-snapshots=snaps", "--gpumem-attribution=on", source=source)
    assert session.outcomes == {"passed": 1, "failed": 1}
    assert names(suite) == ["test_it.py--test_it.pickle"]


def test_a_second_run_that_fails_leaves_the_snapshot_of_the_first(suite):
    source = """
    runs = []
    @pytest.mark.gpu_memory(max_allocated_gib=0.05)
    def test_it():
        runs.append(1)
        kept = mib(100)
        assert len(runs) == 1
        more = mib(60)
    """
    session = suite.run("--gpumem-snapshots=snaps", source=source)
    assert "over budget: peak allocated of 160.00 MiB" in session.flat
    assert sizes(suite.path / "snaps/test_it.py--test_it.pickle") == [100, 60]


def test_a_test_with_parts_has_one_named_once(suite):
    source = """
    @pytest.mark.gpu_memory(max_allocated_gib=0.01)
    def test_it(gpu_memory):
        with gpu_memory.measure("part", max_allocated_gib=0.01): mib(100)
    """
    session = suite.run("--gpumem-snapshots=snaps", source=source)
    assert session.out.count("over budget: ") >= 2
    assert session.out.count("snapshot: ") == 1
    assert "gpumem: 1 snapshot in snaps" in session.out


def test_a_rerun_replaces_it(suite):
    source = """
    @pytest.mark.gpu_memory(max_allocated_gib=0.01)
    def test_it(): mib(100)
    """
    suite.run("--gpumem-snapshots=snaps", source=source)
    suite.run("--gpumem-snapshots=snaps", source=source.replace("100", "200"))
    assert names(suite) == ["test_it.py--test_it.pickle"]
    assert sizes(suite.path / "snaps/test_it.py--test_it.pickle") == [200]


def test_workers_write_those_of_their_tests(suite):
    session = suite.run_warm("-n2", "--gpumem-snapshots=deep/snaps", source=SOURCE)
    assert session.outcomes == {"passed": 1, "failed": 3}
    assert names(suite, "deep/snaps") == [LARGE, SHORT]
    assert f"snapshot: deep/snaps/{LARGE} (open it at" in session.out
    assert "gpumem: 2 snapshots in deep/snaps" in session.out


# -- the options --


def test_the_ini_option_is_read(suite):
    suite.write("pytest.ini", "[pytest]\ngpumem_snapshots = there\n")
    suite.run(source=SOURCE)
    assert names(suite, "there") == [LARGE, SHORT]


def test_a_folder_elsewhere_is_named_whole(suite, tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere") / "new"
    session = suite.run(f"--gpumem-snapshots={folder}", source=SOURCE)
    assert f"snapshot: {folder}/{LARGE} (open it at" in session.out
    assert f"gpumem: 2 snapshots in {folder}" in session.out


# -- what goes wrong --


def test_a_folder_that_cannot_be_made_is_a_line_of_the_summary(suite):
    suite.write("snaps", "a file")
    session = suite.run("--gpumem-snapshots=snaps", source=SOURCE)
    assert session.outcomes == {"passed": 1, "failed": 3}
    assert "INTERNALERROR" not in session.out + session.err
    assert "gpumem: no snapshot: " in session.out
    assert f"snaps/{LARGE}: cannot be written: " in session.flat
    assert "snapshot: snaps" not in session.out


def test_a_name_that_is_taken_by_a_folder_leaves_nothing_behind(suite):
    (suite.path / "snaps" / LARGE).mkdir(parents=True)
    session = suite.run("--gpumem-snapshots=snaps", source=SOURCE)
    assert f"snaps/{LARGE}: cannot be written: Is a directory" in session.flat
    assert names(suite) == [LARGE, SHORT]


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_snapshot({"segments": [1]}, tmp_path, "test_a.py::test")

    def full(_number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_file.os, "fsync", full)
    with pytest.raises(Exception, match="test_a.py--test.pickle: cannot be written: No space left"):
        write_snapshot({}, tmp_path, "test_a.py::test")
    assert [it.name for it in tmp_path.iterdir()] == [path.name]
    assert pickle.loads(path.read_bytes()) == {"segments": [1]}


# -- names --


@pytest.mark.parametrize(
    ("nodeid", "name"),
    [
        ("test_a.py::test_b", "test_a.py--test_b.pickle"),
        ("tests/x/test_a.py::TestA::test_b", "tests-x-test_a.py--TestA--test_b.pickle"),
        ("test_a.py::test_b[2-fp32=1]", "test_a.py--test_b[2-fp32=1].pickle"),
    ],
)
def test_a_snapshot_is_named_after_its_test(nodeid, name):
    assert snapshot_name(nodeid) == name


HOSTILE = [
    "../../etc/passwd::test",
    "/etc/test_a.py::test",
    "test_a.py::test[../../x]",
    "test_a.py::test[..-..-x]",
    "test_a.py::test[a/b]",
    "test_a.py::test[a-b]",
    "test_a.py::test[a b]",
    "test_a.py::test[a::b]",
    "test_a.py::test[a--b]",
    "test_a.py::test[\\x00\n\x1b]",
    "test_a.py::test[\u00e4\U0001f600\udcff]",
    "test-a.py::test",
    "test/a.py::test",
    ".hidden/test_a.py::test",
    "-rf/test_a.py::test",
    "test_a.py::test[" + "x" * 500 + "]",
    "test_a.py::test[" + "x" * 501 + "]",
    "a/" * 300 + "test_a.py::test",
    "",
    "..",
]


def test_names_are_of_one_folder_short_and_different():
    found = [snapshot_name(nodeid) for nodeid in HOSTILE]
    assert len(set(found)) == len(HOSTILE)
    for name in found:
        assert name.isascii()
        assert name.isprintable()
        assert name[0] not in ".-"
        assert "/" not in name
        assert len(name) <= MAX_NAME_LENGTH + len(".pickle")


def test_a_hostile_id_writes_into_the_folder_alone(suite):
    source = """
    @pytest.mark.parametrize("x", ["../../up", "y" * 400, "a b"])
    @pytest.mark.gpu_memory(max_allocated_gib=0.01)
    def test_it(x): mib(100)
    """
    session = suite.run("--gpumem-snapshots=snaps/here", source=source)
    assert session.outcomes == {"failed": 3}
    assert len(names(suite, "snaps/here")) == 3
    assert len(list(suite.path.rglob("*.pickle"))) == 3


# -- PyTorch opens them --


def test_pytorch_opens_a_snapshot(suite):
    suite.run("--gpumem-snapshots=snaps", source=SOURCE)

    def viewer(action, *arguments):
        command = [warm_python(), "-m", "torch.cuda._memory_viz", action, f"snaps/{LARGE}"]
        done = subprocess.run(
            [*command, *arguments], cwd=suite.path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    viewer("trace_plot", "-o", "plot.html")
    page = (suite.path / "plot.html").read_text()
    assert "<!DOCTYPE html>" in page
    assert "MemoryViz" in page
    assert len(page) > (suite.path / "snaps" / LARGE).stat().st_size
    assert "100.0MiB" in viewer("trace")
