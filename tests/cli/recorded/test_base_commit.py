"""``gpumem compare --git``: the working tree beside a commit, without committed baselines."""

import sys

import pytest
from helpers.git import commit, git
from helpers.warm import warm_python

MODULE = """
import torch

def step():
    kept = torch.empty(2**20, device="cuda")
    {more}
    return kept, more
"""
TEST = """
import pytest
from mine import step

@pytest.mark.gpu_memory
def test_step():
    result = step()

@pytest.mark.gpu_memory(baseline=False)
def test_other():
    step()
"""


@pytest.fixture
def project(here, monkeypatch):
    """A repository with a package in src, and pytest's arguments; a commit that takes 4 MiB."""
    monkeypatch.setenv("CI", "1")
    monkeypatch.setattr(sys, "executable", warm_python())
    (here / "src").mkdir()
    (here / "src/mine.py").write_text(MODULE.format(more="more = None"))
    (here / "test_mine.py").write_text(TEST)
    (here / "pytest.ini").write_text("[pytest]\npythonpath = src\n")
    git("init", "-q")
    commit("base")
    return here


def compare(capfd, *arguments):
    """Run the command in this process; pytest's sessions are processes of their own."""
    from pytest_gpumem.cli import main

    status = main.main(["compare", *arguments])
    done = capfd.readouterr()
    return status, " ".join(done.out.split()), done.err


def test_a_growth_since_the_commit_fails_with_its_cause(project, capfd):
    (project / "src/mine.py").write_text(MODULE.format(more="more = kept.repeat(4)"))
    status, out, _ = compare(capfd, "--git", "HEAD", "--", "-p", "no:asyncio", "test_mine.py")
    assert status == 1
    assert "regressed: other +16.00 MiB at src/mine.py:6 (step)" in out
    assert "next: if this is intended, merge it: HEAD is measured anew each time" in out
    assert git("worktree", "list").count("\n") == 1
    assert not (project / "baselines").exists()
    status, out, _ = compare(capfd, "--git=HEAD", "--", "-p", "no:asyncio", "-k", "other")
    assert (status, "1 passed, 1 deselected" in out) == (0, True)


def test_a_commit_whose_tests_cannot_run_is_told(project, capfd):
    (project / "test_mine.py").write_text("import nowhere")
    commit("broken")
    (project / "test_mine.py").write_text(TEST)
    status, _, err = compare(capfd, "--git=HEAD", "--", "-p", "no:asyncio")
    assert status == 2
    assert "gpumem: pytest ended with status 2 in HEAD:" in err
    assert "No module named 'nowhere'" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--git=nowhere"], "--git=nowhere: git says: invalid reference: nowhere"),
        ([], "gpumem compare: this compares two sets of figures; name one or two, or write --git"),
        (["a", "b", "c"], "gpumem compare: this compares two sets of figures"),
    ],
)
def test_bad_input_is_told(project, capfd, arguments, problem):
    status, _, err = compare(capfd, *arguments)
    assert status == 2
    assert problem in err


def test_a_module_that_only_the_working_tree_has_is_told(project, capfd):
    """As an editable installation whose folder is no entry of the path: it would be compared."""
    (project / "lib").mkdir()
    (project / "lib/mine.py").write_text(MODULE.format(more="more = None"))
    (project / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(project)!r} + '/lib')"
    )
    (project / "pytest.ini").write_text("[pytest]\n")
    commit("absolute")
    status, _, err = compare(capfd, "--git=HEAD", "--", "-p", "no:asyncio")
    assert status == 2
    assert "tests of HEAD imported these files of the working tree:" in err
    assert str(project / "lib/mine.py") in err
