"""benchmarks/real_gpu.sh and the checks of tests/gpu/checks, as far as no GPU is needed."""

from __future__ import annotations

import csv
import importlib
import os
import re
import subprocess
import tarfile

import pytest
from helpers.paths import ROOT
from helpers.warm import warm_python

CHECKS = ROOT / "tests/gpu/checks"
PAGE = (ROOT / "docs/how-to/on-a-real-gpu.md").read_text(encoding="utf-8")
SCRIPT = ROOT / "benchmarks/real_gpu.sh"


def run(tmp_path, *words, **environment):
    """Run the script in a dry run; return its status, its errors, and its summary."""
    environment = {**os.environ, "PYTHON": warm_python(), "OUT": str(tmp_path), **environment}
    command = ["bash", str(SCRIPT), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    summary = tmp_path / "summary.txt"
    return done.returncode, done.stderr, summary.read_text() if summary.exists() else ""


def test_a_dry_run_leaves_an_archive_and_a_summary_that_says_what_it_is(tmp_path):
    status, error, summary = run(
        tmp_path, "--dry", "H100", "300", "checks", CHECK_ONLY="measure", CHECK_JOBS="1"
    )
    assert (status, error) == (0, ""), summary
    assert "a dry run: the virtual GPU, not a measurement" in summary
    assert re.search(r"^checks: status 0, .* passed", summary, re.MULTILINE)
    with tarfile.open(tmp_path / "real-gpu-0.tgz") as archive:
        assert {"./checks.txt", "./checks.jsonl"} <= set(archive.getnames())


def test_parts_beyond_the_time_do_not_run_and_are_named(tmp_path):
    status, _, summary = run(tmp_path, "--dry", "H100", "1", "verify", "machine")
    assert status == 1
    assert re.search(r"^Python 3[\d.]+  torch 2\S+  \d+ cores$", summary, re.MULTILINE)
    assert summary.splitlines()[2:] == [
        "parts: verify machine",
        "verify: no time left",
        "machine: no time left",
    ]


def test_what_is_no_number_and_no_part_is_told(tmp_path):
    status, error, _ = run(tmp_path, "checks")
    assert status == 2
    assert "'checks' is no number of seconds: write bash benchmarks/real_gpu.sh 400" in error
    status, error, _ = run(tmp_path, "--dry", "H100", "60", "chekcs")
    assert status == 1
    assert "'chekcs' is no part" in error


def test_the_page_names_all_parts():
    parts = re.findall(r"^        ([a-z]+)\)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"^\| `([a-z]+)` \|", PAGE, re.MULTILINE)) >= set(parts)


def test_each_assumption_has_a_state_of_the_page_and_a_check_that_exists():
    source = (CHECKS / "real_gpu_checks.py").read_text(encoding="utf-8")
    checks = set(re.findall(r"^def test_(\d+)", source, re.MULTILINE))
    states = {"mended", "shown false", "dry", "waits"}
    with (CHECKS / "assumptions.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["number"]) for row in rows] == list(range(1, len(rows) + 1))
    for row in rows:
        assert row["state"] in states
        assert f"`{row['state']}`" in PAGE
        assert set(re.findall(r"\b\d\d\b", row["check"])) <= checks
        for file in re.findall(r"tests/\S+", row["check"]):
            assert (ROOT / file).is_file()
        for place in row["where"].split(", "):
            file, name = place.split()
            code = (ROOT / "pytest_gpumem" / file).read_text(encoding="utf-8")
            assert re.search(rf"\b{name}\b", code), f"{file} has no {name}"
    false = {row["check"] for row in rows if row["state"] == "shown false"}
    assert set(re.findall(r"^@shown_false\ndef test_(\d+)", source, re.MULTILINE)) == false


def test_a_step_s_process_finds_the_packages_of_pythonpath_and_says_why_it_failed(
    tmp_path, monkeypatch
):
    (tmp_path / "torch.py").write_text("raise RuntimeError('planted')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT))
    run_module = importlib.import_module("benchmarks.fidelity.run")
    with pytest.raises(SystemExit, match=r"(?s)PyTorch cannot use the GPU here.*planted"):
        run_module.provenance(None)
