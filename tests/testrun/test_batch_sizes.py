"""A test with several batch sizes: its slope is measured, limited, and kept in its baseline."""

from __future__ import annotations

import json

from helpers.sources import SIZED

STEP = SIZED.format(fixed=40, per_sample=3)
MARKED = """
@pytest.mark.gpu_memory(batch_sizes=[16, 4, 8]{more})
def test_it(gpu_memory):
    step(gpu_memory.batch_size{changes})

def test_log():
    print("log", log)
"""


def source(more="", changes=""):
    return STEP + MARKED.format(more=more, changes=changes)


def baseline(suite):
    path = suite.path / "baselines/virtual-H100/test_it.json"
    return json.loads(path.read_text())["tests"]["test_it"]


def test_it_runs_with_each_and_its_figures_are_those_of_the_largest(suite):
    session = suite.run("-s", source=source())
    assert session.outcomes == {"passed": 2}
    assert "log [16, 4, 8]" in session.out
    assert session.figures() == {"test_it": (88, 88)}


def test_its_slope_is_part_of_its_baseline(suite):
    suite.run("--gpumem-update-baselines", source=source())
    kept = baseline(suite)
    assert kept["batch_size"] == 16
    assert kept["slope"] == {
        "fixed": 40 << 20,
        "per_sample": 3 << 20,
        "sizes": [4, 8, 16],
    }
    session = suite.run(source=source())
    assert session.verdicts() == {"test_it": "ok"}


def test_a_regression_of_the_slope_is_found_where_the_peak_hides_it(suite):
    """An optimizer's step that takes more than the passes, as at small batches."""
    training = """
torch.optim.SGD([torch.zeros(1)])  # PyTorch calls hooks around SGD's own step from now on

class Big(torch.optim.SGD):
    def step(self):
        mib(500)
        super().step()

@pytest.mark.gpu_memory(batch_sizes=[4, 8])
def test_it(gpu_memory):
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    batch = mib({per_sample} * gpu_memory.batch_size)
    weight.sum().backward()
    del batch
    Big([weight], lr=1).step()
"""
    suite.run("--gpumem-update-baselines", source=STEP + training.format(per_sample=3))
    session = suite.run(source=STEP + training.format(per_sample=4))
    assert session.verdicts() == {"test_it": "regressed"}
    assert "regressed: memory per sample grew by 1.00 MiB (+33.3%): 3.00 -> 4.00 MiB, " in (
        session.flat
    )
    assert session.table["test_it"]["change"] == "+1.00 a sample (+33.3%)"


def test_limits_of_the_slope(suite):
    session = suite.run(source=source(", max_mib_per_sample=2.5, max_fixed_gib=1"))
    assert session.verdicts() == {"test_it": "over budget"}
    assert (
        "over budget: memory per sample of 3.00 MiB is 512.00 KiB over max_mib_per_sample=2.5 "
        "(2.50 MiB)"
    ) in session.flat
    assert "declare max_mib_per_sample=3" in session.flat
    assert "max_mib_per_sample=2.5, max_fixed_gib=1" in session.flat

    session = suite.run(source=source(", max_mib_per_sample=3, max_fixed_gib=0.03125"))
    assert "fixed memory of 40.00 MiB is 8.00 MiB over max_fixed_gib=0.03125" in session.flat
    session = suite.run(source=source(", max_mib_per_sample=3, max_fixed_gib=0.0390625"))
    assert session.outcomes == {"passed": 2}


def test_other_sizes_than_the_baselines_are_not_compared(suite):
    suite.run("--gpumem-update-baselines", source=source())
    other = source().replace("[16, 4, 8]", "[16, 8]")
    session = suite.run(source=other)
    assert session.verdicts() == {"test_it": "incomparable"}
    assert "batch sizes changed from 4, 8, 16 to 8, 16" in session.flat


def test_what_is_no_line_is_said_with_its_source_lines(suite):
    session = suite.run(source=source(changes=" ** 2"))
    assert session.outcomes == {"passed": 2}
    assert "off the line through batch sizes 4, 8, 16: test_it.py:" in session.flat
    assert "88.00 MiB at 4, 232.00 MiB at 8, 808.00 MiB at 16" in session.flat


def test_a_size_that_fails_is_an_error_that_names_it(suite):
    session = suite.run(source=source(changes=" if gpu_memory.batch_size != 8 else 1 / 0"))
    assert session.outcomes == {"passed": 1, "failed": 1}
    assert (
        "@pytest.mark.gpu_memory(batch_sizes=[4, 8, 16]): the test failed with batch size 8: "
        "ZeroDivisionError: division by zero; make the test pass with every size"
    ) in session.flat


def test_the_largest_that_does_not_fit_is_out_of_memory(suite):
    session = suite.run(source=source(", max_gib=0.0625"))
    assert session.verdicts() == {"test_it": "out of memory"}


def test_fixtures_are_made_anew_for_each_size(suite):
    session = suite.run(
        "-s",
        source=STEP
        + """
@pytest.fixture
def batch(gpu_memory):
    log.append(f"+{gpu_memory.batch_size}")
    yield mib(3 * gpu_memory.batch_size)
    log.append(f"-{gpu_memory.batch_size}")

@pytest.mark.gpu_memory(batch_sizes=[4, 8], max_mib_per_sample=3)
def test_it(batch, tmp_path):
    (tmp_path / "x").mkdir()

def test_log():
    print("log", log)
""",
    )
    assert session.outcomes == {"passed": 2}
    assert "log ['+8', '-8', '+4', '-4']" in session.out


def test_workers_bring_the_slope_as_well(suite):
    suite.run_warm("--gpumem-update-baselines", "-n1", source=source())
    assert baseline(suite)["slope"]["per_sample"] == 3 << 20
