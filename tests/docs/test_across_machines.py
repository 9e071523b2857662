"""The page on several machines is true: its workflows are read as CI reads them, and run.

What GitHub's and GitLab's runners do besides the commands (checking out, artifacts, the matrix) is
done here by hand; each command is run as it stands.
"""

from __future__ import annotations

import re
import shutil

import pytest
from helpers.pages import Place, files, read, table
from helpers.paths import ROOT
from helpers.split import SPLIT

from pytest_gpumem.cli import main
from pytest_gpumem.report.json_report import read_report

yaml = pytest.importorskip("yaml")

PAGE = "how-to/across-machines.md"
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
TEST = """
import pytest
import torch


@pytest.mark.gpu_memory(card="T4")
@pytest.mark.parametrize("size", range(1, 9))
def test_step(size):
    torch.empty(size << 23, dtype=torch.uint8, device="cuda")
"""


@pytest.fixture
def place(tmp_path, virtual_gpu):
    """A repository with eight tests that have no baseline."""
    place = Place(tmp_path / "project")
    place.write("conftest.py", SPLIT)
    place.write("tests/test_step.py", TEST)
    place.write("requirements.txt", "pytest-gpumem[html]\npytest-split\n")
    git = "git -c user.name=t -c user.email=t@example.org -c commit.gpgsign=false"
    done = place.sh(f"git init -qb main && git add -A && {git} commit -qm one")
    assert done.ret == 0, done
    return place


def test_the_workflow_of_github_uses_the_actions_inputs_and_is_whole():
    """As actionlint looks: keys, permissions, needs, inputs, expressions."""
    text = files(PAGE, "yaml")[".github/workflows/gpu-memory-shards.yml"]
    workflow = yaml.safe_load(text)
    assert workflow.keys() == {"name", True, "permissions", "jobs"}  # "on" is a boolean of YAML 1.1
    assert workflow["permissions"] == {"contents": "read", "pull-requests": "write"}
    jobs = workflow["jobs"]
    assert jobs["report"]["needs"] in jobs
    assert jobs["report"]["if"] == "always()"
    for job in jobs.values():
        assert job.keys() <= {"runs-on", "strategy", "needs", "if", "steps"}
        assert job["steps"][0]["uses"] == "actions/checkout@v6"
        (step,) = job["steps"][1:]
        assert set(step["with"]) <= set(ACTION["inputs"])
    expressions = set(re.findall(r"\$\{\{ (.*?) \}\}", text))
    assert expressions == {"matrix.shard"}
    assert jobs["shard"]["strategy"]["matrix"] == {"shard": list(range(1, 9))}
    merging = jobs["report"]["steps"][1]["with"]
    assert merging["expect"] == 8
    pattern = ACTION["inputs"]["reports"]["default"]
    assert jobs["shard"]["steps"][1]["with"]["artifact"].startswith(pattern.removesuffix("*"))
    assert not merging["artifact"].startswith(pattern.removesuffix("*"))


def action_step(place, **inputs):
    """Run the action's step that runs pytest, or merges."""
    (step,) = (step for step in ACTION["runs"]["steps"] if step.get("id") == "tests")
    values = {name: str(value["default"]) for name, value in ACTION["inputs"].items()}
    values |= {name: str(value) for name, value in inputs.items()}
    env = {
        name: re.sub(r"\$\{\{ inputs\.(.*?) \}\}", lambda match: values[match[1]], value)
        for name, value in step["env"].items()
    }
    temporary = place.folder.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    output = place.folder.parent / "output.txt"
    done = place.sh(
        step["run"],
        **env,
        RUNNER_TEMP=str(temporary),
        GITHUB_OUTPUT=str(output),
        GITHUB_STEP_SUMMARY=str(place.folder.parent / "summary.md"),
        GITHUB_ACTIONS="true",
        GITHUB_SERVER_URL="https://github.com",
        GITHUB_REPOSITORY="o/r",
        GITHUB_RUN_ID="9",
    )
    assert done.ret == 0, done.err
    status = re.findall(r"status=(\d+)", output.read_text())[-1]
    return int(status), temporary / inputs["artifact"], done


def test_the_action_merges_the_reports_of_its_shards(place, monkeypatch):
    workflow = yaml.safe_load(files(PAGE, "yaml")[".github/workflows/gpu-memory-shards.yml"])
    shard, report = (workflow["jobs"][name]["steps"][1]["with"] for name in ("shard", "report"))
    downloads = place.folder.parent / "temporary/gpu-memory-reports"
    for number in (1, 2):  # two of them are enough to see what the rest would do
        inputs = {
            name: str(value).replace("${{ matrix.shard }}", str(number))
            for name, value in shard.items()
        }
        status, folder, _ = action_step(place, **inputs)
        assert status == 1  # a test without a baseline fails
        shutil.copytree(folder, downloads / inputs["artifact"])
    status, folder, done = action_step(place, **report)
    assert status == 1
    assert "missing: shards 3, 4, 5, 6, 7 and 1 more of 8" in done.err
    status, folder, done = action_step(place, **{**report, "expect": 2})
    summary = (place.folder.parent / "summary.md").read_text()
    command = "gpumem accept --run https://github.com/o/r/actions/runs/9 --artifact gpu-memory\n"
    for text in (summary, (folder / "gpumem.md").read_text()):
        assert "## GPU memory: 2 of 2 failed" in text
        assert command in text
    assert "::error file=tests/test_step.py" in done.out
    assert (folder / "gpumem.html").exists()
    monkeypatch.chdir(place.folder)
    assert main.main(["accept", str(folder / "gpumem.json"), "--yes"]) == 0
    (path,) = place.folder.glob("baselines/virtual-T4/tests/*.json")
    assert path.read_text().count('"peak_allocated"') == 2


ACCEPTED = "`gpumem accept gpumem.json`"


def test_the_jobs_of_gitlab_make_one_report(place):
    assert ACCEPTED in read(PAGE)
    jobs = yaml.safe_load(files(PAGE, "yaml")[".gitlab-ci.yml"])
    assert jobs.pop("stages") == [jobs["gpu-memory"]["stage"], jobs["gpu-memory-report"]["stage"]]
    keys = {"stage", "image", "parallel", "script", "artifacts", "when"}
    assert all(job.keys() <= keys and job["artifacts"]["when"] == "always" for job in jobs.values())
    shards, report = jobs["gpu-memory"], jobs["gpu-memory-report"]
    number = shards["parallel"]
    for index in (1, 2):
        variables = {"CI": "true", "CI_NODE_INDEX": str(index), "CI_NODE_TOTAL": str(number)}
        *_, done = (place.sh(command, **variables) for command in shards["script"])
        assert done.ret == 1
    pattern = shards["artifacts"]["paths"][0]
    assert len(list(place.folder.glob(pattern))) == 2
    install, merge = report["script"]
    assert install == shards["script"][0]
    assert f" {pattern} --expect {number} " in merge
    done = place.sh(merge, CI="true")
    assert done.ret == 1
    assert "missing: shards 3, 4, 5, 6, 7 and 1 more of 8" in done.err
    assert all((place.folder / path).exists() for path in report["artifacts"]["paths"])
    saved = read_report(place.folder / "gpumem.json")
    assert [origin.shard.index for origin in saved.report.origins] == [1, 2]
    assert f"{ACCEPTED.strip('`')}\n" in (place.folder / "gpumem.md").read_text()


SRUN = """#!/bin/bash
# As srun starts the tasks of a job: side by side, each with its number; the largest status is its.
number=${1#--ntasks=}; shift
export SLURM_NTASKS=$number
for task in $(seq 0 $((number - 1))); do SLURM_PROCID=$task "$@" & processes+=($!); done
status=0
for process in "${processes[@]}"; do
    wait "$process" || { ended=$?; [ $ended -le $status ] || status=$ended; }
done
exit $status
"""


def test_slurms_tasks_are_shards(place):
    """srun is a stand-in that starts the tasks on this machine."""
    srun = place.folder.parent / "bin/srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    (command,) = re.findall(r"(srun --ntasks=8 bash -c '.*?')", read(PAGE))
    (merge,) = re.findall(r"`(gpumem report .*? --expect 8)`", read(PAGE).partition("## Slurm")[2])
    # Eight processes would take a minute of a machine with two cores; three do the same.
    three = command.replace("=8", "=3")
    done = place.sh(f"{three} && {merge.replace('8', '3')} --json=all.json")
    assert done.ret == 0, (done.out, done.err)
    report = read_report(place.folder / "all.json").report
    assert [(it.shard.index, it.shard.count) for it in report.origins] == [(1, 3), (2, 3), (3, 3)]
    assert sorted(it.nodeid for it in report.results) == [
        f"tests/test_step.py::test_step[{size}]" for size in range(1, 9)
    ]
    (place.folder / "gpumem-1.json").unlink()
    done = place.sh(merge.replace("8", "3"))
    assert (done.ret, done.err) == (1, "gpumem: missing: shard 2 of 3\n")


def test_every_refusal_names_a_remedy():
    rows = table(PAGE, 1)
    assert len(rows) == 4
    for _, remedy in rows:
        for option in re.findall(r"`(--[\w-]+)", remedy):
            assert option in {"--any-commit", "--device", "--skip-refused"}
