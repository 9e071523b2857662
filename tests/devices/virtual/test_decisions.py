"""Loops that wait for values which are not computed."""

import copy
import pickle
import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.noted import texts_of
from helpers.virtual_gpu import virtual_card

from pytest_gpumem.devices.virtual.decisions import Decisions
from pytest_gpumem.devices.virtual.uncertain_numbers import watching
from pytest_gpumem.devices.virtual.values.mode import ValueMode
from pytest_gpumem.errors import DeviceError


def wait(x):
    while not x.mean() > 2:
        pass


def wait_within(x):
    while True:
        if x.mean() > 2:
            break


def wait_by_a_number(x):
    while not x.mean().item() > 2:
        pass


def count(x, rounds):
    for _ in range(rounds):
        assert not x.mean() > 2


@pytest.mark.parametrize("values", ["off", "auto"])
def test_a_loop_that_waits_for_such_a_value_ends_with_its_line(values):
    import torch

    with virtual_card() as device, ExitStack() as stack:
        decisions = Decisions(device.library.set_endless, max_read=100)
        stack.enter_context(watching(decisions, device.library))
        if values == "auto":
            stack.enter_context(ValueMode(device.library, values, decisions))
        x = torch.randn(3000, 3000, device="cuda")
        for loop, offset in ((wait, 1), (wait_within, 2), (wait_by_a_number, 1)):
            with pytest.raises((RuntimeError, DeviceError)) as error:
                loop(x)
            line = loop.__code__.co_firstlineno + offset
            text = str(error.value)
            assert f"test_decisions.py:{line}: this line read 100 values" in text
            assert 'values="full"' in text
            assert "gpu_memory.computes" in text
        count(x, 99)  # it ends by itself
        stack.close()
        assert torch.ones(2, device="cuda").sum().item() == 0  # the error leaves nothing behind


def take_rows(x):
    small = x.mean(1) > 0.5
    for _ in range(2):
        x[small]
    x[:, torch_zeros(x.shape[1]).bool()]  # known
    assert not x.mean() > 2


def take_others(x):
    masks = x > 2
    masks.nonzero()
    x.masked_select(masks[0])
    x[:, x[0] > 2]


def torch_zeros(size):
    import torch

    return torch.zeros(size, device="cuda")


def test_boxes_are_taken_too():
    import torch

    from pytest_gpumem.devices.virtual.values.data_dependent import selection_of

    assert selection_of("torchvision::nms", [torch.zeros(9, 4)], torch.arange(3)) == (3, 9)
    assert selection_of("aten::bincount", [torch.zeros(9)], torch.zeros(3)) is None


def test_a_note_says_how_many_of_how_many_an_operator_took():
    import torch

    with virtual_card() as device:
        device.values.compute("auto")
        rows = torch.randn(5000, 1000, device="cuda")
        take_rows(rows)
        line = take_rows.__code__.co_firstlineno
        (note,) = texts_of(device.notes(Path(__file__).parent))
        match = re.fullmatch(
            rf"3 values were assumed \(([\d,]+) of 10,000 taken at test_decisions.py:{line + 3}, "
            rf"test_decisions.py:{line + 5}\): the figures hold for .*",
            note,
        )
        assert match is not None, note
        assert 4_000 < int(match[1].replace(",", "")) < 6_000

        device.values.compute("off")
        device.values.compute("auto")
        take_others(torch.randn(5000, 1000, device="cuda"))
        line = take_others.__code__.co_firstlineno
        (assumed,) = texts_of(device.notes(Path(__file__).parent))
        assert f"5,000,000 of 5,000,000 taken at test_decisions.py:{line + 2}, " in assumed
        assert f"of 5,000,000 taken at test_decisions.py:{line + 3}, " in assumed
        assert f", 0 of 1,000 taken at test_decisions.py:{line + 4})" in assumed  # columns


def test_a_loss_that_shapes_nothing_makes_no_note(capsys):
    import torch

    with virtual_card() as device:
        loss = torch.randn(1000, device="cuda").mean()
        losses, total = [], 0.0
        for step in range(2):
            loss.item()
            losses.append(loss.item())
            total += loss.item()
            shown = loss.item()
            print(f"{step}: {loss.item():.3f}, {shown}")  # noqa: T201 - what is tried
        assert device.notes(Path.cwd()) == []
        if loss.item() < 3:
            (note,) = texts_of(device.notes(Path.cwd()))
            assert note.startswith("1 value was read back from the virtual GPU")
    assert capsys.readouterr().out.count("0.000") == 2


DECIDES = [
    "if x.mean(): pass",
    "if x.mean().item(): pass",
    "while x.mean() < 0: pass",
    "assert x.mean().item() != 2",
    "loss = x.mean().item()\nloss > 3",
    "total = 0\ntotal += x.mean().item()\ntotal / 3 > 1",
    "sorted([x.mean().item(), 1.0])",
    "int(x.mean())",
    "int(x.mean().item())",
    "y = torch.zeros(n.item(), device='cuda')",
    "kept.append(n.item())\n[0] * kept[0]",
    "kept.append(n.item() + 1)\nrange(kept[0])",
    "y = [0] * int(n)",
    "y = x[x > 0]",
    "y = x.nonzero()",
    "kept.append(x[x > 0])",
    "print(x[x > 0].shape)",
    "y = n.cpu()",
    "y = (x[0] > 0).tolist()",
    "y = torch.zeros(round(x.mean().item() * 3))",
    (
        "rows = torch.compile(torch.Tensor.repeat, backend='eager', fullgraph=True)\n"
        "rows(torch.ones(2), n.item() + 1)"
    ),
]
SHOWS = [
    "x.mean().item()",
    "print(x.mean(), x)",
    "print(f'{x.mean().item():.3f} {x.mean():.2f}')",
    "kept.append(x.mean().item())\nprint(sum(kept) / len(kept))",
    "loss = float(x.mean())",
    "import json\njson.dumps({'loss': x.mean().item()})",
    "import math\nmath.exp(x.mean().item())",
    "correct = 0\ncorrect += n.item()\naccuracy = correct / 3\nprint(accuracy)",
    "print(n.item())",
    "y = x[0].cpu().numpy()",
    "y = x[0].tolist()",
    "y = x * x.mean().item()",
    "y = torch.full((2,), x.mean().item(), device='cuda')",
    "torch.optim.SGD([torch.nn.Parameter(x)], lr=x.mean().item())",
    (
        "double = torch.compile(torch.mul, backend='eager', fullgraph=True)\n"
        "double(torch.ones(2), x.mean().item())"
    ),
]


@pytest.mark.parametrize(
    ("code", "verdict"), [(code, True) for code in DECIDES] + [(code, False) for code in SHOWS]
)
def test_a_number_tells_whether_a_program_decides_by_it(code, verdict, capsys):
    import torch

    with virtual_card() as device:
        device.values.compute("auto")
        x = torch.randn(3000, 3000, device="cuda")
        n = (x.mean(0) > 2).sum()
        exec(code, {"x": x, "n": n, "torch": torch, "kept": []})
        notes = device.notes(Path.cwd())
        assert bool(notes) == verdict, notes
    capsys.readouterr()


def test_a_number_is_like_any_other_and_outlives_no_test():
    import torch

    with virtual_card() as device:
        device.values.compute("auto")
        x = torch.randn(3000, 3000, device="cuda")
        loss, count = x.mean().item(), (x.mean(0) > 2).sum().item()
        for number, kind in ((loss, float), (count, int)):
            assert isinstance(number, kind)
            assert type(pickle.loads(pickle.dumps(number))) is kind
            assert type(copy.deepcopy(number)) is kind
            assert repr(number) == repr(kind(number))
            assert hash(number) == hash(kind(number))
        assert type(loss * 2 + 1) is type(loss) is not float
        device.values.compute("auto")
        assert loss > 0 or loss <= 0
        assert device.notes(Path.cwd()) == []  # of another test
    assert torch.Tensor.item is torch._C.TensorBase.item


def test_the_line_of_a_library_that_decides_is_named():
    import torch

    with virtual_card() as device:
        device.values.compute("auto")
        weight = torch.nn.Parameter(torch.randn(3000, 3000, device="cuda"))
        optimizer = torch.optim.LBFGS([weight], max_iter=3)

        def closure():
            optimizer.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        (note,) = texts_of(device.notes(Path(__file__).parent))
        line = closure.__code__.co_firstlineno + 6
        assert f"(test_decisions.py:{line} through torch/optim/lbfgs.py:" in note


@pytest.mark.parametrize("values", ["off", "auto"])
def test_numbers_that_no_kernel_computed_are_compared_by_torch_testing(values):
    import torch
    from torch.testing import _comparison, assert_close

    class ReadingPair(_comparison.NumberPair):  # as the pair of PyTorch's own TestCase
        def _process_inputs(self, actual, expected, *, id):  # noqa: A002 - PyTorch's
            return actual.item(), expected

    with virtual_card() as device:
        device.values.compute(values)
        x = torch.randn(3000, 3000, device="cuda")
        number = x.mean().item()
        assert_close(number, float.__pos__(number))
        line = sys._getframe().f_lineno + 2
        with pytest.raises(AssertionError, match="Scalars are not close"):
            assert_close(number, 2.0)
        with pytest.raises(AssertionError, match="Scalars are not equal"):
            assert_close(x.argmax().item(), -1, rtol=0, atol=0)
        with pytest.raises(_comparison.ErrorMeta):
            ReadingPair(x.mean(), 2.0).compare()
        notes = " ".join(texts_of(device.notes(Path(__file__).parent)))
        assert f"test_decisions.py:{line}" in notes
