"""Foreign memory that is freed while a step runs: figures are those of the step alone."""

import pytest
from helpers.virtual_gpu import CARD_80GIB, MIB, opened

from pytest_gpumem.measurement import Peak
from pytest_gpumem.meter.foreign import segments_for
from pytest_gpumem.meter.meter import Meter


@pytest.fixture
def device():
    with opened(CARD_80GIB, count=2) as device:
        yield device


@pytest.fixture
def meter(device):
    meter = Meter(device, device.open(CARD_80GIB, 2), 2)
    yield meter
    meter.stop()


def tensor(size, index=0):
    import torch

    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}")


def first(meter):
    return meter.result().peaks[0]


def test_memory_that_an_earlier_test_left_is_freed_first(meter):
    left = tensor(64 * MIB)
    meter.start()
    del left
    kept = tensor(128 * MIB)
    assert first(meter) == Peak(128 * MIB, 128 * MIB)
    assert meter.counted()[0] == Peak(128 * MIB, 128 * MIB)
    del kept
    assert meter.result().retained[0].allocated == 0


def test_memory_that_is_freed_after_the_peak_changes_nothing(meter):
    left = tensor(64 * MIB)
    meter.start()
    tensor(128 * MIB)
    del left
    tensor(100 * MIB)
    result = meter.result()
    assert result.peaks[0] == Peak(128 * MIB, 128 * MIB)
    assert result.held[0] == Peak(64 * MIB, 64 * MIB)
    assert not any("estimate" in note for note in result.notes)


def test_a_step_that_uses_the_freed_room_says_so(meter):
    """Its allocated figure is exact, its reserved one counts a segment for each such block."""
    left = tensor(128 * MIB)
    meter.start()
    del left
    kept = tensor(64 * MIB)
    result = meter.result()
    assert result.peaks[0] == Peak(64 * MIB, 64 * MIB)
    assert any("up to 64.00 MiB of the peak reserved are an estimate" in it for it in result.notes)
    del kept


@pytest.mark.parametrize("moment", range(6))
def test_figures_do_not_depend_on_the_moment_of_the_free(meter, moment):
    left = [tensor(40 * MIB), tensor(700_000)]
    meter.start()
    kept = []
    for number in range(6):
        if number == moment:
            left.clear()
        kept.append(tensor((50 + number) * MIB))  # larger than the room that becomes free
        tensor(60 * MIB)
        if number == 2:
            kept.clear()
    assert first(meter).allocated == (53 + 54 + 55 + 60) * MIB
    assert meter.counted()[0].allocated == (53 + 54 + 55) * MIB
    kept.clear()


def test_an_address_that_is_used_again_is_the_steps(meter):
    left = tensor(128 * MIB)
    meter.start()
    del left
    for _ in range(3):
        tensor(128 * MIB)
    kept = tensor(128 * MIB)
    assert first(meter).allocated == 128 * MIB
    assert meter.counted()[0].allocated == 128 * MIB
    del kept


def test_parts_and_resets_of_the_tests_own_are_exact_as_well(meter):
    import torch

    left = [tensor(30 * MIB), tensor(30 * MIB)]
    meter.start()
    left.pop()
    with meter.part() as one:
        kept = tensor(100 * MIB)
        left.pop()
    torch.cuda.reset_peak_memory_stats()
    with meter.part() as two:
        tensor(40 * MIB)
    assert [tally.peaks[0].allocated // MIB for tally in (one, two)] == [100, 140]
    assert first(meter).allocated == 140 * MIB
    del kept


def test_settling_in_the_midst_of_a_step_loses_no_free(meter):
    left = tensor(64 * MIB)
    meter.start()
    kept = tensor(100 * MIB)
    del left
    meter.resettle()
    work = tensor(30 * MIB)
    del work
    assert first(meter) == Peak(130 * MIB, 130 * MIB)
    assert meter.foreign[0] == Peak(0, 0)
    del kept


def test_what_the_step_owns_is_not_foreign(meter):
    import torch

    fixture, left = tensor(30 * MIB), tensor(50 * MIB)
    blocks = {(0, fixture.data_ptr())}
    meter.start([Peak(30 * MIB, 30 * MIB), Peak(0, 0)], blocks)
    del fixture
    torch.cuda.empty_cache()
    assert meter.counted()[0] == Peak(0, 0)
    assert meter.foreign[0] == Peak(50 * MIB, 50 * MIB)
    del left


def test_a_history_of_the_tests_own_is_its_own(meter):
    import torch

    left = tensor(64 * MIB)
    meter.start()
    tensor(MIB)
    assert torch.cuda.memory._snapshot()["device_traces"][0] == []
    torch.cuda.memory._record_memory_history("all", context=None)
    tensor(3 * MIB)
    actions = [it["action"] for it in torch.cuda.memory._snapshot()["device_traces"][0]]
    assert actions == ["segment_alloc", "alloc", "free_requested", "free_completed"]
    del left
    meter.note()
    torch.cuda.memory._record_memory_history(None)
    assert torch.cuda.memory._snapshot()["device_traces"][0] == []
    kept = tensor(128 * MIB)
    assert first(meter).allocated == 128 * MIB
    del kept


def test_a_step_measures_the_same_in_a_session_where_it_frees_what_was_left(suite):
    session = suite.run(
        "-v",
        "-p",
        "no:randomly",
        source="""
        LEFT = []

        @pytest.mark.gpu_memory
        def test_leaves():
            LEFT.append(mib(128))

        @pytest.mark.gpu_memory
        def test_frees():
            LEFT.clear()
            torch.cuda.empty_cache()
            kept = mib(128)
        """,
    )
    assert session.figures()["test_frees"] == (128, 128), session.out


def test_segments_are_as_large_as_pytorchs(device):
    import torch

    for size in (512, MIB, MIB + 512, 9 * MIB, 10 * MIB, 10 * MIB + 512, 33 * MIB):
        block = tensor(size)
        assert torch.cuda.memory_reserved() == segments_for([size])
        del block
        torch.cuda.empty_cache()


def test_blocks_of_a_kind_share_segments():
    """Eight small blocks in a foreign segment stand for one segment of 2 MiB, not for eight."""
    assert segments_for([MIB // 4] * 8) == 2 * MIB
    assert segments_for([MIB // 4] * 9) == 4 * MIB
    assert segments_for([3 * MIB] * 6) == 20 * MIB
    assert segments_for([11 * MIB, 11 * MIB, 1]) == 26 * MIB
