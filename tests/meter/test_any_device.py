"""A measurement on any device: these tests run on the virtual GPU, and on another accelerator."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.standin import STANDIN
from helpers.virtual_gpu import MIB

from pytest_gpumem.measurement import Peak
from pytest_gpumem.meter.meter import Meter
from pytest_gpumem.recording.allocator_view import VIEW


@pytest.fixture
def meter(any_device):
    """A measurement that has not begun; what others leave behind is on its devices."""
    meter = Meter(any_device, any_device.open(None, 2), 2)
    yield meter
    meter.stop()
    gc.collect()


def tensor(size, index=0):
    """A tensor of so many bytes."""
    import torch

    place = torch.device(VIEW.backend.device_type, index)
    return torch.empty(size, dtype=torch.uint8, device=place)


def allocated(peaks):
    return [peak.allocated / MIB for peak in peaks]


def test_the_peaks_are_those_of_the_step(meter):
    tensor(500 * MIB)
    meter.start()
    tensor(30 * MIB)
    kept = tensor(10 * MIB)
    tensor(20 * MIB, 1)
    result = meter.result()
    assert allocated(result.peaks) == [30, 20]
    assert 30 <= result.peak_reserved / MIB <= 40
    assert allocated(result.retained) == [10, 0]
    assert result.held == (Peak(0, 0), Peak(0, 0))
    del kept


def test_what_others_hold_is_not_counted(meter):
    left = tensor(30 * MIB)
    meter.start()
    tensor(40 * MIB)
    result = meter.result()
    assert (allocated(result.peaks), allocated(result.held)) == ([40, 0], [30, 0])
    assert result.peaks[0].reserved == 40 * MIB
    del left


def test_all_that_is_held_counts_where_it_is_asked_for(meter):
    model = tensor(30 * MIB)
    meter.start(count_held=True)
    assert meter.result().peaks[0] == Peak(30 * MIB, 30 * MIB)
    del model


def test_garbage_of_before_is_gone_when_the_step_begins(meter):
    ring = [tensor(30 * MIB)]
    ring.append(ring)
    del ring
    meter.start()
    assert allocated(meter.isolation.foreign) == [0, 0]


def test_garbage_of_the_step_is_not_retained(meter):
    meter.start()
    ring = [tensor(30 * MIB)]
    ring.append(ring)
    del ring
    assert allocated(meter.result().retained) == [0, 0]


def test_a_part_has_peaks_of_its_own(meter):
    meter.start()
    tensor(50 * MIB)
    with meter.part() as tally:
        tensor(30 * MIB)
    assert allocated(meter.result(tally=tally).peaks) == [30, 0]
    assert allocated(meter.result().peaks) == [50, 0]


def test_code_apart_counts_in_no_other_tally(meter):
    meter.start()
    kept = tensor(10 * MIB)
    with meter.separately() as tally:
        tensor(70 * MIB)
    assert allocated(tally.peaks) == [80, 0]
    assert allocated(meter.result().peaks) == [10, 0]
    del kept


def test_the_tests_own_reset_hides_no_peak_and_works_for_the_test(meter):
    import torch

    if not hasattr(torch.accelerator, "reset_peak_memory_stats"):
        pytest.skip("torch has the functions since 2.9")
    meter.start()
    tensor(50 * MIB)
    torch.accelerator.reset_peak_memory_stats(0)
    tensor(20 * MIB)
    meter.fold()
    assert torch.accelerator.max_memory_allocated(0) == 20 * MIB
    assert allocated(meter.result().peaks) == [50, 0]


def test_a_backward_pass_holds_nothing_afterwards(meter):
    """Autograd's thread of the device has let go of it, whichever device that is."""
    import torch

    meter.start()
    weight = tensor(4 * MIB).view(torch.float32).fill_(1).requires_grad_()
    for _ in range(3):
        (gradient,) = torch.autograd.grad((weight * weight).sum(), [weight])
        del gradient
        assert 4 <= allocated(meter.counted())[0] < 4.01
    del weight


@pytest.mark.skipif(STANDIN in os.environ, reason="this is the session on it")
def test_these_tests_pass_on_another_accelerator(standin):
    """In a process of its own, which has no other accelerator."""
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-q", __file__]
    environment = {**os.environ, STANDIN: str(standin)}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    number = sum(name.startswith("test_") for name in globals()) - 1
    assert f"{number} passed, 1 skipped" in done.stdout, done.stdout + done.stderr
