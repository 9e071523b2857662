"""Autograd's threads may hold memory of a backward pass after its end: they are waited for."""

import hashlib
import threading
from pathlib import Path

import pytest
from helpers.busy_backward import busy_backward
from helpers.virtual_gpu import CARD_80GIB, MIB, child

import pytest_gpumem
from pytest_gpumem.devices import autograd_threads
from pytest_gpumem.devices.autograd_threads import (
    await_autograd,
    await_idle_threads,
    awaited_passes,
)
from pytest_gpumem.meter.allocator import current
from pytest_gpumem.meter.meter import Meter


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


def test_a_device_that_was_never_used_gets_no_context(device, monkeypatch):
    import torch

    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index == 1)
    monkeypatch.setattr("pytest_gpumem.devices.autograd_threads.has_autograd_threads", lambda: True)
    leaf = await_autograd()[0]
    assert (leaf.device.index, len(await_autograd())) == (1, 5)


def test_a_process_ends_after_the_threads_have_let_go():
    """They need Python for it: one that asks after the interpreter's end would end the process."""
    assert child(ENDS_EARLY, card=None) == "True\n"


ENDS_EARLY = """
import atexit, threading, time

@atexit.register  # so it runs after that of the virtual GPU
def report():
    print(done.is_set())
    caller.join()

import pytest_gpumem
pytest_gpumem.use_virtual_gpu(devices=2)
import torch

begun, done = threading.Event(), threading.Event()

class Works(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        begun.set()
        time.sleep(0.5)
        done.set()
        return gradient

x = torch.ones(4, device="cuda:1", requires_grad=True)
caller = threading.Thread(target=lambda: Works.apply(x).sum().backward(), daemon=True)
caller.start()
begun.wait()
"""


IMPORTS = """
import atexit, sys

@atexit.register  # so it runs after that of the virtual GPU
def report():
    print("sympy" in sys.modules)

import pytest_gpumem
pytest_gpumem.use_virtual_gpu()
import torch
torch.ones(1, device="cuda", requires_grad=True).sum().backward()
print("sympy" in sys.modules)
"""


def test_waiting_imports_nothing_of_torch_that_the_program_did_not():
    """``torch.autograd.grad`` imports sympy where it is given a gradient, which takes seconds."""
    before, after = child(IMPORTS, card=None).split()
    assert after == before


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


def test_what_the_threads_still_hold_is_waited_for_before_a_measurement_begins(device, monkeypatch):
    """It would count as foreign memory, and its end as a free of that."""
    import torch

    held = [torch.empty(MIB, dtype=torch.uint8, device="cuda:1")]
    monkeypatch.setattr("pytest_gpumem.meter.meter.await_autograd", held.clear)
    meter = Meter(device, device.open(CARD_80GIB, 2), 2)
    meter.start()
    assert [peak.allocated for peak in meter.isolation.foreign] == [0, 0]
    meter.stop()


def test_what_a_callback_of_the_last_backward_pass_holds_is_no_leak(meter, monkeypatch):
    """A device's thread drops it, after the caller has gone on: FSDP's has the sharded module."""
    import torch

    held = [torch.empty(MIB, dtype=torch.uint8, device="cuda:1")]
    monkeypatch.setattr("pytest_gpumem.meter.meter.await_autograd", held.clear)
    meter.release()
    assert [peak.allocated for peak in meter.counted()] == [0, 0]


def test_a_step_that_catches_the_error_of_a_backward_pass_goes_on_when_its_memory_is_free(
    meter, monkeypatch
):
    """As autograd's threads happen to run, the pass's memory would be in the step's peak or not."""
    import torch

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("of the user's")

    module = "pytest_gpumem.devices.autograd_threads"
    calls = []
    monkeypatch.setattr(f"{module}.await_autograd", lambda: calls.append("wait"))

    def passes(function):
        leaf = torch.ones(4, device="cuda:1", requires_grad=True)
        function(leaf).sum().backward()
        torch.autograd.grad(function(leaf).sum(), leaf)

    passes(torch.exp)  # the gradient that it returns is waited for
    assert calls == ["wait"]
    for number in range(2, 4):
        with pytest.raises(ValueError, match="of the user's"):
            passes(Fails.apply)
        assert calls == ["wait"] * number
    meter.stop()
    with pytest.raises(ValueError, match="of the user's"):
        passes(Fails.apply)
    assert calls == ["wait"] * 3


def test_a_pass_through_a_pass_has_the_same_order_whatever_ran_before(device):
    """As the threads' numbers of nodes were, a gradient penalty took 41.5 or 42.5 MiB."""
    import torch

    torch.manual_seed(0)

    def step():
        layers = [torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1)]
        critic = torch.nn.Sequential(*layers).cuda()
        real, fake = (torch.randn(256, 512).cuda() for _ in range(2))
        share = torch.rand(256, 1, device="cuda")
        x = (share * real + (1 - share) * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        ((gradient.norm(2, 1) - 1) ** 2).mean().backward()

    def peak():
        with pytest_gpumem.measure() as measurement:
            step()
        return measurement.peak_allocated

    step()
    threads = autograd_threads
    number = torch._C._autograd._get_sequence_nr() + 1000  # the device's thread is ahead
    threads._run_on_new_thread(
        lambda: threads._on_threads({0}, lambda: threads._make_nodes(number))
    )
    first = peak()
    leaf = torch.empty(0, requires_grad=True)
    for _ in range(2000):  # now this one is, as after a test that made no such graph
        leaf.view(0)
    assert (peak(), peak()) == (first, first)


def test_no_pass_waits_within_another_one(device, monkeypatch):
    """Its thread would wait for itself."""
    import torch

    calls = []
    monkeypatch.setattr(
        "pytest_gpumem.devices.autograd_threads.await_autograd", lambda: calls.append("wait")
    )

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                leaf = torch.ones(4, device="cuda:1", requires_grad=True)
                return torch.autograd.grad(leaf.exp().sum(), leaf)

    leaf = torch.ones(4, device="cuda:1", requires_grad=True)
    with awaited_passes():
        Nested.apply(leaf).sum().backward()
        assert calls == []
        torch.autograd.grad(Nested.apply(leaf).sum(), leaf)
        assert calls == ["wait"]


def test_a_thread_of_autograds_that_still_runs_is_waited_for():
    """Its state tells, since its last pass has ended: Python is free for it meanwhile."""
    done, running = threading.Event(), threading.Event()

    def work():
        comm = f"/proc/self/task/{threading.get_native_id()}/comm"
        Path(comm).write_text("pt_autograd_9", encoding="ascii")
        running.set()
        hashlib.sha256(bytes(200 * MIB))  # without Python's lock
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    running.wait()
    await_idle_threads()
    assert done.is_set()
    thread.join()


def test_a_pass_that_computes_values_within_a_pass_is_not_waited_for(device, monkeypatch):
    """A device's thread computes cuDNN's networks by one, and would be waited for itself."""
    import torch

    from pytest_gpumem.devices.virtual.values.mode import ValueMode

    waits = []
    monkeypatch.setattr(autograd_threads, "await_autograd", lambda: waits.append(1))
    with ValueMode(device.library, "full"), awaited_passes():
        network = torch.nn.LSTM(4, 6).cuda()
        weight = next(network.parameters())
        network(torch.ones(3, 2, 4, device="cuda"))[0].sum().backward()
        assert not waits
        torch.autograd.grad(network(torch.ones(3, 2, 4, device="cuda"))[0].sum(), weight)
        assert len(waits) == 1
        assert weight.grad.abs().sum().item() > 0
