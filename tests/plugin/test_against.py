"""``--gpumem-against``, and what is said of several devices' baselines in one repository."""

from __future__ import annotations

import pytest

from pytest_gpumem.report.json_report import read_report

STEP = """
@pytest.mark.gpu_memory
def test_step():
    mib(1000)
"""
REAL = """
import dataclasses
from pytest_gpumem.measurement import DeviceInfo, Peak

GROWN = {grown}

def pytest_gpumem_measured(item, part, measurement):
    device = DeviceInfo("cuda", "NVIDIA T4", 15_000_000_000, (7, 5), 40)
    provenance = dataclasses.replace(measurement.provenance, driver="580.1")
    peaks = tuple(Peak(p.allocated + GROWN, p.reserved) for p in measurement.peaks)
    return dataclasses.replace(measurement, device=device, provenance=provenance, peaks=peaks)
"""


def is_real(suite, grown_mib):
    """Let later sessions be those of a GPU that takes so much more than the virtual one."""
    suite.write("conftest.py", REAL.format(grown=grown_mib << 20))


@pytest.fixture
def predicted(suite):
    """A baseline of the virtual T4."""
    suite.run("--gpumem-update-baselines", "--gpumem-card=T4", source=STEP)
    assert list(suite.baselines()) == ["virtual-T4/test_it.py".replace(".py", ".json")]
    return suite


AGAINST = "--gpumem-against=virtual:T4"


@pytest.mark.parametrize(("grown", "verdict"), [(29, "ok"), (31, "regressed")])
def test_a_real_run_is_held_to_the_prediction_with_a_tolerance_of_its_own(
    predicted, grown, verdict
):
    is_real(predicted, grown)
    session = predicted.run(AGAINST, "-v")
    assert session.verdicts() == {"test_step": verdict}
    line = "gpumem: baselines: 1 of 1 compared with those of virtual-T4"
    assert line in session.flat
    if verdict == "regressed":
        assert session.ret == 1
        assert "peak allocated is 31.00 MiB (+3.1%) above that of virtual-T4" in session.flat
        assert "tolerance 30.00 MiB" in session.flat
        assert "next: find the lines that differ" in session.flat
        assert "--gpumem-update-baselines" not in session.out


@pytest.mark.parametrize("by", ["option", "ini"])
def test_the_tolerance_can_be_given(predicted, by):
    is_real(predicted, 31)
    if by == "ini":
        ini = "[pytest]\ngpumem_against = virtual:T4\ngpumem_tolerance = 4%"
        predicted.write("pytest.ini", ini)
        session = predicted.run()
    else:
        session = predicted.run(AGAINST, "--gpumem-tolerance=4%")
    assert session.verdicts() == {"test_step": "ok"}


def test_the_markers_tolerance_is_of_the_devices_own_baselines(predicted):
    is_real(predicted, 31)
    source = STEP.replace("gpu_memory", "gpu_memory(tolerance='10%')")
    assert predicted.run(AGAINST, source=source).verdicts() == {"test_step": "regressed"}


def test_less_than_predicted_is_a_note_or_a_failure(predicted):
    is_real(predicted, -100)
    session = predicted.run(AGAINST)
    assert session.ret == 0
    assert session.verdicts() == {"test_step": "improved"}
    session = predicted.run(AGAINST, "--gpumem-shrinkage=fail")
    assert session.ret == 1
    assert "peak allocated is 100.00 MiB (-10.0%) below that of virtual-T4" in session.flat


def test_the_virtual_gpu_is_held_to_a_real_one(suite):
    is_real(suite, 50)
    suite.run("--gpumem-update-baselines", source=STEP)
    assert list(suite.baselines()) == ["cuda-NVIDIA-T4/test_it.json"]
    (suite.path / "conftest.py").unlink()
    session = suite.run("--gpumem-against=cuda:NVIDIA T4", "--gpumem-card=T4")
    assert session.verdicts() == {"test_step": "improved"}
    assert "compared with those of cuda-NVIDIA-T4" in session.flat
    assert "driver 580.1" in session.flat


def test_what_has_no_such_baseline_says_where_to_record_one(predicted):
    session = predicted.run("--gpumem-against=virtual:L4", "--gpumem-card=T4",
                            "--gpumem-missing-baseline=fail")  # fmt: skip
    assert session.ret == 1
    assert "no baseline for virtual-L4, only for virtual-T4" in session.flat
    assert (
        "to record the baseline of virtual-L4, run on that device with --gpumem-update"
        in session.flat
    )
    assert "to record baselines: pytest" not in session.out


def test_it_is_never_written(predicted):
    before = predicted.baselines()
    session = predicted.run_warm(AGAINST, "--gpumem-update-baselines")
    assert session.ret == pytest.ExitCode.USAGE_ERROR
    assert "a comparison with another device's baselines records no baseline" in session.err
    assert predicted.baselines() == before


def test_reports_say_whose_baseline_it_was(predicted):
    is_real(predicted, 0)
    predicted.run(AGAINST, "--gpumem-json=a.json", "--gpumem-markdown=a.md")
    (one,) = read_report(predicted.path / "a.json").results
    markdown = (predicted.path / "a.md").read_text()
    assert "Baselines: 1 of 1 compared with those of virtual-T4." in markdown
    assert one.device_key == "cuda-NVIDIA-T4"
    assert one.verdict.uncompared == ""


# -- several devices --

MANY = """
@pytest.mark.gpu_memory(batch_size=4)
def test_sized(): mib(10)

@pytest.mark.gpu_memory
def test_old(): mib(10)

@pytest.mark.gpu_memory(baseline=False)
def test_free(): mib(10)
"""


def test_which_were_compared_which_not_and_why(suite):
    suite.run("--gpumem-card=L4", "--gpumem-update-baselines", "-k", "old", source=MANY)
    suite.run("--gpumem-card=T4", "--gpumem-update-baselines", "-k", "sized")
    source = MANY.replace("batch_size=4", "batch_size=8")
    source += "\n@pytest.mark.gpu_memory\ndef test_new(): mib(1)\n"
    session = suite.run("--gpumem-card=T4", "--gpumem-html=a.html", source=source)
    line = (
        "gpumem: baselines: 0 of 4 compared, 1 not compared: its batch size changed from 4 "
        "to 8, 1 recorded on virtual-L4 only, 1 switched off (baseline=False), 1 missing"
    )
    assert line in session.flat
    assert "1 recorded on virtual-L4 only" in (suite.path / "a.html").read_text()


def test_where_all_is_plain_nothing_is_said_of_it(suite):
    for arguments in (["--gpumem-update-baselines"], []):
        assert " compared" not in suite.run(*arguments, source=MANY).out


def test_each_device_of_a_session_has_its_line(suite):
    source = """
        @pytest.mark.gpu_memory(card="T4")
        def test_small(): mib(10)

        @pytest.mark.gpu_memory(card="L4")
        def test_large(): mib(10)
    """
    suite.run("--gpumem-update-baselines", source=source)
    session = suite.run()
    for card in ("T4", "L4"):
        assert f"gpumem: baselines on virtual-{card}: 1 of 1 compared\n" in session.out
    suite.path.joinpath("baselines/virtual-L4/test_it.json").write_text("{")
    session = suite.run()
    assert "baselines on virtual-L4: 0 of 1 compared, 1 unreadable" in session.flat
