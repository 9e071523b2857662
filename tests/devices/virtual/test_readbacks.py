"""Loops that wait for values which are not computed."""

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
        x = torch.randn(1000, 1000, device="cuda")
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
