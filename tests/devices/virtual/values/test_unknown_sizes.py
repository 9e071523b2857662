"""Sizes that depend on unknown values are the most that they can be: zero would hold all limits."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers.marked_sessions import one_test
from helpers.virtual_gpu import virtual_card

from pytest_gpumem.devices.virtual.values.data_dependent import INDEXING
from pytest_gpumem.devices.virtual.values.operator_table import BOUNDED, COPIES, TORCH

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

SIDE = 2100
ALL = SIDE * SIDE
"""numbers of a tensor that is too large to be assumed"""


def unknown():
    """Return numbers that the virtual GPU does not compute."""
    factor = torch.randn(SIDE, SIDE, device="cuda")
    return factor @ factor


def mask():
    return unknown() > 0


def whole(limit=100):
    return (unknown() * limit).long()


def indexed():
    return unknown()[mask()]


def repeated():
    return torch.repeat_interleave(whole().reshape(-1))


def boxes():
    return unknown()[:, :4].repeat(100, 1), unknown()[0].repeat(100)


class Size(NamedTuple):
    operator: str
    count: Callable[[], int]
    most: int


def consecutive_rows():
    return unknown().unique_consecutive(dim=0).shape[0]


def nms():
    torchvision = pytest.importorskip("torchvision")
    return torchvision.ops.nms(*boxes(), 0.5).numel()


def coo():
    indices = whole().reshape(-1)[: 2 * SIDE * 50].reshape(2, -1).abs()
    return torch.sparse_coo_tensor(
        indices.repeat(1, 10), torch.ones(SIDE * 500, device="cuda"), (SIDE, SIDE)
    )


SIZES = [
    Size("aten::nonzero", lambda: unknown().nonzero().shape[0], ALL),
    Size("aten::nonzero", lambda: mask().nonzero().shape[0], ALL),
    Size("aten::masked_select", lambda: unknown().masked_select(mask()).numel(), ALL),
    Size("aten::index", lambda: indexed().numel(), ALL),
    Size("aten::_unique2", lambda: unknown().unique().numel(), ALL),
    Size("aten::unique_dim", lambda: unknown().unique(dim=1).shape[1], SIDE),
    Size("aten::unique_consecutive", lambda: unknown().unique_consecutive().numel(), ALL),
    Size("aten::unique_consecutive", consecutive_rows, SIDE),
    Size("aten::_coalesce", lambda: coo().coalesce()._nnz(), SIDE * 500),
    Size("aten::repeat_interleave", lambda: repeated().numel(), ALL),
    Size("torchvision::nms", nms, 100 * SIDE),
]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.operator.partition("::")[2])
def test_an_unknown_size_is_the_most_that_it_can_be(size):
    with virtual_card() as device:
        device.values.compute("auto")
        assert size.count() == size.most
        assert any("assumed" in note.text for note in device.notes(Path.cwd()))
        assert device.trouble() is None


def test_the_share_of_masks_that_a_test_declares_holds_for_large_ones_too():
    with virtual_card() as device:
        device.values.compute("auto")
        device.values.assume_masks(0.25)
        assert unknown()[mask()].numel() == mask().nonzero().shape[0] == ALL // 4
        assert unknown().nonzero().shape[0] == ALL  # not of a mask


SIZED_BY_VALUES = {name for name in COPIES if "linalg" not in name} - {
    *("aten::equal", "aten::allclose", "aten::histc", "aten::segment_reduce", "aten::_ctc_loss"),
    "aten::bincount",  # as long as the largest number: there is no bound
}


def test_each_operator_that_is_sized_by_values_has_a_bound():
    masked = {"aten::masked_select", "aten::masked_scatter_backward", *INDEXING}
    assert BOUNDED - {"aten::linalg_matrix_exp"} == SIZED_BY_VALUES - masked


def test_a_limit_is_held_to_the_bound_of_a_sparse_product(suite):
    # The product of two sparse matrices may be full: 400 MB and more for 10,000 x 10,000.
    head = """
def sparse(unknown):
    places = (unknown.reshape(-1)[: 2 * 100_000].reshape(2, -1).abs() * 100).long()
    values = torch.ones(100_000, device="cuda")
    return torch.sparse_coo_tensor(places, values, (10_000, 10_000))
"""
    body = [
        "factor = torch.randn(2048, 2048, device='cuda')",
        "torch.sparse.mm(sparse(factor @ factor), sparse(factor @ factor))",
    ]
    session = one_test(suite, *body, head=head, mark="max_gib=0.25, baseline=False")
    assert session.outcomes == {"failed": 1}
    assert session.verdicts() == {"test_it": "out of memory"}


UNKNOWN = [
    "unknown = torch.randn(4096, 2048, device='cuda')",  # 32 MiB, more than is computed
    "places = unknown.nonzero()",  # 128 MiB, or nothing
]


def bound_of(suite, mark, *more, args=()):
    return one_test(suite, *UNKNOWN, *more, mark=f"{mark}, baseline=False", args=args)


def test_a_failure_by_a_bound_says_so_first_and_has_both_ends(suite):
    session = bound_of(suite, "max_allocated_gib=0.1")
    assert session.outcomes == {"failed": 1}
    assert "over budget: by a bound; peak allocated of 160.0" in session.flat
    sentence = (
        "note: how much test_it.py:9 takes depends on unknown values, so the figures "
        "are an upper bound: all is taken (allocated 32.0"
    )
    assert sentence in session.flat
    assert " MiB to 160.0" in session.flat
    assert " MiB other test_it.py:9 in test_it: places = unknown.nonzero()" in session.flat


def test_a_test_that_runs_out_of_memory_by_a_bound_says_so_first(suite):
    session = bound_of(suite, "max_gib=0.06")
    assert session.verdicts() == {"test_it": "out of memory"}
    assert "out of memory: by a bound; the step does not fit in max_gib=0.06" in session.flat
    assert "all is taken (allocated 32.0" in session.flat


def test_a_test_that_cannot_run_with_the_least_sizes_fails_by_a_bound_all_the_same(suite):
    session = bound_of(suite, "max_allocated_gib=0.1", "places[0]")
    assert session.outcomes == {"failed": 1}
    assert "over budget: by a bound; peak allocated" in session.flat
    assert "are an upper bound: all is taken" in session.flat
    assert "all is taken (" not in session.flat


@pytest.mark.parametrize(
    ("mark", "verdict"),
    [
        ("max_allocated_gib=0.025", "over budget: peak allocated of 160.0"),
        ("max_gib=0.025", "out of memory: the step does not fit in max_gib=0.025"),
    ],
)
def test_a_failure_with_the_least_sizes_too_is_by_no_bound(suite, mark, verdict):
    session = bound_of(suite, mark)
    assert session.outcomes == {"failed": 1}
    assert verdict in session.flat, session.out
    assert "by a bound" not in session.flat
    assert ", from none to all): the test needs too much in either case" in session.flat


@pytest.mark.parametrize(("limit", "by_bound"), [("+ 64MiB", True), ("- 16MiB", False)])
def test_held_memory_may_be_over_its_limit_by_a_bound_as_well(suite, limit, by_bound):
    session = one_test(
        suite,
        UNKNOWN[0],
        f"with gpu_memory.measure('part', figure='held', at_most='before {limit}'):",
        f"    {UNKNOWN[1]}",
        mark="baseline=False",
        fixtures="gpu_memory",
    )
    assert session.verdicts()["test_it (part)"] == "over budget", session.out
    assert ("over budget: by a bound; held memory of" in session.flat) is by_bound, session.out
    assert ("too much in either case" in session.flat) is not by_bound


def test_a_limit_that_a_bound_keeps_is_kept(suite):
    session = bound_of(suite, "max_allocated_gib=0.2", args=["-v"])
    assert session.outcomes == {"passed": 1}
    assert "are a bound" not in session.flat


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.operator.partition("::")[2])
def test_the_least_size_is_nothing_or_one(size):
    if size.count is nms and TORCH < (2, 7):
        pytest.skip("torchvision before 0.22 selects on the host")
    with virtual_card() as device:
        device.values.compute("auto")
        with device.values.least_sizes():
            assert size.count() <= 1
        assert size.count() == size.most
        assert device.trouble() is None
