"""Operators that ask the device for figures: the CPU's sizes and types, and true memory."""

import re

import pytest
import torch
from helpers.paths import ROOT
from helpers.torch_features import require, require_release
from helpers.virtual_gpu import virtual_card
from torchvision import ops

from pytest_gpumem.devices.virtual.values.mode import ValueMode
from pytest_gpumem.devices.virtual.values.operator_table import COPIES, EQUIVALENTS

aten = torch.ops.aten
BLOCK = 512
"""bytes: the unit of PyTorch's allocator"""

N = torch.tensor([3, 1, 1, 2, 2, 2, 5, 0])
F = N.float()
PAIRS = torch.stack([N, N], 1)
MASK = N > 1
NONE = torch.zeros(0, dtype=torch.int64)
SQUARE = torch.rand(3, 3, generator=torch.Generator().manual_seed(0))
BATCH = torch.stack([SQUARE, SQUARE.T])
MATRICES = SQUARE * torch.tensor([1e-3, 40, 1, 3, 40, 9]).view(-1, 1, 1)
MANY = torch.arange(2049) % 45  # one kernel finds the mode of fewer
YES = [True] * 3
NO_COUNTS = [True, True, False]
LENGTHS = torch.tensor([3, 4, 1])

CALLS = {
    aten.nonzero.default: [(N,), (F,), (MASK,), (PAIRS,), (NONE,), (MASK.new_zeros(()),)],
    aten.masked_select.default: [
        (N, MASK),
        (PAIRS, MASK[:, None]),
        (N[:1], MASK),
        (NONE, NONE > 0),
    ],
    aten.index.Tensor: [
        (N, [MASK]),
        (PAIRS, [MASK]),
        (PAIRS.T, [None, MASK]),
        (PAIRS, [PAIRS > 1]),
        (PAIRS, [MASK, torch.tensor([True, False])]),
        (PAIRS, [torch.tensor([0, 2])]),
        (PAIRS, [MASK, torch.tensor(1)]),
    ],
    aten.index_put.default: [
        (N, [MASK], torch.tensor(7)),
        (N, [MASK], torch.arange(5)),
        (PAIRS, [MASK], torch.tensor([7, 8]), True),
        (N, [torch.tensor([1, 2])], torch.tensor([7, 8])),
    ],
    aten._unique.default: [(N,), (N, True, True), (F,)],
    aten._unique2.default: [
        (N,),
        (N, False),
        (N, *YES),
        (N, *NO_COUNTS),
        (F, *YES),
        (N.to(torch.uint8), *YES),
        (F.bfloat16(), *YES),
        (MASK,),
        (MASK, *YES),
        (MASK | True, *YES),
        (MASK & False, *YES),
        (NONE, *YES),
        (PAIRS, *YES),
    ],
    aten.unique_dim.default: [
        (PAIRS, 0, *flags) for flags in ([], YES, NO_COUNTS, [True, False, True])
    ]
    + [(PAIRS, 1, *YES)],
    aten.unique_dim_consecutive.default: [(PAIRS, 0), (PAIRS, 0, True, True)],
    aten.unique_consecutive.default: [(N,), (N, True, True), (MASK,), (PAIRS, True, True, 0)],
    aten.bincount.default: [
        (N,),
        (N.int(), None, 10),
        (N.to(torch.uint8),),
        (N, F),
        (N, F.double(), 3),
        (NONE, None, 4),
    ],
    aten.histc.default: [(F, 4), (F, 4, 1, 3), (N, 4), (N, 3, 1, 4), (F[:0], 4), (F[:1], 4)],
    aten.repeat_interleave.Tensor: [(N,), (N.int(),), (NONE,)],
    aten.mode.default: [
        (N,),
        (MANY,),
        (MANY.to(torch.int8),),
        (MANY.bfloat16(), 0, True),
        (MANY > 1,),
        (torch.stack([MANY, MANY.flip(0)], 1), 0),
        (torch.stack([MANY, MANY.flip(0)], 1).double(), 1),
    ],
    aten.isin.Tensor_Tensor: [
        (F, torch.arange(40.0)),
        (N, torch.arange(3, 50)),
        (N, N[:2]),
    ],
    aten.masked_scatter_backward.default: [
        (F, MASK, [8]),
        (F.expand(2, 8).contiguous(), MASK, [16]),
    ],
    aten.equal.default: [(N, N.clone()), (N, N + 1), (N, N[1:]), (NONE, NONE.clone()), (N, N)],
    aten.allclose.default: [(F, F.clone()), (F, F + 1), (F, F + 1, 10.0)],
    aten._linalg_eigh.default: [(SQUARE @ SQUARE.T,), (BATCH,), (BATCH[:0],)],
    aten._linalg_svd.default: [(SQUARE,), (BATCH, True), (SQUARE[:2],), (SQUARE[:0],)],
    aten.linalg_lstsq.default: [(SQUARE, SQUARE), (BATCH, BATCH), (SQUARE[:, :2], SQUARE)],
    aten.linalg_pinv.atol_rtol_tensor: [(SQUARE,), (BATCH,)],
    aten.linalg_matrix_exp.default: [
        *((SQUARE * scale,) for scale in (0, 1e-3, 0.6, 1, 5)),
        *((MATRICES * scale,) for scale in (0.01, 1)),
        *((matrices.double(),) for matrices in (SQUARE * 0.1, SQUARE * 5, MATRICES)),
        *((matrices.to(torch.complex64),) for matrices in (SQUARE * 5, MATRICES)),
        (BATCH[:0],),
        (BATCH[:, :1, :1],),
    ],
}
"""arguments to try; those by name stand below"""
NAMED = [
    (aten._linalg_check_errors.default, (N.int() * 0, "linalg.inv"), {"is_matrix": False}),
    (aten.repeat_interleave.Tensor, (N,), {"output_size": 16}),
    (aten.isin.Tensor_Tensor, (N.unique(), torch.arange(40)), {"assume_unique": True}),
    (aten.segment_reduce.default, (F, "sum"), {"lengths": LENGTHS}),
    (aten.segment_reduce.default, (F, "max"), {"lengths": LENGTHS, "unsafe": True}),
    (aten._linalg_svd.default, (SQUARE,), {"driver": "gesvd"}),
    (aten.linalg_pinv.atol_rtol_tensor, (SQUARE @ SQUARE.T,), {"hermitian": True}),
]
CASES = [(op, args, {}) for op, calls in CALLS.items() for args in calls] + NAMED


@pytest.fixture(scope="module")
def opened_mode():
    with virtual_card() as device, ValueMode(device.library) as mode:
        yield mode


@pytest.fixture
def mode(opened_mode):
    opened_mode.host.unknown.failures.clear()
    return opened_mode


def moved(argument):
    if isinstance(argument, torch.Tensor):
        return argument.cuda()
    return [moved(part) for part in argument] if isinstance(argument, list) else argument


def parts(result):
    return result if isinstance(result, tuple) else (result,)


def outside_of_workspaces():
    """The bytes that are allocated, but for cuBLAS': each torch has others, where it needs them."""
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def run(op, args, kwargs):
    """The results of the CPU and of the virtual GPU, and the memory that the latter takes."""
    given = [moved(argument) for argument in args]
    if len(args) > 1 and args[0] is args[1]:
        given[1] = given[0]  # one tensor, not two of the same values
    named = {name: moved(argument) for name, argument in kwargs.items()}
    before = outside_of_workspaces()
    result = op(*given, **named)
    taken = outside_of_workspaces() - before
    return EQUIVALENTS.get(op._name, op)(*args, **kwargs), result, taken


@pytest.mark.parametrize(("op", "args", "kwargs"), CASES, ids=[str(op) for op, *_ in CASES])
def test_outputs_are_the_cpus_and_memory_is_theirs_alone(mode, op, args, kwargs):
    if op is aten.index_put.default and any(argument is True for argument in args):
        require_release(2, 8, "values that are expanded where index_put accumulates")
    host, result, taken = run(op, args, kwargs)
    assert mode.host.unknown.failures == {}
    sizes = {}
    for expected, output in zip(parts(host), parts(result), strict=True):
        if not isinstance(expected, torch.Tensor):
            assert output == expected
            continue
        storage = output.untyped_storage()
        sizes[storage.data_ptr()] = -(-storage.nbytes() // BLOCK) * BLOCK
        assert (output.shape, output.dtype) == (expected.shape, expected.dtype)
        if op.namespace == "aten" and not op._schema.name.startswith("aten::_linalg_svd"):
            torch.testing.assert_close(output.cpu(), expected)
    assert taken == sum(sizes.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int8, torch.bool])
def test_large_unknown_values_raise_no_error_that_a_gpu_would_not(mode, dtype):
    """Zeros would: no value is the most frequent one, and the last of none is asked for."""
    numbers = torch.empty(1 << 20, dtype=dtype, device="cuda")
    mode.values.forget(numbers)
    rows = numbers.view(4, -1)
    mode.decisions.clear()
    assert rows.mode(1).indices.shape == (4,)
    if dtype != torch.bool:
        assert torch.isin(numbers, numbers[:2000]).shape == numbers.shape
    if dtype == torch.int64:
        assert numbers.repeat_interleave(numbers).dtype == dtype
    if dtype == torch.float32:
        for shape in ((1024, 1024), (16, 256, 256)):
            assert torch.linalg.matrix_exp(numbers.view(shape)).shape == shape
    assert numbers.sort().values.dtype == dtype
    assert rows.to(torch.int8).max(1).values.dtype == torch.int8
    assert mode.decisions.counts[1]
    assert mode.host.unknown.failures == {}


def test_an_expanded_tensor_is_assumed_once_for_all(mode):
    numbers = torch.empty(1 << 20, dtype=torch.int64, device="cuda")
    mode.values.forget(numbers)
    pairs = torch.cartesian_prod(numbers[:30], numbers[30:50])
    assert pairs.shape == (600, 2)
    assert len(pairs.unique()) == 1  # zeros are assumed


def test_every_operator_is_tried():
    tried = {op._schema.name for op, *_ in CASES}
    in_place = {"aten::index_put_", "aten::_index_put_impl_"}
    elsewhere = {
        "aten::_coalesce",
        "aten::_ctc_loss",
        "torchvision::nms",
        "aten::linalg_eig",
        "aten::linalg_matrix_sqrth",
        "aten::linalg_polar",
    }
    assert set(COPIES) - tried == in_place | elsewhere


# -- as users write it --


def boxes(count):
    corners = torch.rand(count, 4, generator=torch.Generator().manual_seed(1))
    return corners + torch.tensor([0.0, 0.0, 1.0, 1.0])


SCORES = torch.linspace(0, 1, 200).reshape(20, 2, 5).sin().log_softmax(-1)
TEXTS = torch.arange(16).reshape(2, 8) % 4 + 1


def linalg(name):
    require(torch.linalg, name)
    return getattr(torch.linalg, name)


USES = {
    "nms": lambda d: ops.nms(boxes(150).to(d), torch.linspace(0, 1, 150).to(d), 0.5),
    "no box": lambda d: ops.nms(boxes(0).to(d), torch.zeros(0).to(d), 0.5),
    "batched nms": lambda d: ops.batched_nms(
        boxes(90).to(d), torch.linspace(0, 1, 90).to(d), torch.arange(90).to(d) % 3, 0.5
    ),
    "roi_align": lambda d: ops.roi_align(
        torch.arange(64.0).reshape(1, 1, 8, 8).to(d), [boxes(3).to(d) * 4], 2
    ),
    "mask": lambda d: PAIRS.to(d)[MASK.to(d)],
    "a mask of the host": lambda d: PAIRS.to(d)[MASK],
    "assignment": lambda d: N.to(d).clone().masked_fill_(MASK.to(d), 9),
    "x[mask] = number": lambda d: assigned(N.to(d), MASK.to(d), 9),
    "x[mask] = tensor": lambda d: assigned(N.to(d), MASK.to(d), torch.arange(5).to(d)),
    "x[mask] += 1": lambda d: assigned(N.to(d), MASK.to(d), N.to(d)[MASK.to(d)] + 1),
    "where": lambda d: torch.where(PAIRS.to(d) > 1)[1],
    "one_hot": lambda d: torch.nn.functional.one_hot(N.to(d)),
    "isin": lambda d: torch.isin(N.to(d), torch.tensor([2, 5]).to(d)),
    "is_nonzero": lambda d: torch.tensor(torch.is_nonzero(N.to(d)[0])),
    "repeat_interleave": lambda d: F.to(d).repeat_interleave(N.to(d)),
    "unique": lambda d: torch.unique(PAIRS.to(d), dim=0, return_counts=True)[1],
    "argwhere": lambda d: torch.argwhere(PAIRS.to(d)),
    "nonzero_static": lambda d: torch.nonzero_static(N.to(d), size=9),
    "masked_scatter": lambda d: N.to(d).masked_scatter(MASK.to(d), N.to(d)),
    "packed": lambda d: (
        torch.nn.utils.rnn.pack_padded_sequence(
            PAIRS.reshape(2, 4, 2).to(d),
            torch.tensor([2, 4]),
            batch_first=True,
            enforce_sorted=False,
        ).data
    ),
    "nested by a mask": lambda d: torch._nested_tensor_from_mask(
        PAIRS.reshape(2, 4, 2).float().to(d),
        torch.tensor([[True, True, False, False], [True] * 4]).to(d),
    )._nested_tensor_size(),
    "jagged": lambda d: torch.nested.nested_tensor_from_jagged(
        PAIRS.to(d), torch.tensor([0, 3, 8]).to(d)
    ).to_padded_tensor(0),
    "eigenvalues": lambda d: torch.linalg.eigvals(SQUARE.to(d)).abs().sort().values,
    "eigenvectors": lambda d: torch.linalg.eig(SQUARE.to(d))[1].abs(),
    "eigenvectors of complex": lambda d: torch.linalg.eig(BATCH.cfloat().to(d))[1].abs(),
    "ctc_loss": lambda d: torch.nn.functional.ctc_loss(
        *(SCORES.to(d), TEXTS.to(d), torch.tensor([20, 18]), torch.tensor([8, 5]))
    ),
    "ctc_loss, lengths on the device": lambda d: torch.nn.functional.ctc_loss(
        *(SCORES.to(d), TEXTS.int().to(d)),
        *(torch.tensor([20, 18]).int().to(d), torch.tensor([8, 5]).int().to(d)),
    ),
    "roots": lambda d: linalg("matrix_sqrth")((SQUARE @ SQUARE.T).to(d)),
    "polar": lambda d: linalg("polar")(SQUARE.to(d))[0],
    "solved": lambda d: torch.linalg.solve(SQUARE.to(d), SQUARE.to(d)),
}


def assigned(tensor, mask, value):
    tensor = tensor.clone()  # of the host it is what all tests share
    tensor[mask] = value
    return tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", USES)
def test_what_users_write_gives_the_cpus_answer(mode, name):
    torch.testing.assert_close(USES[name]("cuda").cpu(), USES[name]("cpu"))
    assert mode.host.unknown.failures == {}


@pytest.mark.usefixtures("mode")
def test_a_singular_matrix_is_refused_as_on_a_gpu():
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.inv(torch.zeros(2, 2, device="cuda"))


# -- the page that lists them --

TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def listed():
    page = ROOT / "tests" / "tables" / "operators-that-read-back.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+::\w+)`", row.split("|")[1])]


def test_every_operator_that_pytorch_tags_is_listed():
    """A new torch shows its new operators here."""
    tagged = set()
    for full_name in torch._C._dispatch_get_all_op_names():
        name, _, overload = full_name.partition(".")
        namespace, _, base = name.partition("::")
        try:
            op = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        except (AttributeError, RuntimeError):
            continue  # registered without a schema
        if any(tag in op.tags for tag in TAGS):
            tagged.add(name)
    assert len(tagged) > 10
    assert sorted(tagged - set(listed())) == []


def test_the_page_lists_what_is_treated():
    names = listed()
    assert len(names) == len(set(names))
    assert sorted(set(COPIES) - set(names)) == []
