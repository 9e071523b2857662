"""Loops that wait for values which are not computed."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.virtual_gpu import opened

from pytest_gpumem.devices.virtual import readbacks


def wait(x):
    while not x.mean() > 2:
        pass


def wait_within(x):
    while True:
        if x.mean() > 2:
            break


def count(x, rounds):
    for _ in range(rounds):
        assert not x.mean() > 2


@pytest.mark.parametrize("values", ["off", "auto"])
def test_a_loop_that_waits_for_such_a_value_ends_with_its_line(values, monkeypatch):
    import torch

    monkeypatch.setattr(readbacks, "MOST_ROUNDS", 100)
    monkeypatch.setattr(readbacks, "MOST_READ", 1000)
    cases = ((wait, 1, 100), (wait_within, 2, 1000))
    with opened() as device:
        device.compute_values(values)
        x = torch.randn(3000, 3000, device="cuda")
        for loop, offset, rounds in cases:
            with pytest.raises(RuntimeError) as error:
                loop(x)
            line = loop.__code__.co_firstlineno + offset
            text = str(error.value)
            assert f"test_readbacks.py:{line}: {rounds:,} values were read here" in text
            assert 'values="full"' in text
            assert "gpu_memory.computes" in text
        count(x, 101)  # it ends by itself
        device.compute_values("off")
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

    from pytest_gpumem.devices.virtual.values.sized_outputs import taken_of

    assert taken_of("torchvision::nms", [torch.zeros(9, 4)], torch.arange(3)) == (3, 9)
    assert taken_of("aten::bincount", [torch.zeros(9)], torch.zeros(3)) is None


def test_a_note_says_how_many_of_how_many_an_operator_took():
    import torch

    with opened() as device:
        device.compute_values("auto")
        rows = torch.randn(5000, 1000, device="cuda")
        take_rows(rows)
        line = take_rows.__code__.co_firstlineno
        (note,) = device.notes(Path(__file__).parent)
        match = re.fullmatch(
            rf"3 values were assumed \(([\d,]+) of 10,000 taken at test_readbacks.py:{line + 3}, "
            rf"test_readbacks.py:{line + 5}\): the figures hold for .*",
            note,
        )
        assert match is not None, note
        assert 4_000 < int(match[1].replace(",", "")) < 6_000

        device.compute_values("off")
        device.compute_values("auto")
        take_others(torch.randn(5000, 1000, device="cuda"))
        line = take_others.__code__.co_firstlineno
        (unknown, assumed) = device.notes(Path(__file__).parent)
        assert f"(0 of 5,000,000 taken at test_readbacks.py:{line + 2})" in unknown
        assert f"of 5,000,000 taken at test_readbacks.py:{line + 3}, " in assumed
        assert f", 0 of 1,000 taken at test_readbacks.py:{line + 4})" in assumed  # columns


def test_a_loss_that_shapes_nothing_makes_no_note(capsys):
    import torch

    with opened() as device:
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
            (note,) = device.notes(Path.cwd())
            assert note.startswith("1 value was read back from the virtual GPU")
    assert capsys.readouterr().out.count("0.000") == 2


def test_an_operator_that_reads_for_a_size_is_told_from_one_that_reads_a_number():
    import torch

    def backward(x):
        weight = torch.ones(4, 2, device="cuda", requires_grad=True)
        weight[x > 1].sum().backward()

    sized = (
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.unique(),
        lambda x: x[:, None].to_sparse(),
        lambda x: x.repeat_interleave(x.long()),
        backward,
    )
    numbers = (
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: float(x[0]),
        lambda x: x.tolist(),
        lambda x: torch.equal(x, x + 1),
        lambda x: torch.ops.aten._local_scalar_dense(x[0]),
        lambda x: torch.linalg.inv_ex(x[:, None] + x, check_errors=True),
    )
    with opened() as device:
        flags = []
        device.library.on_readback(lambda _size, sized: flags.append(sized) or False)
        x = torch.ones(4, device="cuda")
        for calls, expected in ((sized, True), (numbers, False)):
            for call in calls:
                flags.clear()
                with suppress(RuntimeError):  # before torch 2.15 zero says: a repeat is negative
                    call(x)
                assert set(flags) == {int(expected)}
        device.library.on_readback(None)
