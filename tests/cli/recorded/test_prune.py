"""``gpumem prune``: lists baselines whose tests are gone, and deletes only when asked to."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace

import pytest
from helpers.command_line import T4, write
from helpers.sources import WITHOUT
from helpers.warm import warm_python

from pytest_gpumem.baselines.paths import Key
from pytest_gpumem.baselines.store import BaselineStore, NewBaseline
from pytest_gpumem.cli import main
from pytest_gpumem.cli.recorded.prune import remove
from pytest_gpumem.measurement import BaselineEntry, Peak, Provenance
from pytest_gpumem.sizes import MIB

L4 = replace(T4, name="L4")
TESTS = "def test_kept(): pass\ndef test_also(): pass\n"


@pytest.fixture
def project(here, monkeypatch):
    """Tests without torch, and baselines of them and of others that are gone."""
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(WITHOUT))
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)
    monkeypatch.setattr(sys, "executable", warm_python())
    (here / "pytest.ini").write_text("[pytest]\n")
    (here / "tests").mkdir()
    (here / "tests/test_a.py").write_text(TESTS)
    for device in (T4, L4):
        write(here / "baselines", {"test_kept": (1, 2), "test_gone": (3, 4)}, device=device)
    write(here / "baselines", {"test_x": (1, 2)}, module="tests/test_removed.py")
    return here


def named(folder):
    """The tests that have a baseline, by file."""
    found = {}
    for path in sorted(folder.rglob("*.json")):
        found[str(path.relative_to(folder))] = sorted(json.loads(path.read_text())["tests"])
    return found


BEFORE = {
    "virtual-L4/tests/test_a.json": ["test_gone", "test_kept"],
    "virtual-T4/tests/test_a.json": ["test_gone", "test_kept"],
    "virtual-T4/tests/test_removed.json": ["test_x"],
}
AFTER = {
    "virtual-L4/tests/test_a.json": ["test_kept"],
    "virtual-T4/tests/test_a.json": ["test_kept"],
}
LISTED = (
    "stale: tests/test_a.py::test_gone on virtual-L4\n"
    "stale: tests/test_a.py::test_gone on virtual-T4\n"
    "stale: tests/test_removed.py::test_x on virtual-T4\n"
    "gpumem: 3 baselines in "
)


def test_it_lists_and_deletes_nothing_unasked(project, gpumem):
    status, out, err = gpumem("prune")
    assert (status, err) == (1, "")
    assert out.startswith(LISTED)
    assert out.endswith("gpumem: nothing was deleted; --delete deletes them\n")
    assert named(project / "baselines") == BEFORE


def test_it_deletes_what_is_stale_when_asked_and_nothing_else(project, gpumem):
    kept = BaselineStore(project / "baselines").get("virtual-T4", "tests/test_a.py", "test_kept")
    status, out, err = gpumem("prune", "--delete")
    assert (status, err) == (0, "")
    assert out.startswith(LISTED)
    assert out.endswith("gpumem: deleted\n")
    assert named(project / "baselines") == AFTER
    assert (
        BaselineStore(project / "baselines").get("virtual-T4", "tests/test_a.py", "test_kept")
        == kept
    )
    assert gpumem("prune") == (0, "gpumem: every baseline has a test\n", "")


def test_folders_that_are_empty_then_go_and_others_stay(project, gpumem):
    write(project / "baselines", {"test_x": (1, 2)}, module="sub/deep/test_b.py")
    (project / "baselines/virtual-T4/sub/README").write_text("kept")
    assert gpumem("prune", "--delete")[0] == 0
    assert not (project / "baselines/virtual-T4/sub/deep").exists()
    assert (project / "baselines/virtual-T4/sub/README").exists()


@pytest.mark.parametrize(
    ("answer", "deleted"), [("y", True), ("yes", True), ("n", False), ("", False)]
)
def test_on_a_terminal_it_asks(project, monkeypatch, capsys, answer, deleted):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    asked = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n" if answer else ""))
    monkeypatch.setattr(sys, "stdout", asked)
    status = main.main(["prune"])
    assert "delete them? [y/N] " in asked.getvalue()
    assert named(project / "baselines") == (AFTER if deleted else BEFORE)
    assert status == (0 if deleted else 1)
    assert asked.getvalue().count("stale: ") == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-k", "kept"], "-k was given"),
        (["--", "-m", "x"], "-m was given"),
        (["tests/test_a.py"], "tests, files or folders were named"),
        (["--deselect", "tests/test_a.py::test_kept"], "--deselect was given"),
        (["--lf"], "--lf was given"),
        (["--gpumem-cards=T4"], "--gpumem-cards was given"),
    ],
)
def test_a_collection_that_is_not_full_is_refused(project, gpumem, arguments, said):
    status, out, err = gpumem("prune", *arguments)
    assert (status, out) == (2, "")
    assert f"not all tests were collected: {said}" in err
    assert named(project / "baselines") == BEFORE


def test_a_file_that_cannot_be_collected_stops_it_and_pytest_says_why(project, gpumem):
    (project / "tests/test_b.py").write_text("raise RuntimeError('broken here')")
    status, out, err = gpumem("prune", "--delete")
    assert (status, out) == (2, "")
    assert "not all tests were collected: tests/test_b.py could not be collected" in err
    assert "broken here" in err
    assert named(project / "baselines") == BEFORE


def test_skipped_and_left_out_files_are_not_stale(project, gpumem):
    (project / "tests/test_a.py").write_text(
        "import pytest\npytest.importorskip('no_such_module_here')\n"
    )
    write(project / "baselines", {"test_y": (1, 2)}, module="examples/test_e.py")
    (project / "examples").mkdir()
    (project / "examples/test_e.py").write_text("def test_z(): pass")
    (project / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (project / "tests/test_c.py").write_text(TESTS)
    out = gpumem("prune")[1]
    assert out.startswith(
        "stale: tests/test_removed.py::test_x on virtual-T4\ngpumem: 1 baseline in "
    )


def test_the_ini_file_names_the_folder_and_fail_is_no_obstacle(project, gpumem):
    (project / "baselines").rename(project / "memory")
    assert gpumem("prune")[0] == 2
    (project / "pytest.ini").write_text(
        "[pytest]\ngpumem_baseline_dir = memory\ngpumem_stale = fail\naddopts = -q\n"
    )
    assert gpumem("prune", "--delete")[0] == 0
    assert named(project / "memory") == AFTER


def test_without_a_folder_or_a_test_it_says_so(here, gpumem):
    (here / "pytest.ini").write_text("[pytest]\n")
    (here / "test_a.py").write_text(TESTS)
    status, _, err = gpumem("prune")
    assert (status, "there is no folder of baselines" in err) == (2, True)
    write(here / "baselines", {"test_x": (1, 2)})
    (here / "test_a.py").unlink()
    status, _, err = gpumem("prune", "--delete")
    assert (status, "no test was collected" in err) == (2, True)
    assert len(named(here / "baselines")) == 1


def test_an_unknown_option_of_pytest_is_shown(project, gpumem):
    status, _, err = gpumem("prune", "--no-such-option")
    assert status == 2
    assert "--no-such-option" in err
    assert "Traceback" not in err


def test_what_only_looks_like_delete_deletes_nothing(project, gpumem):
    for option in ("--del", "--dele"):
        gpumem("prune", option)
        assert named(project / "baselines") == BEFORE


def test_workers_in_addopts_are_no_obstacle(project, gpumem):
    pytest.importorskip("xdist")
    (project / "pytest.ini").write_text("[pytest]\naddopts = -n 2\n")
    assert gpumem("prune")[1].startswith(LISTED)


# What removes


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"directory": "x"}', b"\xff", b"[" * 100_000, b'{"stale": 1}']
)
def test_a_broken_list_of_baselines_is_refused(project, gpumem, content):
    """As a conftest's clean-up may leave it, or a full disk."""
    (project / "conftest.py").write_text(
        "import os, pathlib, pytest\n"
        "@pytest.hookimpl(trylast=True)\n"
        "def pytest_unconfigure():\n"
        f"    pathlib.Path(os.environ['PYTEST_GPUMEM_COLLECTED']).write_bytes({content!r})\n"
    )
    status, out, err = gpumem("prune", "--delete")
    assert (status, out) == (2, "")
    assert "its list of baselines cannot be read" in err


def test_removing_reads_anew_keeps_the_rest_and_reports_what_it_cannot(tmp_path):
    entry = BaselineEntry((Peak(MIB, MIB),), Provenance("2.15.0", "13.2", "9", "virtual", ""))
    store = BaselineStore(tmp_path)
    store.update(
        NewBaseline(T4, module, test, {"": entry})
        for module in ("a.py", "b.py")
        for test in ("test_1", "test_2")
    )
    broken = tmp_path / "virtual-T4/a.json"
    broken.write_text("<<<<<<< ours\n")
    keys = [Key("virtual-T4", module, "test_1") for module in ("a.py", "b.py", "absent.py")]
    (error,) = remove(store, [*keys, Key("virtual-T4", "b.py", "test_absent")])
    assert "merge-conflict" in str(error)
    assert broken.read_text() == "<<<<<<< ours\n"
    assert store.get("virtual-T4", "b.py", "test_1") is None
    assert store.get("virtual-T4", "b.py", "test_2") == entry
    assert not list(tmp_path.rglob("*.tmp"))


def test_removing_nothing_writes_nothing(tmp_path):
    write(tmp_path, {"test_a": (1, 2)})
    path = tmp_path / "virtual-T4/tests/test_a.json"
    before = path.stat()
    assert remove(BaselineStore(tmp_path), [Key("virtual-T4", "tests/test_a.py", "test_b")]) == []
    after = path.stat()  # not the time of access: the file is read
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_removing_waits_for_who_writes(tmp_path):
    import filelock

    write(tmp_path, {"test_a": (1, 2)})
    with filelock.FileLock(tmp_path / ".gpumem.lock"):
        store = BaselineStore(tmp_path, lock_timeout=0.1)
        (error,) = remove(store, [Key("virtual-T4", "tests/test_a.py", "test_a")])
    assert "another process has held it" in str(error)
    assert store.get("virtual-T4", "tests/test_a.py", "test_a") is not None
