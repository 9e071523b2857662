"""The how-to guides for CI are true: their jobs' commands are run as the runner would.

What stands for a GPU runner here is the virtual GPU. Actions are not run: checking out and setting
up Python are done, and what would be uploaded has to be there.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import takewhile
from xml.etree import ElementTree as ET

import pytest
from helpers.pages import Place, blocks, files, on_virtual

from pytest_gpumem.report.json_schema import FORMAT

yaml = pytest.importorskip("yaml")

TESTS = """
import pytest
import torch


@pytest.mark.gpu_memory(card="T4", batch_size=512)
def test_training(gpu_memory):
    model = torch.nn.Linear(1024, 1024, device="cuda")
    model(torch.randn(gpu_memory.batch_size, 1024, device="cuda")).sum().backward()
"""
GROWN = TESTS.replace('"cuda")).sum', '"cuda").repeat(8, 1)).sum')
NEW = "\n\n@pytest.mark.gpu_memory\ndef test_new(): torch.empty(1024, device='cuda')\n"
RECORDING = "the last steps of .github/workflows/gpu-memory-record.yml"
ACTIONS = {"actions/checkout@v6", "actions/setup-python@v6", "actions/upload-artifact@v6"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, virtual_gpu):
    """A repository with a test and its baseline, which is lower on the main branch."""
    place = Place(tmp_path_factory.mktemp("recorded") / "project")
    place.write("tests/test_training.py", TESTS)
    place.write("requirements.txt", "torch\npytest-gpumem[html]\n")
    assert place.sh("pytest --gpumem-device=virtual --gpumem-update-baselines").ret == 0
    (path,) = place.folder.rglob("virtual-T4/tests/test_training.json")
    text = path.read_text()
    peak = re.search(r'"peak_allocated": \[(\d+)\]', text)
    before = text.replace(peak[0], f'"peak_allocated": [{int(peak[1]) - 2**20}]')
    path.write_text(before)
    git(place, "init", "-qb", "main")
    git(place, "add", "-A")
    git(place, "commit", "-qm", "main")
    git(place, "update-ref", "refs/remotes/origin/main", "main")
    path.write_text(text)
    git(place, "commit", "-qam", "topic")
    return place.folder


@pytest.fixture
def place(tmp_path, recorded):
    shutil.copytree(recorded, tmp_path / "project")
    return Place(tmp_path / "project")


def git(place, *arguments):
    names = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *names, *arguments], cwd=place.folder, check=True, capture_output=True)


# GitHub Actions


class GitHub:
    """Runs the steps of a workflow's only job."""

    def __init__(self, place):
        self.place = place
        self.summary = place.folder.parent / "summary.md"
        self.variables = {
            "GITHUB_ACTIONS": "true",
            "CI": "true",
            "GITHUB_WORKSPACE": str(place.folder),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "GITHUB_BASE_REF": "main",
        }
        self.done = []
        """(command, what came of it) of each step that was run"""
        self.uploaded = []

    def run(self, name, adapt=str, last_steps=()):
        """Run it, with other last steps if there are some; return whether it succeeded."""
        text = files("how-to/github-actions.md", "yaml")[f".github/workflows/{name}.yml"]
        workflow = yaml.safe_load(text)
        assert workflow["permissions"] == {"contents": "read"}
        (job,) = workflow["jobs"].values()
        assert job["runs-on"]
        succeeded = True
        for step in [*job["steps"][: len(job["steps"]) - len(last_steps)], *last_steps]:
            assert step.keys() <= {"uses", "with", "run", "if"}
            assert step.get("if", "always()") == "always()"
            if not succeeded and "if" not in step:
                continue
            if "run" in step:
                done = self.place.sh(adapt(step["run"]), **self.variables)
                self.done.append((step["run"], done))
                succeeded = succeeded and done.ret == 0
            else:
                self._action(step)
        return succeeded

    def _action(self, step):
        assert step["uses"] in ACTIONS
        if "upload" in step["uses"]:
            paths = step["with"]["path"].split()
            self.uploaded += [it for it in paths if (self.place.folder / it).exists()]
            assert self.uploaded[-len(paths) :] == paths

    @property
    def tests(self):
        """What came of pytest."""
        return next(done for command, done in self.done if command.startswith("pytest"))


@pytest.fixture
def github(place):
    return GitHub(place)


def test_every_workflow_of_the_page_is_run_here():
    names = {"gpu-memory", "gpu-memory-comment", "gpu-memory-real"}
    workflows = {f".github/workflows/{name}.yml" for name in names}
    assert set(files("how-to/github-actions.md", "yaml")) == {*workflows, RECORDING}


def test_without_a_gpu_the_summary_has_the_report_and_what_became_of_baselines(github):
    assert github.run("gpu-memory"), github.done
    summary = github.summary.read_text()
    report, _, compared = summary.partition("1 grew")
    assert "## GPU memory: " in report
    assert "| `tests/test_training.py::test_training` | ok |" in report
    assert "+1.00" in compared
    assert github.place.asked.read_text() == "install -r requirements.txt\n"
    assert github.uploaded == ["gpumem.html", "gpumem.json"]


def test_a_pull_request_that_grows_or_lacks_a_baseline_fails_and_still_has_its_reports(github):
    github.place.write("tests/test_training.py", GROWN + NEW)
    assert not github.run("gpu-memory")
    assert github.tests.ret == 1
    lines = [it for it in github.tests.out.splitlines() if it.startswith("::error ")]
    marks = [i for i, line in enumerate((GROWN + NEW).splitlines(), 1) if "@pytest.mark" in line]
    assert len(lines) == 2
    for line, mark in zip(lines, marks, strict=True):
        assert line.startswith(f"::error file=tests/test_training.py,line={mark},title=GPU memory")
    summary = github.summary.read_text()
    assert "## GPU memory: 2 of 2 failed" in summary
    assert "regressed" in summary
    assert "no baseline" in summary
    assert "1 grew" in summary  # gpumem compare's
    assert github.uploaded == ["gpumem.html", "gpumem.json"]


def test_growth_of_baselines_can_fail_the_job_as_the_page_says(place):
    command = 'gpumem compare "origin/$GITHUB_BASE_REF" --format=markdown --fail-on-growth=2%'
    assert place.sh(command, GITHUB_BASE_REF="main").ret == 1
    assert place.sh(command.replace("2%", "50%"), GITHUB_BASE_REF="main").ret == 0


def test_on_a_gpu_runner(github):
    assert github.run("gpu-memory-real", on_virtual), github.done
    assert json.loads((github.place.folder / "gpumem.json").read_text())["format"] == FORMAT


def test_on_a_gpu_runner_whose_gpu_is_not_found_the_job_fails(github):
    github.variables["CUDA_VISIBLE_DEVICES"] = ""
    assert not github.run("gpu-memory-real")
    assert github.tests.ret == 1
    assert "or write --gpumem-device=virtual" in github.tests.out


def test_a_gpu_without_baselines_is_held_to_the_virtual_ones(place):
    job = files("how-to/github-actions.md", "yaml")[".github/workflows/gpu-memory-real.yml"]
    command = re.search(r"run: (pytest .*)", job)[1]
    assert command.count("--gpumem-missing-baseline=fail") == 1
    command = command.replace("--gpumem-missing-baseline=fail", "--gpumem-against=virtual:T4")
    assert place.sh(on_virtual(command)).ret == 0
    (result,) = json.loads((place.folder / "gpumem.json").read_text())["results"]
    assert result["verdict"]["held_to"] == "virtual-T4"


def test_the_job_that_records_baselines_uploads_them(github):
    before = {it.name: it.read_text() for it in github.place.folder.glob("baselines/*/*/*.json")}
    shutil.rmtree(github.place.folder / "baselines")
    steps = yaml.safe_load(files("how-to/github-actions.md", "yaml")[RECORDING])
    assert github.run("gpu-memory-real", on_virtual, steps), github.done
    after = {it.name: it.read_text() for it in github.place.folder.glob("baselines/*/*/*.json")}
    assert github.uploaded == ["baselines"]
    assert after == before


# GitLab


class GitLab:
    """Runs a job's scripts: script stops at the first error, after_script is run in any case."""

    def __init__(self, place):
        self.place = place
        self.variables = {"CI": "true", "GITLAB_CI": "true", "CI_PROJECT_DIR": str(place.folder)}

    def run(self, name, adapt=str):
        """Run it; return whether it succeeded, and the job."""
        jobs = {
            k: v for it in blocks("how-to/gitlab.md", "yaml") for k, v in yaml.safe_load(it).items()
        }
        job = jobs[name]
        variables = self.variables | job.get("variables", {})
        statuses = (self.place.sh(adapt(it), **variables).ret for it in job["script"])
        succeeded = len(list(takewhile(lambda it: it == 0, statuses))) == len(job["script"])
        for command in job.get("after_script", ()):
            assert self.place.sh(adapt(command), **variables).ret == 0
        artifacts = job["artifacts"]
        assert artifacts["when"] == "always"
        for path in [*artifacts["paths"], artifacts["reports"]["junit"]]:
            assert (self.place.folder / path).stat().st_size
        return succeeded

    @property
    def properties(self):
        """The figures of the only test in JUnit's report."""
        (case,) = ET.parse(self.place.folder / "junit.xml").iter("testcase")
        return {it.get("name"): it.get("value") for it in case.iter("property")}


@pytest.fixture
def gitlab(place):
    lab = GitLab(place)
    place.sh("git rev-parse origin/main > ../base")
    base = (place.folder.parent / "base").read_text().strip()
    lab.variables["CI_MERGE_REQUEST_DIFF_BASE_SHA"] = base
    return lab


def test_gitlab_without_a_gpu(gitlab):
    assert gitlab.run("gpu-memory")
    assert gitlab.properties["gpumem_verdict"] == "within"
    assert int(gitlab.properties["gpumem_peak_allocated"]) > 2**20
    assert "1 grew" in (gitlab.place.folder / "baselines-changed.md").read_text()


def test_gitlab_without_a_gpu_when_a_test_has_grown(gitlab):
    gitlab.place.write("tests/test_training.py", GROWN)
    assert not gitlab.run("gpu-memory")
    assert gitlab.properties["gpumem_verdict"] == "regressed"
    (failure,) = ET.parse(gitlab.place.folder / "junit.xml").iter("failure")
    assert "regressed: " in failure.text
    assert "peak allocated" in failure.text


def test_gitlab_on_a_gpu_runner(gitlab):
    assert gitlab.run("gpu-memory-real", on_virtual)
    assert gitlab.properties["gpumem_verdict"] == "within"
