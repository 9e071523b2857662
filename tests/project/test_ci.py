"""What CI runs: the workflow has the parts of .ci/run, and all Pythons that are promised."""

import re
import subprocess

import pytest
import yaml
from helpers.paths import ROOT, TESTS

RUN = (ROOT / ".ci/run").read_text(encoding="utf-8")
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
(JOB,) = WORKFLOW["jobs"].values()
MATRIX = JOB["strategy"]["matrix"]
SLOW = [
    line.partition("  # ")
    for line in (TESTS / "slow.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def test_all_pythons_that_are_promised_have_a_job():
    promised = re.findall(
        r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text()
    )
    assert MATRIX["python"] == promised
    assert MATRIX["part"] == ["fast"]


def test_the_jobs_are_parts_of_ci_run():
    assert JOB["steps"][-1]["run"] == "bash .ci/run ${{ matrix.part }}"
    named = {*MATRIX["part"], *(part for job in MATRIX["include"] for part in job["part"].split())}
    done = subprocess.run(
        ["bash", ROOT / ".ci/run", "none"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    parts = {*re.findall(r"\w+", done.stderr.partition("no part: ")[2])}
    assert named == parts - {"lowest", "slow_docs"}  # each Python has a job of its own
    assert "-- browser lowest fast slow_docs examples lint\n" in RUN


def test_the_dry_run_has_each_part_of_a_run_on_a_real_gpu():
    script = (ROOT / "benchmarks/real_gpu.sh").read_text(encoding="utf-8")
    (command,) = re.findall(r"real_gpu\.sh --dry H100 \d+ \\\n +(.*)", RUN)
    assert sorted(command.split()) == sorted(
        re.findall(r"^        ([a-z]+)\)", script, re.MULTILINE)
    )


def test_ci_run_has_the_commands_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ (bash (?:tests|examples)/run\.sh)$", readme, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert f" {command}; }}\n" in RUN


@pytest.mark.parametrize(("name", "reason"), [(name, reason) for name, _, reason in SLOW])
def test_a_slow_test_is_there_and_has_a_reason(name, reason):
    path, _, test = name.partition("::")
    source = (TESTS / path).read_text(encoding="utf-8")
    assert not test or re.search(rf"^ *def {test.partition('[')[0]}\(", source, re.MULTILINE)
    assert reason
