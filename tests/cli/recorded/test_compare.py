"""``gpumem compare``, as a user types it: folders, git revisions, bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers.command_line import BEFORE, NOW, T4, write
from helpers.git import commit, git
from helpers.pages import flat
from helpers.warm import HANGS

from pytest_gpumem.judge.judge import judge
from pytest_gpumem.judge.result import Result
from pytest_gpumem.judge.verdict import Lookup, Policy
from pytest_gpumem.measurement import BaselineEntry, Breakdown, Measurement, OutOfMemory, Peak
from pytest_gpumem.report.json_report import dumps
from pytest_gpumem.report.model import Report
from pytest_gpumem.sizes import MIB
from pytest_gpumem.spec import MemorySpec


@pytest.fixture
def two(here):
    """Two folders of baselines."""
    write(here / "old", {"test_x": (100, 120), "test_y": (50, 60), "test_gone": (1, 2)})
    write(here / "new", {"test_x": (150, 120), "test_y": (40, 60), "test_new[a b]": (3, 4)})
    return here


@pytest.fixture
def repository(here):
    """A repository whose last commit, and whose working tree, have grown baselines."""
    git("init", "-q", "-b", "main")
    write(here / "baselines", {"test_x": (100, 120), "test_größe": (5, 6)})
    commit("one")
    git("checkout", "-qb", "topic")
    write(here / "baselines", {"test_x": (110, 120)})
    commit("two")
    write(here / "baselines", {"test_x": (120, 120)})
    return here


# Folders


def test_two_folders_are_compared(two, gpumem):
    status, out, err = gpumem("compare", "old", "new")
    assert (status, err) == (0, "")
    assert out.startswith("gpumem: old -> new: 1 grew, 1 shrank, 1 appeared, 1 vanished\n")
    text = flat(out)
    assert "tests/test_a.py on virtual-T4 test_x allocated 100.00 150.00 +50.00 +50.0" in text
    assert "test_y allocated 50.00 40.00 -10.00 -20.0" in text
    assert "test_new[a b] allocated 3.00" in text
    assert "test_gone allocated 1.00" in text
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("limit", "status"), [("50%", 0), ("49.9%", 1), ("50MiB", 0), ("1%, 49MiB", 1), ("0%", 1)]
)
def test_growth_fails_beyond_what_is_allowed(two, gpumem, limit, status):
    assert gpumem("compare", "old", "new", "--fail-on-growth", limit)[0] == status
    assert gpumem("compare", "old", "old", "--fail-on-growth", limit)[0] == 0


def test_growth_alone_fails_nothing_unless_asked(two, gpumem):
    assert gpumem("compare", "old", "new")[0] == 0


def test_devices_and_parts_are_never_mixed(here, gpumem):
    l4 = replace(T4, name="L4")
    write(here / "old", {"test_x": (100, 120)})
    write(here / "new", {"test_x": (300, 320)}, device=l4)
    assert "1 appeared, 1 vanished" in gpumem("compare", "old", "new")[1]


def test_the_working_tree_is_the_other_side_where_there_is_one_argument(two, gpumem):
    (two / "new").rename(two / "baselines")
    assert "old -> baselines: 1 grew" in gpumem("compare", "old")[1]
    (two / "baselines").rename(two / "memory")
    status, out, _ = gpumem("compare", "old", "--baseline-dir", "memory")
    assert (status, "old -> memory: 1 grew" in out) == (0, True)


# Git


def test_two_revisions_are_compared(repository, gpumem):
    status, out, err = gpumem("compare", "main", "topic", "--fail-on-growth", "5%")
    assert (status, err) == (1, "")
    assert "main -> topic: 1 grew, 1 same" in out
    assert "100.00 110.00 +10.00 +10.0" in flat(out)


def test_a_revision_is_compared_with_the_working_tree(repository, gpumem):
    assert "110.00 120.00 +10.00" in flat(gpumem("compare", "HEAD")[1])


def test_revisions_are_found_from_a_folder_below_and_by_another_name(
    repository, gpumem, monkeypatch
):
    (repository / "sub").mkdir()
    monkeypatch.chdir(repository / "sub")
    out = gpumem("compare", "main", "HEAD", "--baseline-dir", "../baselines")[1]
    assert "main -> HEAD: 1 grew, 1 same" in out
    absolute = str(repository / "baselines")
    assert "1 grew, 1 same" in gpumem("compare", "HEAD~1", "HEAD", "--baseline-dir", absolute)[1]


def test_a_folder_that_is_gone_from_the_working_tree_is_still_in_its_revisions(repository, gpumem):
    (repository / "baselines").rename(repository / "elsewhere")
    assert "1 grew, 1 same" in gpumem("compare", "main", "topic")[1]


def test_a_revision_and_a_folder_are_compared(repository, gpumem):
    write(repository / "mine", {"test_x": (100, 120)})
    assert "main -> mine: 1 vanished, 1 same" in gpumem("compare", "main", "mine")[1]


def test_a_revision_without_baselines_says_so_and_everything_appeared(repository, gpumem):
    git("rm", "-rqf", "baselines")
    git("commit", "-qm", "none")
    write(repository / "baselines", {"test_x": (1, 2)})
    status, out, _ = gpumem("compare", "HEAD")
    assert status == 0
    assert "1 appeared" in out
    assert "note: HEAD has no baselines in baselines" in out


def test_a_broken_file_of_a_revision_is_named_and_the_rest_compared(repository, gpumem):
    path = repository / "baselines/virtual-T4/tests/test_b.json"
    path.write_text("<<<<<<< HEAD\n")
    commit("broken")
    status, out, err = gpumem("compare", "main", "HEAD", "--fail-on-growth", "1%")
    assert status == 2
    assert err.startswith("gpumem: HEAD:baselines/virtual-T4/tests/test_b.json: has a merge-")
    assert "1 grew" in out


def test_a_link_in_a_revision_is_refused_by_name(repository, gpumem):
    (repository / "baselines/virtual-T4/tests/test_l.json").symlink_to("/etc/hostname")
    commit("link")
    status, _, err = gpumem("compare", "main", "HEAD")
    assert status == 2
    assert (
        "HEAD:baselines/virtual-T4/tests/test_l.json: is a link in this revision, not a file" in err
    )


# Bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope", "new"], "nope: there is no such file or folder, and git "),
        (["absent.json", "new"], "absent.json: there is no such file or folder; name a report"),
        (["/absent/folder", "new"], "/absent/folder: there is no such file or folder; name"),
        (["--", "-p", "new"], "-p: this is not a git revision; name a report"),
        (["", "new"], "'': this is not a git revision"),
        (["x" * 5000, "new"], "there is no such file or folder"),
        (["a b\x1b[31m", "new"], "a b\\x1b[31m: there is no such file"),
        (["old", "new", "--fail-on-growth", "2"], "--fail-on-growth=2: '2' is neither"),
        (["old", "new", "--fail-on-growth=-2%"], "--fail-on-growth=-2%: '-2%' is negative"),
        (["empty", "empty"], "empty, empty: neither input has a baseline to compare; look at"),
        (["text.txt", "new"], "text.txt: is not JSON"),
        (["old/virtual-T4/tests/test_a.json", "new"], "test_a.json: is not a report of"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(two, gpumem, arguments, said):
    (two / "empty").mkdir()
    (two / "text.txt").write_text("hello")
    status, out, err = gpumem("compare", *arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("gpumem: ")
    assert err.count("\n") == 1
    assert err.rstrip("\n").isprintable()


def test_without_git_a_folder_still_compares_and_a_revision_says_what_is_missing(
    two, gpumem, monkeypatch
):
    monkeypatch.setenv("PATH", str(two))
    assert gpumem("compare", "old", "new")[0] == 0
    status, _, err = gpumem("compare", "main", "new")
    assert status == 2
    assert "git cannot be run (No such file or directory)" in err


def test_a_folder_outside_of_the_repository_has_no_revisions(repository, gpumem, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    status, _, err = gpumem("compare", "main", "HEAD", "--baseline-dir", str(other))
    assert status == 2
    assert f"the folder {other} is not in the repository" in err


def test_a_file_that_cannot_be_read_is_named_and_its_tests_are_not_called_vanished(two, gpumem):
    write(two / "old", {"test_other": (1, 2)}, module="tests/test_b.py")
    path = two / "new/virtual-T4/tests/test_a.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
    write(two / "new", {"test_other": (2, 2)}, module="tests/test_b.py")
    status, out, err = gpumem("compare", "old", "new")
    assert status == 2
    assert "test_a.json: was written by a newer pytest-gpumem" in err
    assert "old -> new: 1 grew\n" in out
    assert "Traceback" not in err


def test_a_file_that_lies_where_no_test_looks_is_named(two, gpumem):
    path = two / "new/virtual-T4/tests/test_a.json"
    path.rename(path.with_name("test_moved.json"))
    status, _, err = gpumem("compare", "old", "new")
    assert status == 2
    assert (
        "belongs to tests/test_a.py on virtual-T4, but no test reads a baseline from this place"
        in err
    )


def test_no_output_is_lost_and_no_traceback_shown_where_the_reader_stops(two):
    command = [sys.executable, "-m", "pytest_gpumem.cli.main", "compare", "old", "new"]
    read, written = os.pipe()
    os.close(read)
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command,
        env=environment,
        stdout=written,
        stderr=subprocess.PIPE,
        check=False,
        timeout=HANGS,
    )
    os.close(written)
    assert done.stderr == b""
    assert done.returncode == 0


def test_what_ascii_cannot_show_is_escaped(repository, monkeypatch):
    command = [sys.executable, "-m", "pytest_gpumem.cli.main", "compare", "main", "mine"]
    write(repository / "mine", {"test_größe": (7, 8)})
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=HANGS
    )
    assert done.returncode == 0, done.stderr
    assert "test_gr\\xf6\\xdfe" in done.stdout


# Reports


def report(path, *results):
    path.write_text(dumps(Report(results), created="2026-11-21T15:06:07Z"), encoding="utf-8")


def of(test, allocated, *, part="", oom=None):
    peaks = (Peak(allocated * MIB, allocated * MIB),)
    measured = Measurement(T4, NOW, peaks, peaks, peaks, out_of_memory=oom)
    return Result(
        f"tests/test_a.py::{test}", judge(measured, SPEC, Lookup(), Policy()), measured, part
    )


SPEC = MemorySpec()
OOM = OutOfMemory(requested=MIB, allocated=MIB, reserved=MIB, site="")


def test_two_reports_are_compared(here, gpumem):
    report(here / "a.json", of("test_x", 100), of("test_x", 7, part="forward"), of("test_y", 5))
    report(here / "b.json", of("test_x", 150), of("test_x", 8, part="forward"))
    status, out, err = gpumem("compare", "a.json", "b.json", "--fail-on-growth", "2%")
    assert (status, err) == (1, "")
    assert "a.json -> b.json: 2 grew, 1 vanished" in out
    assert "test_x (forward) allocated 7.00 8.00 +1.00 +14.3" in flat(out)


def test_a_report_and_a_folder_are_compared(two, gpumem):
    report(two / "a.json", of("test_x", 160))
    out = gpumem("compare", "old", "a.json")[1]
    assert "old -> a.json: 1 grew, 2 vanished" in out


def test_what_ran_out_of_memory_fails_and_is_not_called_smaller(here, gpumem):
    report(here / "a.json", of("test_x", 100), of("test_y", 1))
    report(here / "b.json", of("test_x", 3, oom=OOM), of("test_y", 1))
    status, out, _ = gpumem("compare", "a.json", "b.json", "--fail-on-growth", "50%")
    assert status == 1
    assert "1 ran out of memory, 1 same" in out
    assert "test_x allocated 100.00" in flat(out)
    status, out, _ = gpumem("compare", "b.json", "a.json", "--fail-on-growth", "50%")
    assert status == 0
    assert "1 appeared, 1 same" in out
    assert "1 measurement of b.json ran out of memory" in flat(out)
    assert gpumem("compare", "b.json", "b.json", "--fail-on-growth", "0%")[0] == 0


def test_a_report_alone_has_nothing_to_be_compared_with(here, gpumem):
    report(here / "a.json", of("test_x", 100))
    status, _, err = gpumem("compare", "a.json")
    assert status == 2
    assert "a.json: a report needs a second input to compare with" in err


# Formats


def test_markdown_has_a_table_of_each_kind(two, gpumem):
    out = gpumem("compare", "old", "new", "--format", "markdown")[1]
    assert "#### Grew" in out
    assert (
        "| `tests/test_a.py::test_x` | virtual-T4 | allocated | 100.00 | 150.00 "
        "| +50.00 | +50.0 |" in out
    )


# The toolchain


@pytest.fixture
def upgraded(here):
    """Baselines of two versions of torch: five tests moved alike, one by much more."""
    was = {f"test_{i}": (100, 120) for i in range(6)}
    write(here / "old", was, provenance=BEFORE)
    write(here / "new", {**dict.fromkeys(was, (128, 148)), "test_5": (900, 920)})
    return here


def test_across_tells_what_moved_together_as_one(upgraded, gpumem):
    out = gpumem("compare", "old", "new", "--across")[1]
    assert "torch 2.14.0 -> 2.15.0: 5 tests moved by +28.00 MiB allocated" in out
    assert "test_5 allocated 100.00 900.00" in flat(out)
    assert "test_0" not in out


def test_without_it_all_are_listed_and_a_note_says_that_they_moved_together(upgraded, gpumem):
    out = gpumem("compare", "old", "new")[1]
    assert all(f"test_{i} " in out for i in range(6))
    assert "note: torch 2.14.0 -> 2.15.0: 5 tests moved by +28.00 MiB allocated (--across" in out


def test_across_still_fails_on_growth(upgraded, gpumem):
    assert gpumem("compare", "old", "new", "--across", "--fail-on-growth", "50%")[0] == 1


def test_the_cause_is_the_category_that_most_have_in_common(here, gpumem):
    for folder, mib, provenance in (("old", 8, BEFORE), ("new", 36, NOW)):
        breakdown = Breakdown({"parameters": 92 * MIB, "workspaces": mib * MIB}, 0)
        entry = BaselineEntry((Peak((92 + mib) * MIB, 200 * MIB),), provenance)
        tests = {f"test_{i}": replace(entry, breakdowns=(breakdown,)) for i in range(3)}
        write(here / folder, tests)
    out = gpumem("compare", "old", "new", "--across")[1]
    assert "3 tests moved by +28.00 MiB allocated, workspaces +28.00 MiB" in flat(out)


def test_nothing_here_imports_torch(two):
    code = (
        "import sys; from pytest_gpumem.cli.main import main as cli\n"
        "cli(['compare', 'old', 'new']); cli(['show', '--baseline-dir', 'new'])\n"
        "assert 'torch' not in sys.modules and 'pytest' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANGS)
