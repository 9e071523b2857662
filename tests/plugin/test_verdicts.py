"""Verdicts as a session gives them, and what its options change."""

from __future__ import annotations

import json

import pytest

SOURCE = """
import os
@pytest.mark.gpu_memory(ARGS)
def test_it():
    mib(int(os.environ.get("SIZE", "100")))
"""
UPDATE = "--gpumem-update-baselines"


@pytest.fixture
def known(suite):
    """A test with a baseline of 100 MiB."""
    assert suite.run(UPDATE, source=SOURCE.replace("ARGS", "")).outcomes == {"passed": 1}
    return suite


def test_growth_is_a_regression_that_fails_with_its_figures(known, monkeypatch):
    monkeypatch.setenv("SIZE", "150")
    session = known.run()
    assert session.outcomes == {"failed": 1}
    figures = "peak allocated grew by 50.00 MiB (+50.0%): 100.00 -> 150.00 MiB, tolerance 1.00 MiB"
    lead = "other +50.00 MiB at test_it.py:4 (mib)"
    assert f"regressed: {lead}; {figures} +50.00 MiB other test_it.py:" in session.flat
    assert f"FAILED test_it.py::test_it - +50.00 MiB (+50.0%): {lead}" in session.flat
    assert "pytest test_it.py::test_it --gpumem-update-baselines" in session.out
    assert "Traceback" not in session.out
    assert "def test_it" not in session.out


def test_shrinkage_passes_with_a_note_or_fails(known, monkeypatch):
    monkeypatch.setenv("SIZE", "60")
    session = known.run()
    assert session.outcomes == {"passed": 1}
    assert session.verdicts() == {"test_it": "improved"}
    assert f"pytest test_it.py::test_it {UPDATE}" in session.out
    assert known.run("--gpumem-shrinkage=fail").outcomes == {"failed": 1}
    known.write("pytest.ini", "[pytest]\ngpumem_shrinkage = fail")
    session = known.run()
    assert session.outcomes == {"failed": 1}
    assert "improved: peak allocated shrank by 40.00 MiB" in session.flat
    assert known.run("--gpumem-shrinkage=note").outcomes == {"passed": 1}


def test_no_baseline_passes_with_a_note_or_fails(suite):
    session = suite.run(source=SOURCE.replace("ARGS", ""))
    assert session.outcomes == {"passed": 1}
    assert session.verdicts() == {"test_it": "no baseline"}
    assert "gpumem: 1 without baseline" in session.out
    session = suite.run("--gpumem-missing-baseline=fail")
    assert session.outcomes == {"failed": 1}
    assert "no baseline: 100.00 MiB allocated" in session.flat


@pytest.mark.parametrize(("value", "fails"), [("true", True), ("1", True), ("false", False)])
def test_in_ci_a_missing_baseline_fails_unless_an_option_says_otherwise(
    suite, monkeypatch, value, fails
):
    monkeypatch.setenv("CI", value)
    session = suite.run(source=SOURCE.replace("ARGS", ""))
    assert session.outcomes == {"failed" if fails else "passed": 1}
    line = "gpumem: CI is set: a test without a baseline fails"
    assert (line in session.out) is fails
    suite.write("pytest.ini", "[pytest]\ngpumem_missing_baseline = note")
    session = suite.run()
    assert session.outcomes == {"passed": 1}
    assert line not in session.out


def test_in_ci_a_baseline_of_another_card_fails_and_one_that_is_recorded_does_not(
    known, monkeypatch
):
    monkeypatch.setenv("CI", "true")
    session = known.run("--gpumem-card=T4")
    assert session.outcomes == {"failed": 1}
    assert "no baseline for virtual-T4, only for virtual-H100" in session.flat
    session = known.run("--gpumem-card=T4", "--gpumem-update-baselines")
    assert session.outcomes == {"passed": 1}


def test_a_projects_first_baselines_come_with_the_card_for_the_ini_file(suite):
    default = 'H100 is the default card; for another card, write gpumem_card = "T4" in pyproject'
    later = 'to compare every later run with these baselines, write gpumem_card = "L4" in '
    source = SOURCE.replace("ARGS", "")
    assert f"gpumem: {default}" in suite.run(source=source).flat
    session = suite.run("--gpumem-card=L4")
    assert f"gpumem: {later}pyproject.toml ([tool.pytest.ini_options])" in session.flat
    suite.write("pytest.ini", "[pytest]\ngpumem_card = L4")
    assert "gpumem_card" not in suite.run().out
    suite.write("pytest.ini", "[pytest]")
    assert default in suite.run("--gpumem-update-baselines").flat
    session = suite.run("--gpumem-card=L4")
    assert "gpumem_card" not in session.out  # there are baselines, which the verdict names
    assert "test_it.py --gpumem-card=L4 --gpumem-update-baselines" in session.flat or (
        "test_it --gpumem-card=L4 --gpumem-update-baselines" in session.flat
    )


def test_a_baseline_of_another_device_is_never_compared_in_silence(known):
    session = known.run("--gpumem-card=T4")
    assert session.outcomes == {"passed": 1}
    assert session.verdicts() == {"test_it": "incomparable"}
    assert "1 incomparable" in session.out
    session = known.run("--gpumem-card=T4", "--gpumem-missing-baseline=fail")
    assert session.outcomes == {"failed": 1}
    assert "no baseline for virtual-T4, only for virtual-H100" in session.flat


def test_another_torch_is_compared_and_named(known, monkeypatch):
    path = known.path / "baselines/virtual-H100/test_it.json"
    content = json.loads(path.read_text())
    for made_with in content["provenance"].values():
        made_with["torch"], made_with["cuda"] = "2.5.1", "12.1"  # older than any that runs
    path.write_text(json.dumps(content))
    monkeypatch.setenv("SIZE", "150")
    session = known.run()
    assert session.outcomes == {"failed": 1}
    assert "regressed: torch 2.5.1 -> 2." in session.flat
    monkeypatch.delenv("SIZE")
    noted = "note: baseline made with torch 2.5.1, CUDA 12.1; measured with torch"
    assert noted in known.run().flat


@pytest.mark.parametrize(
    ("arguments", "option", "ini", "verdict"),
    [
        ("", "", "", "regressed"),
        ("tolerance='10%'", "", "", "ok"),
        ("", "--gpumem-tolerance=10%", "", "ok"),
        ("", "", "10%", "ok"),
        ("", "--gpumem-tolerance=1MiB", "10%", "regressed"),
        ("tolerance='1MiB'", "--gpumem-tolerance=10%", "10%", "regressed"),
        ("tolerance=None", "--gpumem-tolerance=1%, 8MiB", "", "ok"),
    ],
)
def test_tolerance_of_marker_before_option_before_ini(  # noqa: PLR0913, PLR0917 - parameters
    known, monkeypatch, arguments, option, ini, verdict
):
    monkeypatch.setenv("SIZE", "108")
    known.write("pytest.ini", f"[pytest]\ngpumem_tolerance = {ini}")
    session = known.run(*filter(None, [option]), source=SOURCE.replace("ARGS", arguments))
    assert session.verdicts() == {"test_it": verdict}


def test_baseline_false_is_held_to_none(known, monkeypatch):
    monkeypatch.setenv("SIZE", "150")
    session = known.run(source=SOURCE.replace("ARGS", "baseline=False"))
    assert session.outcomes == {"passed": 1}
    assert session.verdicts() == {"test_it": "ok"}


def test_a_baseline_of_another_batch_size_is_not_compared(suite):
    suite.run(UPDATE, source=SOURCE.replace("ARGS", "batch_size=4"))
    session = suite.run(source=SOURCE.replace("ARGS", "batch_size=8"))
    assert session.outcomes == {"passed": 1}
    assert session.verdicts() == {"test_it": "incomparable"}


@pytest.mark.parametrize("arguments", ["world_size=8", "world_size=4, rank=1", ""])
def test_a_baseline_of_another_rank_is_not_compared(suite, arguments):
    same = SOURCE.replace("ARGS", "world_size=8, rank=1")
    suite.run(UPDATE, source=same)
    assert suite.run(source=same).verdicts() == {"test_it": "ok"}
    session = suite.run("--gpumem-missing-baseline=fail", source=SOURCE.replace("ARGS", arguments))
    assert session.verdicts() == {"test_it": "incomparable"}
    assert "rank changed from 1 of 8 to " in session.flat


HOOKS = """
from dataclasses import replace
from pytest_gpumem import Peak

def pytest_gpumem_measured(item, part, measurement):
    if "changed" in item.name:
        return replace(measurement, peaks=(Peak(7 << 20, 8 << 20),))

def pytest_gpumem_judged(item, result):
    print("JUDGED", item.name, repr(result.part), result.verdict.kind)
"""


def test_hooks_see_and_change_a_measurement_and_see_every_verdict(suite):
    suite.write("conftest.py", HOOKS)
    session = suite.run(
        "-s",
        source="""
        @pytest.mark.gpu_memory
        def test_changed(gpu_memory):
            with gpu_memory.measure("part"):
                mib(40)

        @pytest.mark.gpu_memory(max_gib=1)
        def test_plain():
            mib(1100)
        """,
    )
    assert session.figures() == {
        "test_changed": (7, 8),
        "test_changed (part)": (7, 8),
        "test_plain": (1100, 1100),
    }
    assert "JUDGED test_changed '' no baseline" in session.out
    assert "JUDGED test_changed 'part' no baseline" in session.out
    assert "JUDGED test_plain '' out of memory" in session.out
