"""Operators that ask the device for figures: the CPU's sizes and types, and true memory."""

import re

import pytest
import torch
from helpers.paths import ROOT
from helpers.virtual_gpu import opened

from pytest_gpumem.devices.virtual.values import host_tensors
from pytest_gpumem.devices.virtual.values.equivalents import EQUIVALENTS
from pytest_gpumem.devices.virtual.values.sized_outputs import COPIES, copies_of

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
    aten.equal.default: [(N, N.clone()), (N, N + 1), (N, N[1:]), (NONE, NONE.clone()), (N, N)],
    aten.allclose.default: [(F, F.clone()), (F, F + 1), (F, F + 1, 10.0)],
    aten._linalg_eigh.default: [(SQUARE @ SQUARE.T,), (BATCH,), (BATCH[:0],)],
    aten._linalg_svd.default: [(SQUARE,), (BATCH, True), (SQUARE[:2],), (SQUARE[:0],)],
    aten.linalg_lstsq.default: [(SQUARE, SQUARE), (BATCH, BATCH), (SQUARE[:, :2], SQUARE)],
    aten.linalg_pinv.atol_rtol_tensor: [(SQUARE,), (BATCH,)],
}
"""arguments to try; those by name stand below"""
NAMED = [
    (aten._linalg_check_errors.default, (N.int() * 0, "linalg.inv"), {"is_matrix": False}),
    (aten.repeat_interleave.Tensor, (N,), {"output_size": 16}),
    (aten.segment_reduce.default, (F, "sum"), {"lengths": LENGTHS}),
    (aten.segment_reduce.default, (F, "max"), {"lengths": LENGTHS, "unsafe": True}),
    (aten._linalg_svd.default, (SQUARE,), {"driver": "gesvd"}),
    (aten.linalg_pinv.atol_rtol_tensor, (SQUARE @ SQUARE.T,), {"hermitian": True}),
]
CASES = [(op, args, {}) for op, calls in CALLS.items() for args in calls] + NAMED


@pytest.fixture(scope="module")
def device():
    with opened() as device:
        yield device


def moved(argument):
    if isinstance(argument, torch.Tensor):
        return argument.cuda()
    return [moved(part) for part in argument] if isinstance(argument, list) else argument


def parts(result):
    return result if isinstance(result, tuple) else (result,)


def on_device(device, op, args, kwargs):
    """The results of the CPU and of the virtual GPU, whose copies to the host are queued."""
    given = [moved(argument) for argument in args]
    named = {name: moved(argument) for name, argument in kwargs.items()}
    if len(args) > 1 and args[0] is args[1]:
        given[1] = given[0]  # one tensor, not two of the same values
    host = EQUIVALENTS.get(op, op)(*args, **kwargs)
    with_values(device, [*given, *named.values()], [*args, *kwargs.values()])
    for content in copies_of(op)(host, given, named):
        device.library.queue_copy(content)
    before = torch.cuda.memory_allocated()
    result = op(*given, **named)
    faults = device.library.drop_queued_copies()
    taken = torch.cuda.memory_allocated() - before
    return host, result, faults, taken


def with_values(device, tensors, values):
    """Arguments of kernels before made them unknown; over_device_memory reads them as they lie."""
    for tensor, value in zip(tensors, values, strict=True):
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            assert device.library.open_for_writing(tensor.data_ptr(), tensor.nbytes)
            assert torch.equal(host_tensors.over_device_memory(tensor), value)


@pytest.mark.parametrize(("op", "args", "kwargs"), CASES, ids=[str(op) for op, *_ in CASES])
def test_outputs_have_the_cpus_sizes_and_types(device, op, args, kwargs):
    host, result, faults, taken = on_device(device, op, args, kwargs)
    assert not faults
    memory = set()
    for expected, output in zip(parts(host), parts(result), strict=True):
        if not isinstance(expected, torch.Tensor):
            assert output == expected
        else:
            assert (output.shape, output.dtype) == (expected.shape, expected.dtype)
            memory.add(output.untyped_storage())
    sizes = {storage.data_ptr(): storage.nbytes() for storage in memory}
    assert taken == sum(-(-size // BLOCK) * BLOCK for size in sizes.values())


def test_every_operator_is_tried():
    tried = {op._schema.name for op, *_ in CASES}
    in_place = {"aten::index_put_", "aten::_index_put_impl_"}
    elsewhere = {
        "torchvision::nms",
        "aten::linalg_eig",
        "aten::linalg_matrix_sqrth",
        "aten::linalg_polar",
    }
    assert set(COPIES) - tried == in_place | elsewhere


# -- the page that lists them --

TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def listed():
    page = ROOT / "docs" / "explanation" / "operators-that-read-back.md"
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
