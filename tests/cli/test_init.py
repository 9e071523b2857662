"""``gpumem init``: what it writes into a project, and what it leaves alone."""

from __future__ import annotations

import sys

import pytest

from pytest_gpumem.cli import main
from pytest_gpumem.cli.project.settings_file import tomllib

yaml = pytest.importorskip("yaml", reason="pip install pyyaml")

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
        )

    def forward(self, images):
        return self.layers(images)


def step(batch_size):
    layer = nn.Linear(64, 64, device="cuda")
    layer(torch.randn(batch_size, 64, device="cuda")).sum().backward()


def evaluate():
    torch.zeros(10, device="cuda")
"""
WORDS = """
import torch
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 32)
        self.head = nn.Linear(32, 1000)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


class Odd(nn.Module):
    def forward(self, first, second):
        return first @ second


class Needy(nn.Module):
    def __init__(self, width):
        super().__init__()
"""
PROJECT = """\
# mine
[project]
name = "mine"  # kept

[tool.pytest.ini_options]  # pytest's
# strict
addopts = "-ra"

[tool.other]
x = 1
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty project, and the command in it; what it imports is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in {"models", "words", "package", "package.models"}:
            del sys.modules[name]


@pytest.fixture
def init(project, capsys):
    """Type the command; return its status and all that it says."""

    def typed(*arguments):
        status = main.main(["init", *arguments])
        said = capsys.readouterr()
        return status, said.out + said.err

    return typed


def settings(project):
    """pytest's settings in pyproject.toml."""
    return tomllib.loads((project / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]


def test_an_empty_folder_gets_its_settings_and_a_job(project, init):
    status, said = init("--card", "l4", "--ci=github")
    assert status == 0
    assert settings(project) == {"gpumem_card": "L4"}
    assert 'wrote pyproject.toml: gpumem_card = "L4"' in said
    assert "no test was written: name a model or a step" in said
    job = yaml.safe_load((project / ".github/workflows/gpu-memory.yml").read_text())
    commands = [step["run"] for step in job["jobs"]["gpu-memory"]["steps"] if "run" in step]
    assert commands[0].startswith("pip install torch==")
    assert commands[1].startswith("pytest --gpumem-device=virtual --gpumem-missing-baseline=fail")


def test_comments_and_other_lines_stay(project, init):
    (project / "pyproject.toml").write_text(PROJECT)
    assert init("--ci=none")[0] == 0
    text = (project / "pyproject.toml").read_text()
    line = 'gpumem_card = "T4"\n'
    assert text.replace(line, "", 1) == PROJECT
    assert settings(project) == {"gpumem_card": "T4", "addopts": "-ra"}
    assert init("--ci=none", "--card=L4")[0] == 0  # a card that is set is the user's
    assert (project / "pyproject.toml").read_text() == text


@pytest.mark.parametrize(
    "before",
    [
        "",
        "[project]\nname = 'x'",
        "[tool.pytest.ini_options]",
        "[tool.pytest.ini_options]\r\naddopts = '-q'\r\n",
        "[tool.pytest.ini_options]\nmarkers = [\n  '[tool.pytest.ini_options]',\n]\n",
        "[tool.pytest]\nstrict = true\n",
    ],
)
def test_any_project_file_keeps_all_that_it_says(project, init, before):
    (project / "pyproject.toml").write_text(before, newline="")
    assert init("--ci=none")[0] == 0
    old = tomllib.loads(before.replace("\r\n", "\n")).get("tool", {}).get("pytest", {})
    new = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["pytest"]
    if "strict" in old:
        assert new == {**old, "gpumem_card": "T4"}
    else:
        assert new["ini_options"] == {**old.get("ini_options", {}), "gpumem_card": "T4"}
    data = (project / "pyproject.toml").read_bytes()
    assert data.count(b"\r\n") == (data.count(b"\n") if "\r" in before else 0)


@pytest.mark.parametrize(
    "text", ["[tool.pytest.ini_options\n", "tool = {pytest = {ini_options = {addopts = '-q'}}}\n"]
)
def test_a_project_file_that_cannot_be_edited_is_left_as_it_is(project, init, text):
    (project / "pyproject.toml").write_text(text)
    status, said = init("--ci=none")
    assert status == 2
    assert "pyproject.toml not changed" in said
    assert 'gpumem_card = "T4"' in said
    assert (project / "pyproject.toml").read_text() == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pytest.ini", "[pytest]\n# mine\naddopts = -ra\n"),
        ("pytest.ini", ""),
        ("setup.cfg", "[metadata]\nname = x\n\n[tool:pytest]\naddopts = -ra\n"),
        ("tox.ini", "[tox]\n[pytest]\n"),
    ],
)
def test_the_card_is_written_where_pytest_reads_its_settings(project, init, name, text):
    (project / name).write_text(text)
    assert init("--ci=none")[0] == 0
    assert not (project / "pyproject.toml").exists()
    lines = (project / name).read_text().splitlines()
    assert "gpumem_card = T4" in lines
    assert [line for line in text.splitlines() if line not in lines] == []


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("models.py", 'inputs = torch.randn(gpu_memory.batch_size, 3, 224, 224, device="cuda")'),
        ("models:Net", "from models import Net"),
        ("models.py:step", "step(gpu_memory.batch_size)"),
        ("models.py:evaluate", "def test_evaluate():"),
        (
            "words.py:Words",
            'inputs = torch.randint(1000, (gpu_memory.batch_size, 128), device="cuda")',
        ),
    ],
)
def test_the_first_test_runs(init, suite, target, words):
    suite.write("models.py", MODEL)
    suite.write("words.py", WORDS)
    assert init(target, "--batch-size=4", "--ci=none")[0] == 0
    assert words in (suite.path / "test_gpu_memory.py").read_text()
    session = suite.run()
    assert session.outcomes == {"passed": 1}
    assert set(session.verdicts().values()) == {"no baseline"}


def test_where_no_input_is_found_the_test_says_so(project, init):
    (project / "words.py").write_text(WORDS)
    status, said = init("words.py:Odd", "--ci=none")
    assert status == 0
    assert "the input of Odd is unknown: write it in the test, at inputs = ..." in said
    assert "inputs = ...\n" in (project / "test_gpu_memory.py").read_text()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("gone.py:Net", "there is no file gone.py"),
        ("words.py", "it has Words, Odd, Needy"),
        (
            "words.py:Gone",
            "no function or class Gone; name one of these: Words, Odd, Needy",
        ),
        ("words.py:Needy", "this class cannot be created without arguments"),
    ],
)
def test_what_cannot_be_tested_is_an_error_and_nothing_is_written(project, init, target, words):
    (project / "words.py").write_text(WORDS)
    status, said = init(target)
    assert status == 2
    assert words in said
    assert sorted(it.name for it in project.iterdir() if it.name != "__pycache__") == ["words.py"]


def test_a_batch_size_that_is_none_is_refused(init):
    status, said = init("--batch-size=0")
    assert status == 2
    assert "--batch-size=0: this is not a batch size" in said


def test_a_file_that_is_there_stays_unless_the_user_agrees(project, init, monkeypatch):
    workflow = project / ".github/workflows/gpu-memory.yml"
    workflow.parent.mkdir(parents=True)
    workflow.write_text("mine: 1\n")
    status, said = init()
    assert (status, workflow.read_text()) == (2, "mine: 1\n")
    assert "not changed: the file exists (--yes replaces it)" in said
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert init()[0] == 2
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    status, said = init()
    assert status == 0
    assert "replace .github/workflows/gpu-memory.yml? [y/N]" in said
    assert workflow.with_name("gpu-memory.yml.bak").read_text() == "mine: 1\n"
    assert "pytest --gpumem-device=virtual" in workflow.read_text()
    workflow.write_text("mine: 2\n")
    assert init("--yes")[0] == 0
    kept = [path.read_text() for path in sorted(workflow.parent.glob("*.bak*"))]
    assert kept == ["mine: 1\n", "mine: 2\n"]


class Terminal:
    """A terminal at which somebody answers."""

    def __init__(self, answer):
        self.answer = answer

    def isatty(self):
        return True

    def readline(self):
        return self.answer


def test_a_pipeline_of_gitlab_includes_the_job(project, init):
    (project / ".gitlab").mkdir()
    assert init()[0] == 0
    pipeline = yaml.safe_load((project / ".gitlab-ci.yml").read_text())
    assert pipeline == {"include": [{"local": ".gitlab/gpu-memory.yml"}]}
    job = yaml.safe_load((project / ".gitlab/gpu-memory.yml").read_text())["gpu-memory"]
    assert any("--gpumem-missing-baseline=fail" in line for line in job["script"])
    (project / ".gitlab-ci.yml").write_text("stages: [test]\n")
    status, said = init()
    assert status == 2
    assert "add to its include: - local: .gitlab/gpu-memory.yml" in said
    assert (project / ".gitlab-ci.yml").read_text() == "stages: [test]\n"


def test_a_file_that_cannot_be_written_is_named(project, init):
    (project / ".github").write_text("no folder")
    status, said = init("--ci=github")
    assert status == 2
    assert ".github/workflows/gpu-memory.yml not written: " in said
    assert (project / ".github").read_text() == "no folder"
