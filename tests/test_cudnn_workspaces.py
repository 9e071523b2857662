"""What a report says of cuDNN's workspaces, against those measured on real GPUs."""

import ast
import csv
from pathlib import Path

import pytest
from virtual_gpu import opened

from pytest_gpumem.devices.virtual import PLAN
from pytest_gpumem.sizes import format_size

DATA = Path(__file__).parents[1] / "benchmarks/data/measured-workspaces.csv"
"""exact bytes of what an operator took besides its output, by GPU, torch and cuDNN"""

with DATA.open(encoding="utf-8") as lines:
    MEASURED = [row for row in csv.DictReader(lines) if row["operator"] == "aten::convolution"]


def ran(torch, device, images, weights, dtype):
    """Run a convolution as the rows' operator; return the bytes of its plan's tensors."""
    x = torch.zeros(images, dtype=dtype, device="cuda")
    w = torch.zeros(weights, dtype=dtype, device="cuda")
    device.library.largest_convolution()
    y = torch.nn.functional.conv2d(x, w, padding=1)
    assert device.library.largest_convolution() == x.nbytes + w.nbytes + y.nbytes
    assert device.library.largest_convolution() == 0  # asking forgets it
    return x.nbytes, w.nbytes, y.nbytes


@pytest.mark.parametrize("row", MEASURED, ids=[row["id"] for row in MEASURED])
def test_measured_workspaces_are_copies_of_the_tensors(row):
    with opened("H100") as device:
        import torch

        dtype = getattr(torch, ast.literal_eval(row["dtypes"])[0].removeprefix("torch."))
        x, w, y = ran(torch, device, *ast.literal_eval(row["shapes"]), dtype)
    assert int(row["bytes"]) in {x + w + PLAN, x + w + y + PLAN}


def test_the_report_says_how_much_they_may_be(suite):
    source = """
        @pytest.mark.gpu_memory
        def test_conv():
            x = torch.zeros(2, 64, 128, 128, device="cuda")
            torch.nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda")(x).sum().backward()

        @pytest.mark.gpu_memory
        def test_small():
            torch.nn.Conv2d(4, 4, 3, device="cuda")(torch.zeros(1, 4, 8, 8, device="cuda"))
    """
    session = suite.run("-v", source=source)
    size = 2 * (2 * 64 * 128 * 128 * 4) + 64 * 64 * 9 * 4 + PLAN
    assert (
        f"copies of a convolution's tensors, here {format_size(size)} or less (1 test)"
        in session.flat
    )
    small = 4 * (4 * 8 * 8 + 4 * 4 * 9 + 4 * 6 * 6) + PLAN
    assert f"here {format_size(small)} or less (1 test)" in session.flat


def test_attention_is_not_taken_for_a_convolution(suite):
    source = """
        from torch.nn.attention import SDPBackend, sdpa_kernel

        @pytest.mark.gpu_memory(card="H100")
        def test_attention():
            q = torch.zeros(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                torch.nn.functional.scaled_dot_product_attention(q, q, q)
    """
    session = suite.run("-v", source=source)
    assert session.outcomes.pop("warnings", 0) < 3
    assert session.outcomes == {"passed": 1}
    assert "note: the workspaces of cuDNN's attention are not in a prediction" in session.flat
    assert "convolution's" not in session.flat
