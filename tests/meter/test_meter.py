"""The protocol of one measurement: what a step is charged with, and what it is not."""

import gc
import weakref

import pytest
from helpers.noted import noted
from helpers.virtual_gpu import CARD_80GIB, GIB, MIB, child, highest, sizes_of, tensor

import pytest_gpumem
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.measurement import Peak
from pytest_gpumem.meter.allocator import SWITCHED_OFF, cudnn_version, current, provenance
from pytest_gpumem.meter.meter import Meter
from pytest_gpumem.meter.out_of_memory import WATCH
from pytest_gpumem.meter.peaks import NOTHING, Held, Highest, maximum, minus, plus
from pytest_gpumem.meter.plugs import Plugs
from pytest_gpumem.meter.step_recording import StepRecording


@pytest.fixture
def meter(device):
    meter = Meter(device, device.open(CARD_80GIB, 2), 2)
    yield meter
    meter.stop()


def work(size, index=0):
    """Hold so many bytes for a moment."""
    tensor(size, index)


def first(meter):
    return meter.result().peaks[0]


def foreign(meter):
    """Foreign memory of the device: what earlier tests of the process pinned is left out."""
    return meter.isolation.foreign[0]._replace(pinned=0)


# ---- arithmetic ----


def test_what_is_held_is_added_subtracted_and_compared_figure_by_figure():
    assert plus(Held(1, 10, active=1), Held(2, 20, active=5)) == Held(3, 30, active=6)
    assert minus(Held(5, 10, 7, 5), Held(2, 20)) == Held(3, 0, 7, 5)
    assert maximum(Held(5, 10), Held(2, 20, 3)) == Held(5, 20, 3)


def test_the_highest_figures_are_raised_and_moved_together():
    low = Highest((Held(5, 10, 3, 6),), (Held(4, 10, 3, 5),))
    high = Highest((Held(4, 20, 1, 9),), (Held(4, 9, 1, 9),))
    assert low.or_higher(high) == Highest((Held(5, 20, 3, 9),), (Held(4, 10, 3, 9),))
    held = [Held(100, 200, active=110)]
    on_top = Highest((Held(105, 210, 3, 116),), (Held(104, 210, 3, 115),))
    assert low.on_top_of(held) == on_top
    assert on_top.above(held) == low
    assert low.above(held) == Highest((Held(pinned=3),), (Held(pinned=3),))


def test_a_recording_that_was_abandoned_is_not_running(device):
    recording = StepRecording(Plugs(1))
    recording.start()
    assert recording.is_running
    recording.abandon()
    assert not recording.is_running
    assert recording.stop() is None


# ---- what counts ----


def test_the_peaks_are_those_of_the_step(meter):
    work(500 * MIB)
    meter.start()
    work(30 * MIB)
    kept = tensor(10 * MIB)
    work(1, 1)
    result = meter.result()
    assert result.peaks == (Peak(30 * MIB, 30 * MIB), Peak(512, 2 * MIB))
    assert (result.peak_allocated, result.peak_reserved) == (30 * MIB, 30 * MIB)
    assert result.retained == (Peak(10 * MIB, 30 * MIB), Peak(0, 2 * MIB))
    assert result.held == (Peak(0, 0), Peak(0, 0))
    assert result.segments == 2
    del kept


def test_what_others_hold_is_not_counted(meter):
    left = tensor(3 * MIB)
    meter.start()
    work(4 * MIB)
    result = meter.result()
    assert result.peaks[0] == Peak(4 * MIB, 20 * MIB)
    assert result.held[0] == Peak(3 * MIB, 20 * MIB)
    del left


def test_a_step_measures_the_same_beside_others_as_alone(meter):
    """To the byte: the free rooms of their segments are no help to it."""

    def step():
        kept = [tensor(size) for size in (700, 3 * MIB, 300_000, 11 * MIB)]
        work(5 * MIB)
        del kept

    meter.start()
    step()
    alone = first(meter)
    meter.stop()
    left = [tensor(size) for size in (100, 2 * MIB, 4 * MIB, 900_000, 15 * MIB)]
    del left[2]
    meter.start()
    step()
    assert first(meter) == alone
    del left


def test_memory_that_others_free_meanwhile_never_makes_a_figure_negative(meter):
    left = tensor(30 * MIB)
    meter.start()
    del left
    import torch

    torch.cuda.empty_cache()
    assert meter.counted()[0] == NOTHING
    assert first(meter) == Peak(0, 0)


def test_what_the_step_owns_counts_from_the_start(meter):
    fixture, left = tensor(30 * MIB), tensor(50 * MIB)
    meter.start()
    held = Held(30 * MIB, 30 * MIB, active=30 * MIB)
    meter.adopt([held, NOTHING], {(0, fixture.data_ptr()): ()})
    work(8 * MIB)
    assert first(meter) == Peak(38 * MIB, 50 * MIB)
    assert sizes_of(foreign(meter)) == (50 * MIB, 50 * MIB)
    del fixture, left


def test_all_that_is_held_counts_where_it_is_asked_for(meter):
    model = tensor(30 * MIB)
    meter.start(count_held=True)
    assert first(meter) == Peak(30 * MIB, 30 * MIB)
    del model


def test_garbage_of_earlier_tests_is_gone_when_the_step_begins(meter):
    ring = [tensor(30 * MIB)]
    ring.append(ring)
    del ring
    meter.start()
    assert foreign(meter) == NOTHING


class Ring:
    """An object that garbage collection alone frees."""

    def __init__(self):
        self.ring = self


def test_garbage_is_collected_before_a_step_where_memory_is_new(device, meter):
    def collects():
        ring = weakref.ref(Ring())
        meter.start()
        meter.stop()
        return ring() is None

    gc.disable()
    try:
        kept = tensor(30 * MIB)
        assert collects()
        assert not collects()  # a collection of all objects takes a tenth of a second
        kept = [kept, tensor(MIB)]
        assert collects()
        assert not collects()
        del kept[1]
        kept.append(tensor(MIB))  # where the other one was
        assert collects()
    finally:
        gc.enable()


def test_peaks_of_a_set_up_that_others_ran_can_be_considered(meter):
    meter.start()
    work(10 * MIB)
    meter.consider(Highest.of([Held(40 * MIB, 5 * MIB), NOTHING]))
    assert first(meter) == Peak(40 * MIB, 10 * MIB)


def test_garbage_that_the_step_leaves_is_not_retained(meter):
    meter.start()
    ring = [tensor(30 * MIB)]
    ring.append(ring)
    del ring
    assert meter.result().retained[0].allocated == 0


# ---- parts ----


def test_devices_that_hold_nothing_are_not_settled():
    code = """
        from helpers.virtual_gpu import CARD_80GIB, virtual_card
        from pytest_gpumem.meter.meter import Meter
        import torch

        with virtual_card(CARD_80GIB, count=2) as device:
            meter = Meter(device, device.open(CARD_80GIB, 2), 2, record=True)
            meter.start()
            meter.settle_again()  # as at each use of a fixture of wider scope
            kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda:1")
            meter.settle_again()
            del kept
            meter.settle_again()  # the allocator has it as yet
            meter.settle_again()
            print(len(meter.recording.stop().own_work))
            meter.stop()
    """  # in a process where no earlier test has pinned memory, which is memory of the devices too
    assert child(code, card=None, warm=True) == "2\n"


def test_a_part_has_its_own_peaks_and_the_whole_keeps_its(meter):
    meter.start()
    work(90 * MIB)
    kept = tensor(10 * MIB)
    with meter.part() as one:
        work(20 * MIB)
        with meter.part() as inner:
            work(5 * MIB)
    with meter.part() as other:
        work(40 * MIB)
    assert [tally.peaks[0].allocated // MIB for tally in (one, inner, other)] == [30, 15, 50]
    assert first(meter).allocated == 90 * MIB
    assert meter.result(tally=one).peaks[0].allocated == 30 * MIB
    del kept


def test_what_a_part_retains_is_its_memory_when_it_ended(meter):
    meter.start()
    with meter.part() as one:
        kept = tensor(10 * MIB)
    later = tensor(20 * MIB)
    assert meter.result(tally=one).retained[0].allocated == 10 * MIB
    assert meter.result().retained[0].allocated == 30 * MIB
    del kept, later


def test_a_nested_measurement_s_optimizer_step_is_no_pass(meter):
    import torch

    meter.start()
    param = torch.nn.Parameter(torch.zeros(10 << 18, device="cuda"))
    param.grad = torch.zeros_like(param)
    with pytest_gpumem.measure():
        torch.optim.Adam([param], foreach=True).step()
    assert meter.passes()[0].allocated == 40 * MIB  # parameter, gradient and state, after the step
    assert meter.peaks()[0].allocated == 50 * MIB


def test_a_part_that_raises_is_tallied_as_well(meter):
    meter.start()
    with pytest.raises(KeyError), meter.part() as part:
        work(20 * MIB)
        raise KeyError
    assert part.peaks[0].allocated == 20 * MIB
    work(70 * MIB)
    assert part.peaks[0].allocated == 20 * MIB


def test_looking_at_the_peaks_meanwhile_changes_nothing(meter):
    meter.start()
    work(50 * MIB)
    assert meter.peaks()[0] == Peak(50 * MIB, 50 * MIB)
    work(20 * MIB)
    assert meter.peaks()[0] == Peak(50 * MIB, 50 * MIB)


def test_the_users_own_reset_hides_no_peak_and_works_for_the_user(meter):
    import torch

    meter.start()
    work(50 * MIB)
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    work(20 * MIB)
    assert torch.cuda.max_memory_allocated() == 20 * MIB
    assert first(meter).allocated == 50 * MIB


def test_settling_within_a_step_keeps_its_memory_and_drops_its_cache(meter):
    meter.start()
    kept = tensor(30 * MIB)
    work(50 * MIB)
    meter.settle_again()
    assert sizes_of(meter.counted()[0]) == (30 * MIB, 30 * MIB)
    assert meter.peaks()[0] == Peak(80 * MIB, 80 * MIB)
    del kept


def test_beginning_anew_forgets_what_was_except_what_is_held(meter):
    meter.start()
    kept = tensor(30 * MIB)
    work(50 * MIB)
    meter.restart()
    work(10 * MIB)
    assert first(meter) == Peak(40 * MIB, 40 * MIB)
    del kept


@pytest.mark.parametrize("settled", [False, True])
def test_the_next_step_has_the_caching_allocator_again_that_one_left_off(meter, device, settled):
    import torch

    if not hasattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled"):
        pytest.skip("this torch does not say whether it is enabled")
    left = tensor(3 * MIB)
    meter.start()
    kept = tensor(30 * MIB)
    torch.cuda.memory.caching_allocator_enable(False)
    unseen = tensor(50 * MIB)
    if settled:
        meter.release()
    result = meter.result()
    meter.stop()
    assert result.peaks[0].allocated == 30 * MIB
    assert sum(note == SWITCHED_OFF for note in result.notes) == 1
    del kept, unseen
    following = Meter(device, device.open(CARD_80GIB, 2), 2)
    following.start()
    work(20 * MIB)
    result = following.result()
    following.stop()
    assert result.peaks[0] == Peak(20 * MIB, 20 * MIB)
    assert SWITCHED_OFF not in result.notes
    del left


def test_where_other_code_switched_it_off_a_step_is_refused(meter):
    import torch

    if not hasattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled"):
        pytest.skip("this torch does not say whether it is enabled")
    refused = pytest.raises(DeviceError, match=r"call caching_allocator_enable\(True\)")
    with torch.cuda.memory.caching_allocator_disabled(), refused:
        meter.start()
    meter.start()


# ---- the cap ----


def test_a_cap_is_the_steps_own_beside_what_others_hold(meter):
    import torch

    left = tensor(30 * MIB)
    meter.start()
    meter.room.cap(20 * MIB)
    work(20 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        work(20 * MIB + 1)
    with pytest.raises(torch.OutOfMemoryError):
        work(32 * MIB, 1)
    del left


def test_others_take_no_room_from_the_card(meter):
    """A step on a full device has all of its card, as it has alone."""
    left = tensor(79 * GIB)
    meter.start()
    work(79 * GIB)
    assert first(meter).allocated == 79 * GIB
    del left


def test_a_cap_of_the_users_own_is_put_back(meter):
    import torch

    torch.cuda.set_per_process_memory_fraction(0.25, 1)
    meter.start()
    meter.room.cap(50 * MIB)
    assert torch.cuda.get_per_process_memory_fraction(1) == 0.25
    with pytest.raises(torch.OutOfMemoryError):
        work(51 * MIB, 1)
    meter.stop()
    try:
        assert torch.cuda.get_per_process_memory_fraction(1) == 0.25
        assert torch.cuda.get_per_process_memory_fraction(0) == 1.0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 1)


def test_caps_nest_and_end_with_the_measurement(meter):
    meter.start()
    assert meter.room.cap(90 * MIB) is None
    assert meter.room.cap(20 * MIB) == 90 * MIB
    assert meter.room.cap(90 * MIB) == 20 * MIB
    meter.stop()
    work(GIB)


def test_emptying_the_cache_for_a_request_is_counted(meter):
    """The step fits, but only just: the allocator gave its cache back and tried again."""
    meter.start()
    meter.room.cap(50 * MIB)
    work(30 * MIB)
    work(40 * MIB)
    result = meter.result()
    assert result.alloc_retries == 1
    assert result.peaks[0].reserved == 40 * MIB


# ---- what else is told ----


def test_out_of_memory_errors_that_the_step_caught_are_noted(meter):
    import torch

    meter.start()
    meter.room.cap(50 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        work(60 * MIB)
    assert "the step caught 1 out-of-memory error(s) itself" in meter.result().note_texts
    assert WATCH.count == 1


def test_a_first_step_of_an_optimizer_is_noted_and_a_parts_result_has_no_note(meter):
    import torch

    meter.start()
    param = torch.nn.Parameter(torch.zeros(100, device="cuda"))
    param.grad = torch.zeros_like(param)
    torch.zeros(10_000, device="cuda")  # as activations, which do not lie beside the state yet
    with meter.part() as part:
        torch.optim.Adam([param]).step()
    mine = noted("mine")
    assert "new Adam" in meter.result(notes=mine).note_texts[-1]
    assert meter.result(notes=mine).notes[0] == mine[0]
    assert meter.result(tally=part).notes == ()


def test_a_measurement_leaves_the_process_as_it_was(meter):
    import torch

    left = tensor(3 * MIB)
    before = current(0), torch._C._cuda_resetPeakMemoryStats, gc.get_freeze_count()
    meter.start()
    assert current(0) != before[0]  # the rest of the segment is filled
    meter.stop()
    assert (current(0), torch._C._cuda_resetPeakMemoryStats, gc.get_freeze_count()) == before
    assert highest(0).allocated >= 3 * MIB
    del left


def test_the_provenance_says_what_it_was_made_with(device, monkeypatch):
    import torch

    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    info = device.open(None, 1)
    found = provenance(info)
    assert (found.torch, found.cuda) == (torch.__version__, torch.version.cuda)
    assert found.cudnn == str(torch.backends.cudnn.version())
    assert (found.driver, found.allocator) == ("virtual", "max_split_size_mb:128")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8")
    assert provenance(info).allocator == "garbage_collection_threshold:0.8"


def test_a_cudnn_that_pytorch_refuses_is_none(monkeypatch):
    """On a V100 PyTorch raises for cuDNN 9.11 and later: a test without convolutions runs."""
    from torch.backends import cudnn

    def refused():
        raise RuntimeError("cuDNN version 92600 is not compatible with devices with SM < 7.5.")

    monkeypatch.setattr(cudnn, "version", refused)
    assert cudnn_version.__wrapped__() == "none"


@pytest.mark.parametrize(("count", "told"), [(30, True), (1, False)])
def test_garbage_whose_end_python_decides_is_told_where_it_matters(meter, count, told):
    """By how much, so that a peak that depends on it is never silently another one."""
    meter.start()
    ring = [tensor(count * MIB - 512)]
    ring.append(ring)
    del ring
    gc.collect()
    tensor(40 * MIB)
    notes = [note for note in meter.result().note_texts if "garbage" in note]
    expected = ["garbage in reference cycles kept 30.00 MiB until Python's garbage collector ran"]
    assert [note.split(":")[0] for note in notes] == expected * told


def test_what_a_collection_after_the_step_frees_was_in_use(meter):
    """A module in a reference cycle is garbage once its function returns, and no sooner."""
    meter.start()
    rings = [[tensor(30 * MIB)], [tensor(50 * MIB)]]
    for ring in rings:
        ring.append(ring)
    del rings[0], ring
    gc.collect()
    meter.end_step()
    rings.clear()
    gc.collect()
    (note,) = (note for note in meter.result().note_texts if "garbage" in note)
    assert note.startswith("garbage in reference cycles kept 30.00 MiB")


def test_a_part_has_notes_of_figures_that_are_not_exact(meter):
    meter.start()
    with meter.part() as exact:
        pass
    meter.isolation.plugs.unfilled = True
    with meter.part() as part:
        tensor(4 * MIB)
    assert meter.result(tally=exact).notes == ()
    (note,) = meter.result(tally=part).note_texts
    assert "peak reserved may be wrong by up to 20.00 MiB" in note
