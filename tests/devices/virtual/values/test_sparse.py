"""Sparse and nested tensors: the sizes and indices of the CPU's, where the indices are known."""

from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.virtual_gpu import settle_all, virtual_card
from torch import nn

from pytest_gpumem.devices.virtual.decisions import Decisions
from pytest_gpumem.devices.virtual.values.host_tensors import (
    is_sparse,
    over_device_memory,
    parts_of,
)
from pytest_gpumem.devices.virtual.values.mode import ValueMode

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

ROWS, COLUMNS, COUNT = 40, 30, 25
WIDE = 3000
"""numbers of each of COUNT rows: too many for "auto" to compute them"""


def filled(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def coo(*dense, seed=1):
    generator = torch.Generator().manual_seed(seed)
    places = [torch.randint(size, (COUNT,), generator=generator) for size in (ROWS, COLUMNS)]
    values = filled(COUNT, *dense, seed=seed)
    return torch.sparse_coo_tensor(torch.stack(places), values, (ROWS, COLUMNS, *dense))


def mostly_zeros(*shape):
    values = filled(*shape)
    return values.where(values.abs() > 1.5, 0)


def compressed(layout, *shape):
    blocks = {"blocksize": (2, 3)} if layout in {torch.sparse_bsr, torch.sparse_bsc} else {}
    return mostly_zeros(*shape).to_sparse(layout=layout, **blocks)


@pytest.fixture(scope="module")
def device():
    with virtual_card() as device:
        yield device


@pytest.fixture(params=["auto", "full"])
def mode(request, device):
    decisions = Decisions()
    device.library.on_readback(decisions.seen)
    earlier = [torch.full((count,), 77).cuda() for count in (8, 64, 128, 512)]
    with ValueMode(device.library, request.param, decisions) as mode:
        earlier += [torch.full((count,), 77).cuda() for count in (8, 64, 128, 512)]
        del earlier  # its values lie where operators take memory for themselves
        yield mode
    device.library.on_readback(None)
    settle_all(1)


def form(tensor):
    return tensor.layout, tensor.shape, [part.shape for part in parts_of(tensor)]


def assert_like(tensor, host):
    """Assert that a sparse tensor has the sizes of the CPU's, and its indices where known."""
    assert form(tensor) == form(host)
    if is_sparse(tensor) and tensor.layout is torch.sparse_coo:
        tensor, host = tensor.coalesce(), host.coalesce()  # a GPU may have another order
    if is_sparse(tensor):
        for part, expected in list(zip(parts_of(tensor), parts_of(host), strict=True))[:-1]:
            assert part.tolist() == expected.tolist()


def through(call, *arguments):
    """The results of the CPU and of the virtual GPU."""
    host = call(*[argument.clone() for argument in arguments])
    return call(*[argument.cuda() for argument in arguments]), host


UNARY = {
    "coalesce": lambda a: a.coalesce(),
    "sum": lambda a: torch.sparse.sum(a, dim=0),
    "sum of columns": lambda a: torch.sparse.sum(a, dim=1),
    "index_select": lambda a: a.index_select(0, torch.arange(0, 20, device=a.device)),
    "select": lambda a: a[4],
    "narrow_copy": lambda a: a.narrow_copy(0, 3, 10),
    "transpose": lambda a: a.transpose(0, 1).coalesce(),
    "clone": lambda a: a.clone(),
    "half": lambda a: a.half(),
    "half of it": lambda a: a / 2,
    "isnan": lambda a: a.isnan(),
    "zeros_like": torch.zeros_like,
    "unsqueeze": lambda a: a.unsqueeze(0),
}
BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "add_": lambda a, b: a.add_(b),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]).coalesce(),
    "sum of a sum": lambda a, b: torch.sparse.sum(a + b, dim=1),
}
SOME = {"coalesce", "index_select", "transpose", "isnan", "add", "sum of a sum"}
"""of them, for values that are too many"""


@pytest.mark.parametrize("dense", [(), (5,), (WIDE,)])
def test_a_sparse_result_has_its_size_and_indices(mode, dense):
    for name, call in (UNARY | BINARY).items():
        if dense == (WIDE,) and name not in SOME:
            continue
        arguments = [coo(*dense)] if name in UNARY else [coo(*dense), coo(*dense, seed=2)]
        assert_like(*through(call, *arguments))
        assert mode.decisions.notes(Path()) == [], name


def test_coalesced_tensors_are_put_together_as_a_gpu_does(mode):
    a, b = coo(WIDE).coalesce().cuda(), coo(WIDE, seed=2).coalesce().cuda()
    assert (a + b)._nnz() == 2 * COUNT  # unlike on the CPU, which merges them
    assert a.add_(a)._nnz() == 2 * COUNT
    assert a.coalesce()._nnz() == COUNT
    assert (a.coalesce() * b)._nnz() == COUNT
    few = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1]]), torch.ones(3), (2,)).cuda()
    assert (few + few)._nnz() == 2  # more than elements: it is coalesced at once
    assert mode.decisions.notes(Path()) == []


LAYOUTS = [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_conversions_between_layouts_have_their_sizes(mode, layout):
    blocks = {"blocksize": (2, 3)} if layout in LAYOUTS[2:] else {}
    for argument in (mostly_zeros(ROWS, COLUMNS), coo(), coo().coalesce()):
        assert_like(*through(lambda a: a.to_sparse(layout=layout, **blocks), argument))
    assert_like(*through(lambda a: a.to_sparse(), compressed(layout, ROWS, COLUMNS)))
    assert_like(*through(lambda a: a.to_dense(), compressed(layout, ROWS, COLUMNS)))
    assert mode.decisions.notes(Path()) == []


def test_more_conversions_have_their_sizes(mode):
    for sparse_dim in (1, 2):
        assert_like(*through(lambda a, n=sparse_dim: a.to_sparse(n), mostly_zeros(ROWS, COLUMNS)))
    batch = torch.stack([mostly_zeros(ROWS, COLUMNS)] * 2)
    assert_like(*through(lambda a: a.to_sparse_csr(), batch))
    assert_like(*through(lambda a: a.to_sparse_csr(dense_dim=1), batch))
    csr, csc = (compressed(layout, ROWS, COLUMNS) for layout in LAYOUTS[:2])
    assert_like(*through(lambda a: a.to_sparse_csc(), csr))
    assert_like(*through(lambda a: a.to_sparse_csr(), csc))
    assert_like(*through(lambda a: a.to_sparse_bsr((2, 3)), csr))
    assert_like(*through(lambda a: a + a, csr))
    assert_like(*through(lambda a: a.sum((0,), keepdim=True), csr))
    assert_like(
        *through(lambda a, b: b.sparse_mask(a), coo().coalesce(), mostly_zeros(ROWS, COLUMNS))
    )
    assert_like(*through(lambda a, b: b.sparse_mask(a), csr, mostly_zeros(ROWS, COLUMNS)))
    assert mode.decisions.notes(Path()) == []


@pytest.mark.parametrize("layout", [torch.sparse_coo, *LAYOUTS[:2]], ids=str)
def test_products_have_their_nonzeros(mode, layout):
    def sparse(*shape):
        return mostly_zeros(*shape).to_sparse(layout=layout)

    assert_like(*through(torch.mm, sparse(ROWS, COLUMNS), sparse(COLUMNS, ROWS)))
    assert_like(*through(torch.mm, sparse(ROWS, COLUMNS), filled(COLUMNS, 8)))
    assert mode.decisions.notes(Path()) == []


def gradient(layer, rounds, optimizer, device):
    with torch.no_grad():
        layer.weight.copy_(filled(*layer.weight.shape))
    layer.to(device)
    steps = optimizer(layer.parameters(), lr=0.1)
    for _ in range(rounds):
        layer(torch.tensor([[1, 2, 2], [3, 1, 0]], device=device)).sum().backward()
    steps.step()
    return layer.weight.grad


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam]
)
@pytest.mark.parametrize(
    ("layer", "rounds"), [(nn.Embedding, 3), (partial(nn.EmbeddingBag, mode="sum"), 1)]
)
def test_sparse_gradients_are_accumulated(mode, optimizer, layer, rounds):
    results = [
        gradient(layer(20, WIDE, sparse=True), rounds, optimizer, device)
        for device in ("cuda", "cpu")
    ]
    assert_like(*results)
    assert mode.decisions.notes(Path()) == []


def test_nested_tensors_of_a_mask_have_their_sizes(mode):
    mask = torch.arange(5) < torch.tensor([[3], [5]])
    nested, host = through(torch._nested_tensor_from_mask, filled(2, 5, 4), mask)
    assert [part.shape for part in nested.unbind()] == [part.shape for part in host.unbind()]
    assert mode.values.is_known(nested.values())
    assert nested.values().tolist() == host.values().tolist()
    assert mode.decisions.notes(Path()) == []


def test_values_that_are_computed_are_the_cpus(mode):
    a, b = coo(5), coo(5, seed=2)
    for call in (
        lambda a, b: (a + b).to_dense(),
        lambda a, b: a.coalesce().values() * 2,
        lambda a, b: torch.sparse.sum(a, dim=0).to_dense(),
        lambda a, b: a.to_dense() @ b.to_dense()[0].T,
    ):
        result, host = through(call, a, b)
        torch.testing.assert_close(result.cpu(), host)
    assert mode.host.unknown.failures == {}


def test_unknown_indices_are_spread_and_a_note_says_so(device):
    decisions = Decisions()
    with ValueMode(device.library, "auto", decisions) as mode:
        sparse = coo(3).cuda()
        mode.values.forget(sparse._indices())
        assert sparse.coalesce()._nnz() == COUNT
        indices = over_device_memory(sparse._indices())
        assert indices.unique(dim=1).shape[1] == COUNT
    assert "1 value was assumed" in decisions.notes(Path())[0]
