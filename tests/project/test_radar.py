"""The radar compares the newest releases, and its page says what moved."""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys

import pytest
import yaml
from helpers.paths import ROOT

from pytest_gpumem.cli.bisect.trials import SkippedError
from pytest_gpumem.errors import SpecError
from pytest_gpumem.report.json_report import read_report

STEP = """
@pytest.mark.gpu_memory(card="T4")
def test_step():
    torch.empty(SIZE << 20, dtype=torch.uint8, device="cuda")

@pytest.mark.gpu_memory(card="T4")
def test_other():
    torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
"""


@pytest.fixture
def radar(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))  # benchmarks are not installed
    return importlib.import_module("benchmarks.radar.run")


class Reports:
    """The reports of releases; of one that is not there the reason."""

    def __init__(self, **reports):
        self.reports = reports

    def report(self, version):
        if version == "offline":
            raise SpecError("some offline", "no package index answers", "connect")
        if version not in self.reports:
            raise SkippedError("this version cannot be installed: no wheel")
        return self.reports[version]


def measured(suite, size):
    suite.run("--gpumem-json=r.json", source=STEP.replace("SIZE", str(size)))
    return read_report(suite.path / "r.json")


@pytest.mark.parametrize(
    ("offered", "expected"),
    [
        (["1.0", "1.1", "1.2"], ["1.1", "1.2"]),
        (["1.0", "1.1", "1.2rc1", "1.2rc2"], ["1.1", "1.2rc2"]),
        (["1.0", "1.1", "1.1rc1", "1.2.dev20260101"], ["1.0", "1.1"]),
        (["1.0", "1.9", "1.10", "1.10+cpu"], ["1.9", "1.10"]),
        (["1.8", "1.9.0", "1.9.1", "1.10.0", "1.10.1"], ["1.9.1", "1.10.1"]),
    ],
)
def test_the_newest_candidate_is_compared_with_the_last_release(
    radar, monkeypatch, offered, expected
):
    monkeypatch.setattr(radar, "offered_releases", lambda _package, prereleases: offered)
    assert radar.newest("some", 2) == expected


def test_the_page_says_what_moved_and_where(radar, suite):
    reports = Reports(a=measured(suite, 64), b=measured(suite, 96))
    pairs = [radar.Pair("some", old, new) for old, new in (("a", "b"), ("b", "b"), ("b", "c"))]
    for pair in pairs:
        pair.compare(reports)
    grown, same, missing = radar.page(pairs).splitlines()[-3:]
    assert grown.startswith(
        "| some a -> b | `test_it.py::test_step` | "
        "peak allocated +32.00 MiB: 64.00 MiB -> 96.00 MiB |"
    )
    assert "test_it.py:8 changed: 64 << 20 -> 96 << 20" in grown
    assert same == "| some b -> b | none of 2 steps moved | | |"
    assert (
        missing
        == "| some b -> c | not tried: some c: this version cannot be installed: no wheel | | |"
    )


def test_without_an_index_the_page_goes_on(radar):
    pair = radar.Pair("some", "offline", "b")
    pair.compare(Reports())
    (row,) = pair.rows()
    assert row.startswith("| some offline -> b | not tried: some offline: ")
    assert "no package index answers" in row


def test_each_package_has_its_steps_and_the_workflow_runs_them(radar):
    for package in radar.BESIDE:
        assert radar.steps_of(package) != []
    own = {path.stem.removeprefix("test_") for path in (radar.FOLDER / "radar").glob("test_*.py")}
    assert own <= set(radar.BESIDE)
    workflow = yaml.safe_load((ROOT / ".github/workflows/radar.yml").read_text(encoding="utf-8"))
    commands = [step["run"] for step in workflow["jobs"]["radar"]["steps"] if "run" in step]
    (command,) = (shlex.split(it) for it in commands if "benchmarks.radar" in it)
    assert command[1:3] == ["-m", radar.__name__]
    assert command[3:] == ["--page", "radar.md"]


def test_files_of_one_name_are_collected_together(radar):
    files = radar.steps_of("torch")
    assert len(files) == 2
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files, *radar.OPTIONS]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert {line.split("::")[0] for line in ran.stdout.splitlines() if "::" in line} == {
        str(path.relative_to(radar.FOLDER)) for path in files
    }
