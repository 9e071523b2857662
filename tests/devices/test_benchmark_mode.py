"""cuDNN's benchmark mode: the figures of a test are the same after others, or fail no test."""

import os
from pathlib import Path

import pytest
from helpers import left_out

from pytest_gpumem.devices.benchmark_mode import TIMED
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.testrun.timed_plans import TIMED_BEFORE

ON = {
    "switched": "torch.backends.cudnn.benchmark = True",
    "by flags": "stack.enter_context(torch.backends.cudnn.flags(enabled=True, benchmark=True))",
}


@pytest.mark.parametrize("way", ON)
def test_a_test_on_the_virtual_gpu_has_the_same_figures_after_another(suite, monkeypatch, way):
    left_out.need_cudnn()
    monkeypatch.delenv("TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT", raising=False)
    convolution = f"""
    with ExitStack() as stack:
        {ON[way]}
        x = torch.zeros(16, 32, 26, 26, device="cuda")
        torch.nn.functional.conv2d(x, torch.zeros(64, 32, 3, 3, device="cuda"))
"""
    session = suite.run_warm(
        "--gpumem-json=r.json",
        source="\n".join(
            ["from contextlib import ExitStack"]
            + [
                f"@pytest.mark.gpu_memory(card='RTX A6000')\ndef test_{name}():{convolution}"
                for name in ("one", "other")
            ]
        ),
    )
    assert session.outcomes == {"passed": 2}
    one, other = (result.measurement for result in read_report(suite.path / "r.json").results)
    assert one.peaks == other.peaks
    assert one.range == other.range
    assert one.range.judged


TIMES_PLANS = """
import os, pytest, torch

torch.backends.cudnn.benchmark = {on}
TIMED = set()

def step(mib):
    # As a convolution does: more while its plans are timed.
    if torch.backends.cudnn.benchmark and mib not in TIMED:
        TIMED.add(mib)
        torch.empty(8 * mib << 20, dtype=torch.uint8, device="cuda")
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

@pytest.mark.gpu_memory(baseline=False)
def test_before():
    step(64)

@pytest.mark.gpu_memory({mark})
def test_it(gpu_memory):
    with gpu_memory.measure("part"):
        step(int(os.environ["MIB"]))
"""
FIRST, LATER = "test_it.py", "test_it.py::test_it"


@pytest.mark.parametrize(
    ("on", "mark", "recorded", "compared"),
    [
        (True, "", ["64", FIRST], ["64", LATER]),  # the first to time plans
        (True, "", ["64", LATER], ["64", FIRST]),
        (True, "", ["64", FIRST], ["72", FIRST]),  # a growth by itself
        (True, "warmup=1", ["64", FIRST], ["64", LATER]),
        (False, "", ["64", FIRST], ["72", FIRST]),
    ],
)
def test_a_growth_on_a_real_gpu_is_measured_with_plans_that_were_timed(  # noqa: PLR0913, PLR0917
    suite, monkeypatch, on, mark, recorded, compared
):
    """The virtual GPU stands in for a real one, as in tests/gpu; steps stand in for cuDNN."""
    gpu = Path(__file__).parents[1] / "gpu"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(gpu), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("GPUMEM_FAKE_GPU", "H100")
    source = TIMES_PLANS.format(on=on, mark=mark)
    for (mib, target), options in ((recorded, ["--gpumem-update-baselines"]), (compared, [])):
        monkeypatch.setenv("MIB", mib)
        arguments = ("-p", "fake_gpu", "--gpumem-device=cuda", "-v", *options, target)
        session = suite.run_apart(*arguments, source=source)
    grew = "+8.00 MiB (+12.5%): other +8.00 MiB at" in session.flat
    assert session.outcomes.get("failed", 0) == grew == (mib == "72")
    assert (TIMED.text in session.flat) == (on and not mark)
    measured_again = on and not mark and (target, mib) != (FIRST, "64")
    assert (TIMED_BEFORE.text in session.flat) == measured_again
