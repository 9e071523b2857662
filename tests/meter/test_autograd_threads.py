"""Autograd's threads may hold memory of a backward pass after its error: they are waited for."""

import threading

import pytest
from helpers.busy_backward import busy_backward
from helpers.virtual_gpu import CARD_80GIB, MIB, opened

from pytest_gpumem.meter.allocator import await_autograd, current
from pytest_gpumem.meter.meter import Meter


@pytest.fixture
def device():
    with opened(CARD_80GIB, count=2) as device:
        yield device


@pytest.fixture
def meter(device):
    meter = Meter(device, device.open(CARD_80GIB, 2), 2)
    meter.start()
    yield meter
    meter.stop()


@pytest.mark.parametrize("index", [0, 1])
def test_the_wait_lasts_as_long_as_a_devices_thread_works(device, index):
    caller, go = busy_backward(index)
    threading.Timer(0.5, go.set).start()
    await_autograd()
    assert go.is_set()
    caller.join()


def test_waiting_takes_no_memory(device):
    import torch

    for index in range(2):
        torch.cuda.reset_peak_memory_stats(index)
    await_autograd()
    with torch.inference_mode():
        await_autograd()
    assert [torch.cuda.max_memory_allocated(index) for index in range(2)] == [0, 0]


def test_memory_that_is_held_after_an_error_is_waited_for_once(meter, monkeypatch):
    import torch

    held = [torch.empty(MIB, dtype=torch.uint8, device="cuda:1")]
    calls = []

    def finish():
        calls.append("wait")
        held.clear()

    monkeypatch.setattr("pytest_gpumem.meter.meter.await_autograd", finish)
    meter.await_release(MIB)
    assert calls == []  # as much is to stay
    meter.await_release(0)
    assert current(1).reserved == 0
    held.append(torch.empty(MIB, dtype=torch.uint8, device="cuda"))
    reference = held[0]
    meter.await_release(0)
    assert calls == ["wait", "wait"]
    assert meter.counted()[0].allocated == reference.nbytes
