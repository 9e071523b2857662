"""A suite of eight shards, from a pull request that fails to the commit with its new baselines.

CI is a repository here, the laptop a clone of it; nothing is asked of a network.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.git import commit, git
from helpers.split import SPLIT

from pytest_gpumem.cli import main
from pytest_gpumem.report.json_report import read_report

SHARDS = 8
MODEL = """
import pytest, torch


@pytest.fixture
def step():
    def allocated(size):
        return torch.empty(size * WIDTH << 20, dtype=torch.uint8, device="cuda")

    return allocated
"""
TESTS = """
import pytest


@pytest.mark.gpu_memory(card="T4")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_small(step, size):
    held = step(size)


@pytest.mark.gpu_memory
def test_large(step):
    held = step(30)


@pytest.mark.gpu_memory
def test_of_its_own():
    import torch
    held = torch.empty(9 << 20, dtype=torch.uint8, device="cuda")
"""
GONE = "\n\n@pytest.mark.gpu_memory\ndef test_gone(step):\n    held = step(2)\n"
NEW = "\n\n@pytest.mark.gpu_memory\ndef test_new(step):\n    held = step(2)\n"


@pytest.fixture
def ci(suite, monkeypatch):
    """The repository, where CI has checked out the merge of the request and the main branch."""
    for name in ("first", "second"):
        suite.write(f"tests/{name}/test_{name}.py", TESTS)
    suite.write("tests/first/test_first.py", TESTS + GONE)
    suite.write("conftest.py", SPLIT + MODEL.replace("WIDTH", "1"))
    suite.write("pytest.ini", "[pytest]\ntestpaths = tests\n")
    suite.write(".gitignore", "shards\n__pycache__\n.pytest_cache\n")
    git("init", "-q", "-b", "main")
    assert suite.run("--gpumem-update-baselines").ret == 0
    commit("baselines")
    git("checkout", "-qb", "topic")
    suite.write("conftest.py", SPLIT + MODEL.replace("WIDTH", "2"))
    suite.write("tests/first/test_first.py", TESTS)
    suite.write("tests/second/test_second.py", TESTS + NEW)
    commit("a wider model")
    git("checkout", "-q", "main")
    suite.write("readme.txt", "the main branch goes on")
    commit("readme")
    git("checkout", "-q", "--detach")
    git("merge", "-q", "--no-ff", "-m", "merge", "topic")
    monkeypatch.setenv("GITHUB_REF", "refs/pull/7/merge")
    monkeypatch.setenv("CI", "true")
    return suite


def run_shards(suite, *arguments):
    """Run all shards; return the status of each, and the names of their reports."""
    statuses, names = [], []
    for group in range(1, SHARDS + 1):
        names.append(str(suite.path / "shards" / f"{group}.json"))
        options = (f"--splits={SHARDS}", f"--group={group}", f"--gpumem-json={names[-1]}")
        statuses.append(suite.run(*options, *arguments).ret)
    return statuses, names


def test_eight_shards_from_a_failing_pull_request_to_the_accepted_commit(ci, monkeypatch, capsys):
    statuses, names = run_shards(ci, "--gpumem-missing-baseline=fail")
    assert 1 in statuses
    shards = [read_report(name).report.origins[0].shard for name in names]
    assert [(shard.index, shard.count) for shard in shards] == [(n, SHARDS) for n in range(1, 9)]

    # The job after the shards: one page, one comment, one report.
    assert main.main(["report", *names[:-1], "--json=shards/x.json"]) == 1
    assert "missing: shard 8 of 8" in capsys.readouterr().err
    files = [f"shards/all.{kind}" for kind in ("html", "md", "json")]
    options = ["--html", files[0], "--markdown", files[1], "--json", files[2]]
    assert main.main(["report", *names, *options, "--artifact", "gpu-memory"]) == 0
    comment = Path(files[1]).read_text()
    assert "## GPU memory: 7 of 11 failed" in comment
    assert "- 6 of 7 failures share conftest.py:20 changed: size" in comment
    assert "1 baseline has no test any more" in comment
    assert "test\\_first.py::test\\_gone on virtual-H100" in comment
    assert "gpumem accept gpu-memory/all.json" in comment
    capsys.readouterr()

    # The laptop: a clone with the request's own branch, and the artifact.
    laptop = ci.path.parent / "laptop"
    git("clone", "-q", "--branch", "topic", str(ci.path), str(laptop))
    monkeypatch.chdir(laptop)
    report = str(ci.path / files[2])
    assert main.main(["accept", report]) == 1
    assert "grew, in MiB" in capsys.readouterr().out
    assert git("status", "--porcelain", "--untracked-files=no") == ""
    assert main.main(["accept", report, "--yes"]) == 0
    changed = git("status", "--porcelain", "--untracked-files=no").split()
    assert set(changed) - {"M"} == {
        "baselines/virtual-H100/tests/first/test_first.json",
        "baselines/virtual-H100/tests/second/test_second.json",
        "baselines/virtual-T4/tests/first/test_first.json",
        "baselines/virtual-T4/tests/second/test_second.json",
    }
    commit("accept the wider model")
    accepted = ci.__class__.baselines(ci, laptop / "baselines")

    # CI again, on the merge with that commit; and an update there writes the same files.
    monkeypatch.chdir(ci.path)
    git("fetch", "-q", str(laptop), "topic")
    git("checkout", "-q", "--detach", "main")
    git("merge", "-q", "--no-ff", "-m", "merge", "FETCH_HEAD")
    statuses, names = run_shards(ci, "--gpumem-missing-baseline=fail")
    assert set(statuses) == {0}
    git("checkout", "-q", "main", "--", "baselines")
    deselected = [
        f"--deselect=tests/{it}/test_{it}.py::test_small[1]" for it in ("first", "second")
    ]
    assert ci.run("--gpumem-update-baselines", *deselected).ret == 0
    assert ci.baselines() == accepted
    assert os.getcwd() == str(ci.path)  # noqa: PTH109 - as the commands saw it
