"""Bringing a device to the same state before every step; caps that are exact."""

import gc
import threading

import pytest
from helpers.virtual_gpu import MIB, child, highest, sizes_of, tensor
from helpers.warm import HANGS

from pytest_gpumem.devices.memory_cap import CAPS, GET_FRACTION, cap_fraction, set_cap
from pytest_gpumem.meter.allocator import (
    collect_all,
    current,
    own_garbage_only,
    require_native_allocator,
    reset_peaks,
    settle,
)
from pytest_gpumem.meter.peaks import NOTHING
from pytest_gpumem.meter.plugs import Plugs
from pytest_gpumem.recording.allocator_view import VIEW


class Ring:
    """Garbage that only the cyclic collector frees."""

    def __init__(self, held):
        self.held, self.itself = held, self


# ---- settling ----


def test_settling_gives_garbage_and_the_cache_back_on_every_device(device):
    for index in (0, 1):
        Ring(tensor(30 * MIB, index))
    gc.disable()
    try:
        settle(2)
    finally:
        gc.enable()
    assert [current(index) for index in (0, 1)] == [NOTHING] * 2


def test_settling_clears_the_workspaces_of_cublas():
    """They count as allocated: the first test that multiplies would seem to leak one.

    PyTorch reads the variable once, for the whole process.
    """
    code = """
    import torch
    from pytest_gpumem.meter.allocator import current, settle
    a = torch.zeros(64, 64, device="cuda")
    (a @ a).sum()
    del a
    print(current(0).allocated > 0)
    settle(1)
    print(current(0).reserved)
    """
    assert child(code, warm=True, TORCH_CUBLAS_WORKSPACE_CACHE="1") == "True\n0\n"


def test_what_is_alive_is_left_alone(device):
    one = tensor(30 * MIB)
    settle(2)
    assert sizes_of(current(0)) == (30 * MIB, 30 * MIB)
    del one


def test_peaks_are_read_and_reset_on_each_device(device):
    reset_peaks(2)
    tensor(30 * MIB, 0), tensor(40 * MIB, 1)
    assert [highest(index).allocated for index in (0, 1)] == [30 * MIB, 40 * MIB]
    settle(2)
    reset_peaks(2)
    assert [highest(index) for index in (0, 1)] == [NOTHING] * 2


# ---- somebody else's resets ----


def test_whoever_resets_the_peaks_is_seen_before_and_we_are_not(device):
    import torch

    seen = []
    with VIEW.watched_resets(lambda: seen.append(highest(0).allocated)):
        tensor(30 * MIB)
        reset_peaks(2)  # our own
        assert seen == []
        tensor(20 * MIB)
        torch.cuda.reset_peak_memory_stats()
        assert seen == [20 * MIB]
        assert highest(0).allocated == 0
    torch.cuda.reset_peak_memory_stats()
    assert len(seen) == 1


# ---- the collector ----


def hooked(held):
    """A ring with an autograd node in it, whose hook holds something: C++ refers to that."""
    import torch

    leaf = torch.ones(1, requires_grad=True)
    product = leaf * 1
    product.grad_fn.register_hook(lambda *_gradients, held=held: None)
    return Ring(product)


def test_garbage_that_a_collection_only_finds_after_another_is_gone(device):
    """Each ring is reachable until the node before it is freed."""
    inner = Ring(tensor(4 * MIB))
    for _ in range(4):
        inner = hooked(inner)
    del inner
    settle(2)
    assert current(0) == NOTHING


def test_garbage_is_collected_though_another_thread_collects(device):
    """Python's collector refuses to begin meanwhile, without a word."""
    collecting, ended = threading.Event(), threading.Event()

    class Slow:
        def __init__(self):
            self.itself = self

        def __del__(self):
            collecting.set()
            ended.wait(HANGS)

    Slow()
    thread = threading.Thread(target=gc.collect)
    thread.start()
    assert collecting.wait(HANGS)
    Ring(tensor(4 * MIB))
    assert gc.collect() == 0
    timer = threading.Timer(0.05, ended.set)
    timer.start()
    settle(2)
    assert current(0) == NOTHING
    timer.join()
    thread.join()


def test_the_collector_sees_a_steps_own_objects_alone():
    before, inside = Ring(None), None
    with own_garbage_only():
        inside = Ring(None)
        tracked = gc.get_objects()
        assert any(one is inside for one in tracked)
        assert not any(one is before for one in tracked)
        assert gc.get_count()[1:] == (0, 1)  # the last pass was of the second generation
    assert any(one is before for one in gc.get_objects())


def test_the_collector_is_as_it_was_after_an_error():
    before = Ring(None)
    with pytest.raises(KeyError), own_garbage_only():
        raise KeyError
    assert any(one is before for one in gc.get_objects())


def test_older_garbage_can_be_collected_within(device):
    Ring(tensor(30 * MIB))
    with own_garbage_only():
        gc.collect()
        assert current(0).allocated == 30 * MIB
        collect_all()
        assert current(0).allocated == 0


# ---- plugs ----


def test_a_step_does_not_get_the_rest_of_segments_that_others_hold(device):
    """It would reserve less than it does alone: the order of tests would show."""
    left = tensor(3 * MIB)  # 17 MiB of its segment are free
    settle(1)
    plugs = Plugs(1)
    plugs.fill()
    held = current(0)
    assert plugs.sizes == [17 * MIB]
    one = tensor(4 * MIB)
    assert current(0).reserved - held.reserved == 20 * MIB
    del one
    plugs.release()
    assert plugs.sizes == [0]
    settle(1)
    assert sizes_of(current(0)) == (3 * MIB, 20 * MIB)
    del left


def test_rooms_between_live_blocks_are_filled_on_each_device_and_stream(device):
    import torch

    side = torch.cuda.Stream()
    keep = [tensor(300_000, index) for index in (0, 1) for _ in range(5)]
    with torch.cuda.stream(side):
        keep += [tensor(300_000) for _ in range(5)]
    del keep[1::2]
    settle(2)
    plugs = Plugs(2)
    plugs.fill()
    assert [current(index).allocated for index in (0, 1)] == [
        current(index).reserved for index in (0, 1)
    ]
    plugs.release()


def test_rooms_of_several_segments_are_all_filled(device):
    """Those of one segment after those of another one left 10 KiB of a third."""
    sizes = 10_240, 315_000, 315_000, 10_240
    keep = []
    for size in sizes:
        keep.append(tensor(size))
        filler = tensor(2 * MIB - size - 1024)  # the next one is in a segment of its own
        keep.append(filler)
    plugs = Plugs(1)
    for _ in range(2):
        del keep[1::2]
        settle(1)
        plugs.fill()
        assert current(0).allocated == current(0).reserved
        plugs.release()


def test_all_that_the_test_reads_is_as_without_plugs(device):
    """Blocks of both pools, of one room and of parts of one: what the plugs add is known."""
    import torch

    left = [tensor(600_000, index) for index in (0, 1) for _ in range(6)]
    left += [tensor(3 * MIB), tensor(3 * MIB), tensor(12 * MIB)]
    del left[1::2]
    settle(2)
    unplugged = [current_figures(index) for index in (0, 1)]
    plugs = Plugs(2)
    plugs.fill()
    assert min(plugs.sizes) > MIB
    assert [current_figures(index) for index in (0, 1)] == unplugged
    torch.cuda.reset_peak_memory_stats()
    peaks = torch.cuda.memory_stats()
    assert peaks["allocated_bytes.all.peak"] == peaks["allocated_bytes.all.current"]
    plugs.release()
    assert [current_figures(index) for index in (0, 1)] == unplugged


def current_figures(index):
    import torch

    stats = torch.cuda.memory_stats(index)
    return {name: value for name, value in stats.items() if name.endswith(".current")}


@pytest.mark.parametrize("method", ["fill", "release"])
def test_what_others_free_meanwhile_does_not_shift_what_the_test_reads(device, monkeypatch, method):
    """A thread of autograd's let go of 1,024 bytes: the test read as much too much ever after."""
    import torch

    left, other = tensor(3 * MIB), [tensor(1024)]
    plugs = Plugs(1)
    if method == "release":
        plugs.fill()
    free = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete

    def free_others(function):
        def call(*arguments):
            other.clear()
            return function(*arguments)

        return call

    for function in free:
        monkeypatch.setattr(torch.cuda, function.__name__, free_others(function))
    getattr(plugs, method)()
    assert not other
    assert torch.cuda.memory_allocated() == 3 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 3 * MIB
    if method == "fill":  # the other tensor's room is not, which was none yet
        assert plugs.sizes == [17 * MIB + 2 * MIB - 1024]
    plugs.release()
    assert torch.cuda.memory_allocated() == 3 * MIB
    del left


def test_a_room_that_rounded_requests_do_not_fit_is_told():
    code = """
    import torch
    from pytest_gpumem.meter.plugs import Plugs
    left = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    plugs = Plugs(1)
    plugs.fill()  # 17 MiB are free, and a request of as much is one of 20
    print(plugs.unfilled, plugs.sizes)
    """
    settings = "roundup_power2_divisions:4"
    for conf, printed in ((settings, "True [0]\n"), ("", "False [17825792]\n")):
        assert child(code, warm=True, PYTORCH_CUDA_ALLOC_CONF=conf) == printed


def test_where_nothing_is_held_nothing_is_plugged(device):
    plugs = Plugs(2)
    plugs.fill()
    assert plugs.sizes == [0, 0]
    assert current(0) == NOTHING


# ---- caps ----


@pytest.mark.parametrize("total", [85_028_896_768, 15_642_329_088, 1 << 40, 150_110_011_392, 7])
def test_a_fraction_caps_at_exactly_the_limit(total):
    """PyTorch cuts ``fraction * total`` down to whole bytes."""
    for limit in [1, 2, 3, 6, 512, 513, total // 3, total // 7 * 5, total - 1]:
        if limit < total:
            assert int(cap_fraction(limit, total) * total) == limit


def test_a_limit_beyond_the_device_is_no_cap():
    assert cap_fraction(100, 100) == cap_fraction(101, 100) == 1.0


def test_a_cap_holds_until_it_is_lifted_and_leaves_the_current_device(device):
    import torch

    set_cap(1, 30 * MIB)
    try:
        assert torch.cuda.current_device() == 0
        with pytest.raises(torch.OutOfMemoryError):
            tensor(30 * MIB + 1, 1)
        tensor(31 * MIB, 0)  # the other device has none
        tensor(30 * MIB, 1)
    finally:
        set_cap(1, None)
    tensor(100 * MIB, 1)


def test_what_torch_makes_current_to_read_a_fraction_is_not_left_so(device, monkeypatch):
    """torch 2.6 does: a test of two devices began with the second one as the current one."""
    import torch

    def fraction(index):
        torch.cuda.set_device(index)
        return 1.0

    monkeypatch.setitem(CAPS._real, GET_FRACTION, fraction)
    monkeypatch.setattr(CAPS, "_caps", {})
    assert CAPS.cap(1).fraction == 1.0
    assert torch.cuda.current_device() == 0


def test_a_torch_that_does_not_say_whether_it_caches_is_not_refused(monkeypatch):
    """torch 2.6 to 2.9 have no such function; installed with them every marked test ended so."""
    import torch

    monkeypatch.delattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", raising=False)
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    require_native_allocator()
