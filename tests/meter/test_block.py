"""``with pytest_gpumem.measure() as m``: the same measurement outside of pytest or in a test."""

import gc
from pathlib import Path

import pytest
from helpers.virtual_gpu import MIB, child, tensor, virtual_card, virtual_device

import pytest_gpumem
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.errors import DeviceError, GpuMemError, SpecError
from pytest_gpumem.measurement import Peak
from pytest_gpumem.meter.meter import ACTIVE, Meter


@pytest.fixture
def device(monkeypatch):
    """A device on which nothing is measured: measurements begin of their own."""
    assert ACTIVE == []
    with virtual_card("T4", count=2) as device:
        monkeypatch.setattr(device, "card", CARDS["T4"])  # as use_virtual_gpu("T4") does
        yield device


def test_it_has_the_peaks_of_the_block(device):
    with pytest_gpumem.measure() as m:
        one = tensor(30 * MIB)
        del one
        tensor(1)
    assert (m.peak_allocated, m.peak_reserved) == (30 * MIB, 32 * MIB)
    assert m.peaks == m.measurement.peaks == (Peak(30 * MIB, 32 * MIB),)
    assert m.measurement.device.name == "T4"
    assert m.measurement.provenance.driver == "virtual"


def test_what_the_process_held_before_counts_and_its_cache_does_not(device):
    model, cached = tensor(20 * MIB), tensor(50 * MIB)
    del cached
    with pytest_gpumem.measure() as m:
        tensor(4 * MIB)
    assert (m.peak_allocated, m.peak_reserved) == (24 * MIB, 40 * MIB)
    del model


def test_garbage_of_before_counts_in_a_part_alone(device):
    """A block collects garbage first; a part does not, for it would change the whole's figures."""

    def garbage():
        cycle = [tensor(8 * MIB)]
        cycle.append(cycle)

    garbage()
    with pytest_gpumem.measure() as whole:
        tensor(2 * MIB)
        garbage()
        with pytest_gpumem.measure() as part:
            tensor(4 * MIB)
    assert part.peak_allocated == whole.peak_allocated == 12 * MIB


def test_a_measurement_leaves_no_garbage(device):
    """The next one's collection would find it, and a collection that finds some is repeated."""
    model = tensor(8 * MIB)
    found = []

    def see(phase, info):
        if phase == "stop":
            found.append(info["collected"])

    with pytest_gpumem.measure():
        pass  # the first one makes what is kept
    gc.collect()
    gc.callbacks.append(see)
    try:
        with pytest_gpumem.measure():
            pass
        gc.collect()
    finally:
        gc.callbacks.remove(see)
    assert found
    assert not any(found)
    del model


def test_several_devices_are_measured_each(device):
    with pytest_gpumem.measure(devices=2) as m:
        tensor(30 * MIB, 0), tensor(40 * MIB, 1)
    assert m.peaks == (Peak(30 * MIB, 30 * MIB), Peak(40 * MIB, 40 * MIB))
    assert m.peak_allocated == 40 * MIB


def test_the_figures_are_there_when_the_block_has_ended_and_not_before(device):
    m = pytest_gpumem.measure()
    with m, pytest.raises(GpuMemError, match="the block has not ended; read the figures after"):
        _ = m.peak_allocated
    assert m.peak_allocated == 0


def test_an_error_in_the_block_passes_and_the_figures_are_there(device):
    m = pytest_gpumem.measure()
    with pytest.raises(KeyError), m:
        tensor(30 * MIB)
        raise KeyError
    assert m.peak_allocated == 30 * MIB
    assert ACTIVE == []


def test_one_within_another_is_a_part_of_it_and_leaves_it_whole(device):
    with pytest_gpumem.measure() as outer:
        early = tensor(60 * MIB)
        del early
        kept = tensor(10 * MIB)
        with pytest_gpumem.measure() as inner:
            tensor(20 * MIB)
        del kept
    assert inner.peak_allocated == 30 * MIB
    assert outer.peak_allocated == 60 * MIB


def test_resetting_the_peaks_by_hand_inside_hides_nothing(device):
    """Code under test may measure itself with torch.cuda.reset_peak_memory_stats."""
    import torch

    with pytest_gpumem.measure() as m:
        tensor(60 * MIB)
        torch.cuda.reset_peak_memory_stats()
        tensor(10 * MIB)
        own = torch.cuda.max_memory_allocated()
    assert (own, m.peak_allocated) == (10 * MIB, 60 * MIB)


def test_after_a_failed_beginning_nothing_is_left_behind(device, monkeypatch):
    def fail(*_, **__):
        raise OSError

    monkeypatch.setattr(Meter, "_begin", fail)
    with pytest.raises(OSError), pytest_gpumem.measure():  # noqa: PT011 - any will do
        pytest.fail("it did not begin")
    assert ACTIVE == []
    monkeypatch.undo()
    with pytest_gpumem.measure() as m:
        tensor(30 * MIB)
    assert m.peak_allocated == 30 * MIB


@pytest.mark.parametrize("devices", [0, -1, True, 1.0, "2", None])
def test_a_number_of_devices_is_a_whole_one(devices):
    with pytest.raises(SpecError, match="this is not a number of devices; write devices=1"):
        pytest_gpumem.measure(devices=devices)


def test_more_devices_than_can_be_seen_cannot_be_measured(device):
    with (
        pytest.raises(DeviceError, match="devices=3.*2 GPUs can be seen here; request fewer GPUs"),
        pytest_gpumem.measure(devices=3),
    ):
        pytest.fail("it did not begin")


def test_without_a_gpu_it_says_how_to_have_one():
    virtual_device()
    with (
        pytest.raises(DeviceError, match=r"there is no GPU here; .*use_virtual_gpu\(\) before"),
        pytest_gpumem.measure(),
    ):
        pytest.fail("it did not begin")


def test_a_program_measures_on_a_virtual_gpu():
    text = child(
        """
        import torch

        with pytest_gpumem.measure(devices=2) as m:
            torch.empty(1000, 1000, device="cuda:1")
        print(m.peak_allocated, m.peak_reserved, m.measurement.device.name)
        """,
        card="l4",
        devices=2,
        warm=True,
    )
    assert text.split() == ["4000256", "20971520", "L4"]


def test_a_card_that_nobody_knows_is_refused():
    with pytest.raises(SpecError, match="no card has this name"):
        pytest_gpumem.use_virtual_gpu("T400")


def test_no_module_of_the_package_has_the_name_of_something_public():
    folder = Path(pytest_gpumem.__file__).parent
    modules = {path.name.partition(".")[0] for path in folder.iterdir()}
    assert not modules & set(pytest_gpumem.__all__)
