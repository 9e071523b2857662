"""Tests that decide by values on the virtual GPU: run once more, with values."""

from __future__ import annotations

import sys

import pytest

DECIDES = """
RUNS = []

@pytest.mark.gpu_memory
def test_mask():
    mask = torch.ones(4, 2048, dtype=torch.long, device="cuda")
    RUNS.append(mask)
    if not mask.bool().all():
        mib(300)
    del RUNS[0]
    mib(20)

@pytest.mark.gpu_memory
def test_assertion():
    x = torch.arange(4, device="cuda")
    assert x.sum() == 6
    assert torch.isfinite(torch.randn(4, device="cuda")).all()

@pytest.mark.gpu_memory
def test_wrong_assertion():
    x = torch.arange(4, device="cuda")
    assert x.sum().item() == 7

@pytest.mark.gpu_memory
def test_logged():
    x = torch.randn(1000, 1000, device="cuda")
    print("loss", x.mean().item())
    losses, total = [], 0.0
    losses.append(x.mean().item())
    total += x.mean().item()

@pytest.mark.gpu_memory
def test_assumed():
    x = torch.randn(1000, 1000, device="cuda")
    if x.mean() > 2:
        mib(300)
"""


def test_a_test_that_decides_by_a_value_runs_again_with_values(suite):
    session = suite.run(source=DECIDES)
    assert session.outcomes == {"passed": 4, "failed": 1}
    assert session.figures()["test_mask"] == (20.06, 22)
    assert "test_wrong_assertion - AssertionError: assert 6 == 7" in session.flat
    notes = [line for line in session.out.splitlines() if "value" in line and "note" in line]
    assert len(notes) == 1, session.out
    assert "1 value was assumed (test_it.py:39)" in notes[0]


@pytest.mark.parametrize("options", [("--gpumem-values=off",), ("-o", "gpumem_values=off")])
def test_without_values_they_are_zeros_and_a_note_is_made(suite, options):
    session = suite.run(*options, source=DECIDES)
    assert session.outcomes == {"passed": 3, "failed": 2}
    assert session.figures()["test_mask"][0] > 300
    assert "1 value was read back from the virtual GPU (test_it.py:12)" in session.flat


def test_a_marker_says_which_values_a_test_has(suite):
    source = DECIDES.replace("gpu_memory\ndef test_mask", "gpu_memory(values='off')\ndef test_mask")
    assert suite.run(source=source).figures()["test_mask"][0] > 300


ASSUMES = """
@pytest.mark.gpu_memory
def test_loss():
    assert torch.randn(1000, 1000, device="cuda").mean() > 2

@pytest.mark.gpu_memory
def test_wrong():
    assert torch.arange(4, device="cuda").sum() == 7

@pytest.mark.gpu_memory(values="full")
def test_full(gpu_memory):
    x = torch.full((1000, 1000), 3.0, device="cuda")
    assert gpu_memory.computes
    assert x.mean() > 2

@pytest.mark.gpu_memory
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_masks(gpu_memory, share):
    gpu_memory.assume(masks=share)
    scores = torch.randn(1000, 1000, device="cuda").mean(0)
    assert gpu_memory.computes is False
    chosen = torch.nonzero(scores > 0)
    rows = torch.nonzero(torch.randn(500, 500, device="cuda") > 0)
    assert len(rows) == 250_000 * share
    mib(max(1, len(chosen) // 10))

@pytest.mark.gpu_memory
def test_no_share(gpu_memory):
    with pytest.raises(ValueError, match="masks=2.* not a share"):
        gpu_memory.assume(masks=2)
"""


def test_a_failure_by_values_that_are_not_computed_says_so_and_masks_are_as_assumed(suite):
    session = suite.run(source=ASSUMES)
    assert session.outcomes == {"passed": 4, "failed": 2}
    if sys.version_info >= (3, 11):
        assert session.flat.count("values are not computed here") == 1
        assert 'use values="full"; the peak until it failed was 3.82 MiB alloc' in session.flat
    figures = session.figures()
    assert figures["test_masks[1.0]"][0] - figures["test_masks[0.0]"][0] == pytest.approx(
        99, abs=20
    )
