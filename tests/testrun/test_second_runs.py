"""A failed test that is run again: nothing of its first run counts for the next."""

from __future__ import annotations

import pytest

HOOKED = """
from torch import nn

class Layer(nn.Module):
    def forward(self, x):
        first = mib(x.numel() * 64)
        return first, mib(x.numel() * 64)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()
        for module in self.modules():
            module.register_forward_hook(lambda module, args, out: None)

    def forward(self, x):
        held = mib(x.numel() * 64)
        return held, self.layer(x)

@pytest.mark.gpu_memory(max_gib=0.5, batch_size=4, variants={"half": {"rows": 2}})
def test_it(gpu_memory):
    rows = gpu_memory.variant.get("rows", gpu_memory.batch_size)
    Net()(torch.zeros(rows, device="cuda"))
"""
"""needs 192 MiB a row and cannot have 768"""


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--gpumem-attribution=on",),
        ("--gpumem-html=page.html",),
        ("--gpumem-update-baselines",),
    ],
    ids=["plain", "attribution", "html", "baselines"],
)
def test_what_a_model_with_hooks_held_as_memory_ran_out_counts_for_no_other_run(suite, options):
    session = suite.run("-vv", *options, source=HOOKED)
    assert session.verdicts() == {"test_it": "out of memory"}
    assert "it needs 770.00 MiB" in session.flat
    assert "hint: batch size 2 fits, with 386.00 MiB of 512.00 MiB reserved" in session.flat
    assert "hint: variant 'half' fits: 386.00 MiB of 512.00 MiB reserved" in session.flat


KEEPING = """
KEPT = []

@pytest.mark.gpu_memory(max_gib=0.5, batch_size=4, variants={"small": {"n": 400}})
def test_it(gpu_memory):
    KEPT.append(mib(64))
    x = mib(gpu_memory.variant.get("n", 480))
"""
"""keeps 64 MiB more with each run: 544 MiB, then 608, and the variant 592 for 464"""


def test_what_a_first_run_left_is_told_where_it_counts_for_the_next(suite):
    session = suite.run("-vv", source=KEEPING)
    assert session.verdicts() == {"test_it": "out of memory"}
    assert "it needs 608.00 MiB" not in session.flat
    assert (
        "note: 64.00 MiB that the first run left behind would also count in a second run: "
        "so the memory that the test needs is unknown" in session.flat
    )
    assert (
        "variant 'small' does not fit beside 128.00 MiB that earlier runs left behind"
        in session.flat
    )
    assert "not even" not in session.flat


def test_what_runs_with_other_batch_sizes_left_is_told(suite):
    session = suite.run(
        "-vv",
        source="""
KEPT = []

@pytest.mark.gpu_memory(batch_sizes=[1, 2, 4])
def test_it(gpu_memory):
    KEPT.append(mib(10))
    x = mib(100 * gpu_memory.batch_size)
""",
    )
    assert (
        "20.00 MiB that runs with other batch sizes left behind are counted in the figures"
        in session.flat
    )


def test_where_nothing_is_left_nothing_is_said(suite):
    session = suite.run(
        "-vv",
        source="""
@pytest.mark.gpu_memory(batch_sizes=[1, 2, 4])
def test_sizes(gpu_memory):
    x = mib(100 * gpu_memory.batch_size)

@pytest.mark.gpu_memory(max_gib=0.5)
def test_short():
    x = mib(600)
""",
    )
    assert "left behind" not in session.flat
