"""``action.yml`` is true: its steps are run as a runner would, on the workflow of its recipe.

Actions that it uses are not run; gh is a stand-in that keeps comments in files.
"""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from helpers.pages import Place, files
from helpers.paths import ROOT
from helpers.split import SPLIT

yaml = pytest.importorskip("yaml")

ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
TEST = """
import pytest
import torch


@pytest.mark.gpu_memory(card="T4")
def test_training():
    torch.empty(SIZE << 20, dtype=torch.uint8, device="cuda")
"""
GH = """#!/usr/bin/env python3
import pathlib, re, sys

folder = pathlib.Path(__file__).parent.parent / "comments"
folder.mkdir(exist_ok=True)
arguments = sys.argv[1:]
with (folder.parent / "gh.txt").open("a") as stream:
    stream.write(f"{arguments}\\n")
if (folder / "read-only").exists():
    sys.exit(1)
path = next(argument for argument in arguments if argument.startswith("repos/"))
field = next((argument for argument in arguments if argument.startswith("body=@")), None)
if field is None:
    marker = re.search('startswith[(]"(.*)"[)]', " ".join(arguments))[1]
    for comment in sorted(folder.glob("*.md")):
        if comment.read_text().startswith(marker):
            print(comment.stem)
else:
    number = path.rpartition("/")[2]
    name = number if number.isdigit() else str(len(list(folder.iterdir())) + 1)
    (folder / f"{name}.md").write_text(pathlib.Path(field[6:]).read_text())
"""


class Runner:
    """Runs the action's steps with the inputs of the recipe, or others."""

    def __init__(self, place, **inputs):
        self.place = place
        (step,) = (
            step
            for job in recipe()["jobs"].values()
            for step in job["steps"]
            if step["uses"].startswith("pytest-gpumem/")
        )
        defaults = {name: value["default"] for name, value in ACTION["inputs"].items()}
        assert set(step["with"]) <= set(defaults)
        self.inputs = {**defaults, **step["with"], **inputs}
        self.output = place.folder.parent / "output.txt"
        self.uploaded = ""

    def value(self, expression):
        """The value of an expression of GitHub's, within a text."""
        name = expression[1].strip()
        if name.startswith("inputs."):
            return str(self.inputs[name.removeprefix("inputs.")])
        if name.startswith("steps.tests.outputs."):
            outputs = dict(line.split("=", 1) for line in self.output.read_text().splitlines())
            return outputs[name.removeprefix("steps.tests.outputs.")]
        values = {
            "steps.upload.outputs.artifact-url": "https://github.com/x/artifacts/1",
            "github.event.pull_request.number": "7",
        }
        return values[name]

    def wanted(self, step):
        """Whether a step's condition holds: inputs, on a pull request."""
        conditions = step.get("if", "").split(" && ") if "if" in step else []
        for condition in conditions:
            name, operator, literal = condition.split()
            value = "pull_request" if name == "github.event_name" else self.value([None, name])
            if (value == literal.strip("'")) is not (operator == "=="):
                return False
        return True

    def run(self):
        """Run all steps, or up to one that fails; return the last one's status and output."""
        self.output.write_text("")
        for step in filter(self.wanted, ACTION["runs"]["steps"]):
            if "uses" in step:
                if "upload" in step["uses"]:
                    self.uploaded = self.value(
                        re.fullmatch(r"\$\{\{(.*)\}\}", step["with"]["path"])
                    )
                continue
            assert step["shell"] == "bash"
            assert "${{" not in step["run"]  # text of an input could be a command
            env = {
                name: re.sub(r"\$\{\{(.*?)\}\}", self.value, value)
                for name, value in step["env"].items()
            }
            done = self.place.sh(
                step["run"],
                **env,
                RUNNER_TEMP=str(self.place.folder.parent),
                GITHUB_OUTPUT=str(self.output),
                GITHUB_STEP_SUMMARY=str(self.place.folder.parent / "summary.md"),
                GITHUB_REPOSITORY="x/y",
                GITHUB_BASE_REF="main",
            )
            if done.ret:
                return done
        return done

    @property
    def comments(self):
        folder = self.place.folder.parent / "comments"
        return {path.stem: path.read_text() for path in sorted(folder.glob("*.md"))}


def recipe():
    pages = files("how-to/github-actions.md", "yaml")
    return yaml.safe_load(pages[".github/workflows/gpu-memory-comment.yml"])


@pytest.fixture(scope="module")
def origin(tmp_path_factory, virtual_gpu):
    """A repository whose main branch has a test with its baseline."""
    place = Place(tmp_path_factory.mktemp("origin") / "project")
    place.write("tests/test_training.py", TEST.replace("SIZE", "30"))
    place.write("requirements.txt", "pytest-gpumem[html]\n")
    assert place.sh("pytest --gpumem-device=virtual --gpumem-update-baselines").ret == 0
    git = "git -c user.name=t -c user.email=t@example.org -c commit.gpgsign=false"
    command = f"git init -qb main && git add -A && {git} commit -qm one"
    assert place.sh(command).ret == 0
    return place.folder


@pytest.fixture
def place(tmp_path, origin):
    subprocess.run(["git", "clone", "-q", origin, tmp_path / "project"], check=True)
    place = Place(tmp_path / "project")
    gh = tmp_path / "bin/gh"
    gh.write_text(GH)
    gh.chmod(0o755)
    return place


def test_a_pull_request_has_one_comment_that_later_runs_replace(place):
    place.write("tests/test_training.py", TEST.replace("SIZE", "50"))
    runner = Runner(place)
    assert runner.run().ret == 1
    assert place.asked.read_text() == "install -r requirements.txt\n"
    assert {path.name for path in (place.folder.parent / "gpu-memory").iterdir()} == {
        "gpumem.html",
        "gpumem.json",
        "gpumem.md",
        "comment.md",
    }
    assert runner.uploaded == str(place.folder.parent / "gpu-memory")
    ((name, comment),) = runner.comments.items()
    assert comment.startswith("<!-- pytest-gpumem gpu-memory -->\n## GPU memory: 1 of 1 failed")
    assert "[The page with timelines](https://github.com/x/artifacts/1)" in comment
    assert "### Committed baselines\n\n`FETCH_HEAD` → `baselines`: 1 same" in comment

    place.write("tests/test_training.py", TEST.replace("SIZE", "30"))
    runner = Runner(place)
    assert runner.run().ret == 0
    ((again, comment),) = runner.comments.items()
    assert again == name
    assert "## GPU memory: 1 measured, none failed" in comment
    Runner(place, artifact="on a gpu").run()
    assert len(runner.comments) == 2


def test_a_fork_has_no_comment_and_still_its_result(place):
    (place.folder.parent / "comments").mkdir()
    (place.folder.parent / "comments/read-only").touch()
    runner = Runner(place, arguments="tests -q", install="")
    assert runner.run().ret == 0
    assert runner.comments == {}
    assert not place.asked.exists()
    assert "pulls" not in (place.folder.parent / "gh.txt").read_text()


def test_without_a_comment_gh_is_not_asked(place):
    runner = Runner(place, comment="false", arguments="none.py")
    assert runner.run().ret == 4  # pytest found no such file
    assert not (place.folder.parent / "gh.txt").exists()


def test_of_some_shards_there_is_a_comment_too_that_names_the_missing_ones(place):
    """A job that was lost has no report; gpumem report then ends with status 1."""
    place.write("conftest.py", SPLIT)
    folder = place.folder.parent / "gpu-memory-reports/gpu-memory-1"
    folder.mkdir(parents=True)
    options = f"--splits=2 --group=1 --gpumem-json={folder}/gpumem.json"
    assert place.sh(f"pytest --gpumem-device=virtual {options}").ret == 0
    runner = Runner(place, merge="true", install="")
    assert runner.run().ret == 1
    (comment,) = runner.comments.values()
    assert "missing: shard 2 of 2: their measurements are not in this report" in comment


@pytest.mark.parametrize(("light", "words"), [("true", ""), ("cudnn", " --cudnn")])
def test_a_light_job_installs_what_gpumem_light_prints(place, light, words):
    place.have_light_print("torch==2.15.0")
    runner = Runner(place, light=light, comment="false")
    assert runner.run().ret == 0
    file = place.folder.parent / "light.txt"
    assert place.asked.read_text().splitlines() == [
        "install --no-deps pytest-gpumem",
        f"gpumem light -r requirements.txt{words}",
        f"install --no-deps --no-compile -r {file}",
    ]
    assert file.read_text() == "torch==2.15.0\n"


def test_a_light_job_without_such_a_word_fails_and_names_the_words(place):
    done = Runner(place, light="yes").run()
    assert done.ret == 1
    assert done.out == "::error::light: 'yes' is none of false, true, cudnn\n"
    assert not place.asked.exists()


def test_the_actions_that_it_uses_are_those_of_the_pages():
    used = {step["uses"] for step in ACTION["runs"]["steps"] if "uses" in step}
    names = ("setup-python", "upload-artifact", "download-artifact")
    assert used == {f"actions/{name}@v6" for name in names}
    assert recipe()["permissions"] == {"contents": "read", "pull-requests": "write"}
    assert json.loads(json.dumps(ACTION["outputs"])).keys() == {"status", "folder"}
