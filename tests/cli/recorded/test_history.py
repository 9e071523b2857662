"""``gpumem history``, as a user types it: commits, one test, bad input."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.command_line import BEFORE, NOW, T4, write
from helpers.git import commit, git
from helpers.pages import flat
from helpers.terminal_results import matches_gold

from pytest_gpumem.baselines.file_format import decode
from pytest_gpumem.measurement import BaselineEntry, Breakdown, Peak, Site
from pytest_gpumem.sizes import MIB


def entry(mib, provenance=NOW, *, batch_size=None):
    """A baseline of which all is activations of one line."""
    site = Site("model.py", 29, "Tiny.forward", "self.head(x)", "", "activations", mib * MIB, 1)
    breakdown = Breakdown({"activations": mib * MIB}, 0, (site,))
    peaks = (Peak(mib * MIB, 2 * mib * MIB),)
    return BaselineEntry(peaks, provenance, batch_size, breakdowns=(breakdown,))


@pytest.fixture
def repository(here, monkeypatch):
    """A repository with commits that moved baselines, and changes that are not committed."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_DATE", "2026-11-22T10:00:00+0000")
    git("init", "-q", "-b", "main")
    write(here / "baselines", {"test_x[ä]": entry(100, BEFORE), "test_gone": (5, 6)})
    commit("one")
    write(here / "baselines", {"test_b": (1, 2)}, module="tests/b/test_b.py")
    commit("another file | <b>")
    git("checkout", "-qb", "topic")
    path = here / "baselines/virtual-T4/tests/test_a.json"
    path.unlink()
    write(here / "baselines", {"test_x[ä]": entry(110)})
    commit("wider head")
    git("checkout", "-q", "main")
    git("merge", "-q", "--no-ff", "-m", "merge wider head", "topic")
    write(here / "baselines", {"test_x[ä]": entry(110), "test_y": (3, 4)})
    return here


def without_hashes(output):
    """The output with each commit's hash, and the subject's column, replaced by its number."""
    names = git("log", "--first-parent", "--format=%H", "main").split()
    for number, name in enumerate(names):
        output = output.replace(name[:9], f"commit-{number}x")
    return output


def test_each_commit_is_told_with_what_it_moved(repository, gpumem):
    """A merge is one step of the first parent's line."""
    status, out, err = gpumem("history")
    assert (status, err) == (0, "")
    assert matches_gold("history", without_hashes(out).rstrip("\n"))


def test_a_test_is_told_by_commit_with_the_cause(repository, gpumem):
    status, out, err = gpumem("history", "tests/test_a.py::test_x[ä]")
    assert (status, err) == (0, "")
    assert matches_gold("history_of_test", without_hashes(out).rstrip("\n"))


def test_each_version_of_a_file_is_decoded_once(here, gpumem, monkeypatch):
    """Of a suite's files each commit changes a few."""
    decoded = []

    def noted(path, content):
        decoded.append(path.name)
        return decode(path, content)

    monkeypatch.setattr("pytest_gpumem.cli.recorded.commits.decode", noted)
    git("init", "-q", "-b", "main")
    write(here / "baselines", {f"test_{number}": (number, number) for number in range(9)})
    write(here / "baselines", {"test_x": (1, 2)}, module="tests/test_other.py")
    commit("one")
    write(here / "baselines", {"test_4": (5, 6)})
    commit("grown")
    write(here / "baselines", {"test_4": entry(7, BEFORE)})
    commit("another toolchain, in a provenance of its own")
    status, out, err = gpumem("history")
    assert (status, err) == (0, "")
    assert ": 1 grew" in flat(out)
    assert ": 10 appeared" in flat(out)
    assert [decoded.count(name) for name in ("test_a.json", "test_other.json")] == [3, 1]


def test_the_number_of_commits_and_the_device_can_be_chosen(repository, gpumem):
    text = flat(gpumem("history", "-n", "1")[1])
    assert "not committed: 1 appeared" in text
    assert "merge" not in text
    assert "note: the newest 1 of 4 commits that changed baselines" in text
    write(repository / "baselines", {"test_x[ä]": entry(7)}, device=replace(T4, name="L4"))
    assert "virtual-T4" not in gpumem("history", "--device=virtual-L4")[1]


@pytest.mark.parametrize("name", ["test_b", "./tests/b/test_b.py", "tests/b/test_b.py::test_b"])
def test_a_name_means_a_test_a_file_or_a_part_of_a_name(repository, gpumem, name):
    out = gpumem("history", name)[1]
    assert "tests/b/test_b.py::test_b on virtual-T4: baseline in MiB" in out
    assert "test_a.py" not in out


def test_a_whole_name_means_no_other_that_it_is_a_part_of(repository, gpumem):
    write(
        repository / "baselines", {"test_b": (1, 2), "test_bb": (3, 4)}, module="tests/b/test_b.py"
    )
    assert "test_bb" not in gpumem("history", "tests/b/test_b.py::test_b")[1]


def test_a_step_with_another_batch_size_is_not_compared(repository, gpumem):
    write(repository / "baselines", {"test_x[ä]": entry(300, batch_size=4)})
    commit("four")
    write(repository / "baselines", {"test_x[ä]": entry(300, batch_size=8)})
    out = gpumem("history", "test_x")[1]
    assert "not committed\n  cannot be compared: batch size 4 -> 8" in out
    assert "300.00" in out


def test_a_folder_that_is_gone_still_has_its_history(repository, gpumem):
    git("rm", "-rqf", "baselines")
    git("commit", "-qm", "no baselines")
    assert "no baselines" in gpumem("history", "-n", "1")[1]
    assert "2 vanished" in gpumem("history", "-n", "1")[1]


def test_a_broken_version_is_named_and_the_others_are_told(repository, gpumem):
    (repository / "baselines/virtual-T4/tests/test_c.json").write_text("<<<<<<< HEAD\n")
    commit("broken")
    status, out, err = gpumem("history")
    assert status == 2
    assert "test_c.json: has a merge-conflict marker" in err or "test_c.json: has a merge" in err
    assert "wider head" in out


def test_a_shallow_clone_says_so(repository, gpumem, monkeypatch):
    commit("all")
    git("clone", "-q", "--depth=1", f"file://{repository}", "shallow")
    monkeypatch.chdir(repository / "shallow")
    assert "note: this clone is shallow; git fetch --unshallow" in flat(gpumem("history")[1])


def test_a_repository_without_commits_has_what_is_not_committed(here, gpumem):
    git("init", "-q")
    write(here / "baselines", {"test_x": (1, 2)})
    assert gpumem("history")[1].startswith("not committed: 1 appeared\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "nope: no baseline with this name has a history; gpumem history lists all"),
        (["test_xx"], "these do: test_y, test_b, test_x[ä]"),
        (["tests/test_b.py::test_b"], "these do: tests/b/test_b.py::test_b"),
        (["--device=cuda-X"], "--device=cuda-X: no baseline with this name has a history"),
        (
            ["--baseline-dir=none"],
            "none: no commit has a baseline in this folder; commit baselines",
        ),
        (["--baseline-dir=/"], "/: git says: not a git repository"),
        (["--commits=0"], "--commits=0: this is not a number of commits; write --commits=20"),
    ],
)
def test_bad_input_is_named(repository, gpumem, arguments, message):
    status, out, err = gpumem("history", *arguments)
    assert (status, out) == (2, "")
    assert message in err
