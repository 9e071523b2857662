"""What the compiler takes for a while counts for no step; a stand-in for Inductor takes it."""

import types

import pytest
from helpers.virtual_gpu import CARD_80GIB, MIB, virtual_card

from pytest_gpumem.meter.compile_watch import COMPILER, WATCHED
from pytest_gpumem.meter.meter import Meter
from pytest_gpumem.notes import NoteKind

COMPILATION = WATCHED[0]
EXCESS = (
    "while torch.compile compiled or timed kernels, 486.00 MiB more than the peak were allocated: "
    "they are not counted, because runs with warm caches have none"
)
LEFT = (
    "torch.compile left 496.00 MiB in PyTorch's cache of free memory: peak reserved may be less "
    "with warm caches (warmup=1 leaves compilation out)"
)


@pytest.fixture
def meter():
    import torch

    with virtual_card(CARD_80GIB) as device:
        torch.cuda.reset_peak_memory_stats()  # of earlier tests; the meter leaves it to the step
        meter = Meter(device, device.open(CARD_80GIB, 1), 1)
        meter.start()
        yield meter
        meter.stop()


@pytest.fixture
def compiler():
    """A module that allocates and keeps some MiB, and calls what it is given, as it compiles."""
    module = types.ModuleType(COMPILATION.module)

    def compile_fx(size, kept=1, call=None):
        scratch = tensor(size * MIB)
        if call is not None:
            call()
        del scratch
        return tensor(kept * MIB)

    module.compile_fx = compile_fx
    COMPILATION.wrap(module, COMPILER.watching)
    return module


def tensor(size):
    import torch

    return torch.empty(size, dtype=torch.uint8, device="cuda")


def notes(meter):
    return [note.text for note in meter.result().notes if note.kind is NoteKind.COMPILATION]


def test_what_the_compiler_has_freed_is_left_out_and_what_lives_on_counts(meter, compiler):
    import torch

    weights = tensor(30 * MIB)
    graph = compiler.compile_fx(500, kept=4)
    assert meter.peaks()[0].allocated == 34 * MIB
    assert torch.cuda.max_memory_allocated() == 530 * MIB  # what the step's code reads
    tensor(10 * MIB)
    assert meter.peaks()[0].allocated == 44 * MIB
    assert notes(meter) == [EXCESS, LEFT]
    del weights, graph


def test_below_the_steps_peak_nothing_is_noted(meter, compiler):
    tensor(500 * MIB)
    compiler.compile_fx(100)
    assert meter.peaks()[0].allocated == 500 * MIB
    assert notes(meter) == []


def test_a_part_leaves_it_out_and_peaks_before_it_count(meter, compiler):
    with meter.part() as part:
        tensor(60 * MIB)
        compiler.compile_fx(300)
    assert part.peaks[0].allocated == 60 * MIB
    compiler.compile_fx(50)
    assert meter.peaks()[0].allocated == 60 * MIB


def test_a_compilation_inside_of_another_one_is_a_part_of_that(meter, compiler):
    compiler.compile_fx(100, call=lambda: compiler.compile_fx(300))
    assert meter.peaks()[0].allocated == 1 * MIB


def test_peaks_that_are_reset_meanwhile_are_left_out(meter, compiler):
    import torch

    compiler.compile_fx(100, call=torch.cuda.reset_peak_memory_stats)
    assert meter.peaks()[0].allocated == 1 * MIB


def test_where_the_compiler_fails_all_counts(meter, compiler):
    def fail():
        meter.fold()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        compiler.compile_fx(200, call=fail)
    assert meter.peaks()[0].allocated == 200 * MIB
    assert notes(meter) == []


def test_a_recording_leaves_the_time_out_and_what_runs_apart_in_it(meter, compiler):
    with meter.separately():
        compiler.compile_fx(10)
    compiler.compile_fx(10)
    before, between, after = meter.windows()
    assert before.end <= between.start
    assert between.end <= after.start


def test_compiled_anew_after_a_restart_nothing_of_before_is_told(meter, compiler):
    compiler.compile_fx(500)
    meter.restart()
    assert notes(meter) == []
    assert len(meter.windows()) == 1


@pytest.mark.usefixtures("compiler")
def test_without_a_measurement_the_compiler_is_left_alone(compiler):
    with virtual_card(CARD_80GIB):
        assert compiler.compile_fx(3).numel() == 1 * MIB
