"""The tutorial is true: each of its steps is done here, and prints what the page shows."""

import re

import pytest
from helpers.git import commit, git
from helpers.left_out import need_cudnn
from helpers.pages import blocks, changed, files, flat, read, shows

yaml = pytest.importorskip("yaml")

PAGE = "tutorial/gate-in-ci.md"
UNMARKED, TEST = (files(PAGE)[name] for name in ("test_training.py", "test_training.py#2"))
SETTINGS = files(PAGE, "toml")["pyproject.toml"]
ANSWER, FIRST, WITHIN, REGRESSED, OUT_OF_MEMORY, HINT, REQUIREMENTS = blocks(PAGE, "text")
GROWTH, NEW_BASELINE = blocks(PAGE, "diff")
GROWTH = GROWTH.replace("-        loss", "-        loss", 1)


@pytest.fixture
def gate(same_torch, suite, monkeypatch):
    """The project after the second step."""
    pytest.importorskip("torchvision")
    monkeypatch.setenv("COLUMNS", "80")
    suite.write("test_training.py", TEST)
    suite.write("pyproject.toml", SETTINGS)
    return suite


def commit_as_the_page_does():
    """Commit what the page's command adds: from then on git tells what changed."""
    assert "&& git init --initial-branch=main\n" in read(PAGE)
    added = re.search(r"^\$ git (add .*)$", read(PAGE), re.MULTILINE)[1]
    git("init", "-q", "--initial-branch=main")
    git(*added.split())
    commit("A memory test of the ResNet-50 step")


def test_the_first_answer_is_what_the_page_shows(same_torch, suite, monkeypatch):
    pytest.importorskip("torchvision")
    need_cudnn()
    monkeypatch.setenv("COLUMNS", "80")
    suite.write("test_training.py", UNMARKED)
    command = re.search(r"^\$ pytest (--gpumem-all .*)$", read(PAGE), re.MULTILINE)[1]
    session = suite.run(*command.split())
    assert session.ret == 0
    assert shows(session.out, ANSWER)


def test_the_steps_print_what_the_page_shows(gate):
    need_cudnn()
    first = gate.run()
    assert first.ret == 0
    assert shows(first.out, FIRST)

    command = re.search(r"to record baselines: pytest (.*)", FIRST)[1]
    assert f"$ pytest {command}\n" in read(PAGE)
    assert gate.run(*command.split()).ret == 0
    assert list(gate.baselines()) == ["virtual-T4/test_training.json"]
    assert shows(gate.run("-v").out, WITHIN)
    (recorded,) = gate.baselines().values()
    commit_as_the_page_does()

    gate.write("test_training.py", changed(TEST, GROWTH))
    grown = gate.run()
    assert grown.ret == 1
    assert flat(REGRESSED) in grown.flat

    assert gate.run("--gpumem-update-baselines").ret == 0
    (updated,) = gate.baselines().values()
    for text, mark in ((recorded, "-"), (updated, "+")):
        lines = [line[1:] for line in NEW_BASELINE.splitlines() if line[0] in f" {mark}"]
        assert "\n".join(lines) in text


def test_what_does_not_fit_prints_what_the_page_shows(gate):
    need_cudnn()
    assert "`batch_size=256`" in read(PAGE)
    gate.write("test_training.py", TEST.replace("batch_size=32", "batch_size=256"))
    session = gate.run()
    assert session.ret == 1
    assert shows(session.out, OUT_OF_MEMORY + HINT)


def test_the_job_lets_no_test_pass_without_a_baseline(gate):
    (job,) = yaml.safe_load(blocks(PAGE, "yaml")[0])["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[0] == "pip install -r requirements.txt"
    assert REQUIREMENTS.startswith("# requirements.txt\ntorch==")
    options = commands[1].removeprefix("pytest ").split()
    assert gate.run(*options).ret == 1
    assert gate.run("--gpumem-update-baselines").ret == 0
    assert gate.run(*options).ret == 0


def test_a_pull_request_fails_with_its_cause(gate, monkeypatch, tmp_path):
    """The job's command, where a branch makes the step grow, with the variables of GitHub."""
    assert gate.run("--gpumem-update-baselines").ret == 0
    commit_as_the_page_does()
    gate.write("test_training.py", changed(TEST, GROWTH))
    git("commit", "-qam", "Keep the graph")
    summary = tmp_path / "summary.md"
    for name, value in (
        ("CI", "true"),
        ("GITHUB_ACTIONS", "true"),
        ("GITHUB_WORKSPACE", gate.path),
    ):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    (job,) = yaml.safe_load(blocks(PAGE, "yaml")[0])["jobs"].values()
    (command,) = [step["run"] for step in job["steps"] if step.get("run", "").startswith("pytest")]
    session = gate.run(*command.removeprefix("pytest ").split())
    assert session.ret == 1
    cause = flat(REGRESSED).partition("; peak")[0].removeprefix("regressed: ")
    assert cause in session.flat
    assert cause in flat(summary.read_text(encoding="utf-8").replace("\\", ""))  # Markdown's
    assert "::error file=test_training.py" in session.out
