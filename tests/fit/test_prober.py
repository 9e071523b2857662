"""Probes on the virtual GPU: each on a clean allocator, and for nothing but itself."""

import itertools
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from helpers.busy_backward import busy_backward
from helpers.virtual_gpu import MIB

from pytest_gpumem.errors import GpuMemError, SpecError
from pytest_gpumem.explain.attributor import breakdown_of
from pytest_gpumem.fit.prober import Prober

told = []


@pytest.fixture
def prober(meter, tmp_path):
    told.clear()
    return Prober(meter, told.append, lambda recorded: breakdown_of(recorded, tmp_path))


def tensor(mib):
    import torch

    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def linear(value):
    """30 MiB and 10 MiB more for each."""
    tensors = [tensor(30), tensor(10 * value)]
    assert tensors


def fails_above(limit, error):
    """A step that is linear up to a value."""

    def step(value):
        if value > limit:
            raise error
        linear(value)

    return step


def test_the_largest_within_the_cap(prober, meter):
    meter.room.cap(1000 * MIB)
    largest = prober.largest(linear)
    assert largest.value == 97
    assert largest.capacity == 1000 * MIB
    assert [it.value for it in largest.probes if it.fits][-1] == 97
    assert next(it.value for it in largest.probes if not it.fits) == 98
    assert largest.peak.allocated == 1000 * MIB


def test_without_a_cap_the_device_is_the_limit(prober):
    largest = prober.largest(linear, start=1000)
    assert largest.capacity == 80 << 30
    assert largest.value == (80 * 1024 - 30) // 10


def test_what_lives_on_in_the_test_counts(prober, meter):
    meter.room.cap(1000 * MIB)
    held = tensor(200)
    assert prober.largest(linear).value == 77
    del held
    assert prober.largest(linear).value == 97


def test_an_error_that_came_of_running_out_of_memory_is_running_out_of_memory(prober, meter):
    def step(value):
        try:
            linear(value)
        except Exception as error:
            raise RuntimeError("no room") from error

    meter.room.cap(500 * MIB)
    assert prober.largest(step).value == 47


def test_other_errors_pass_through_and_leave_the_meter_whole(prober, meter):
    with pytest.raises(LookupError):
        prober.largest(fails_above(1, LookupError))
    meter.fold()
    held = tensor(7)
    assert meter.peaks()[0].allocated == 7 * MIB
    del held


def test_probes_count_for_nothing_but_themselves(prober, meter):
    before = tensor(5)
    meter.room.cap(300 * MIB)
    prober.largest(linear)
    prober.scaling(linear, [2, 4, 8], predict=16)
    after = tensor(3)
    result = meter.result()
    assert result.peaks[0].allocated == 8 * MIB
    assert result.alloc_retries == 0
    assert result.notes == ()
    del before, after


def test_a_part_that_is_open_meanwhile_does_not_see_them(prober, meter):
    with meter.part() as tally:
        prober.largest(linear, limit=8)
        held = tensor(4)
    assert tally.peaks[0].allocated == 4 * MIB
    del held


def test_only_multiples_are_tried(prober, meter):
    meter.room.cap(1000 * MIB)
    largest = prober.largest(linear, start=3, multiple=32)
    assert largest.value == 96
    assert all(it.value % 32 == 0 for it in largest.probes)


def test_few_probes(prober, meter):
    """The second is as far as is safe, the third the answer: memory is a line."""
    meter.room.cap(3000 * MIB)

    def step(value):
        parts = [tensor(3 * value) for _ in range(7)]
        parts.append(tensor(50))
        del parts[3]
        parts.append(tensor(4 * value + 30))

    largest = prober.largest(step)
    assert [it.value for it in largest.probes if it.fits][2:] == [largest.value]
    assert len(largest.probes) == 5


def test_a_value_that_memory_does_not_depend_on_ends_the_search(prober, meter):
    meter.room.cap(1000 * MIB)
    largest = prober.largest(lambda value: tensor(100))
    assert largest.stopped == "no growth"
    assert len(largest.probes) == 4


def test_a_larger_value_that_takes_less_is_found(prober, meter):
    meter.room.cap(1000 * MIB)

    def step(value):
        linear(value if value % 8 else value * 9 // 10)

    largest = prober.largest(step, start=3)
    assert largest.value == 104
    assert not largest.monotonic


# -- scaling --


def test_scaling_is_the_line_and_its_prediction_is_run(prober):
    scaling = prober.scaling(linear, [8, 2, 4], predict=64)
    assert (scaling.fixed, scaling.per_sample, scaling.residual) == (30 * MIB, 10 * MIB, 0)
    assert [size for size, _ in scaling.points] == [2, 4, 8]
    assert scaling.uneven == ()
    assert scaling.prediction.predicted == scaling.prediction.measured == 670 * MIB


def test_what_is_not_on_the_line_is_named(prober):
    def step(value):
        import torch

        x = torch.empty(value, 64, device="cuda")
        scores = x @ x.T  # value * value, and cuBLAS's workspace of 32 MiB
        assert x is not scores

    scaling = prober.scaling(step, [1024, 2048, 4096], predict=100_000_000)
    assert "test_prober.py:" in scaling.uneven[0]
    sizes = [float(it) for it in re.findall(r"([\d.]+) MiB at \d+", scaling.uneven[0])]
    assert [late - early for early, late in itertools.pairwise(sizes)] == [12, 48]
    assert scaling.prediction.measured is None


def test_sizes_that_do_not_fit_are_left_out(prober, meter):
    meter.room.cap(200 * MIB)
    assert [it for it, _ in prober.scaling(linear, [2, 4, 800]).points] == [2, 4]
    with pytest.raises(GpuMemError, match="only one of these sizes fits in 200.00 MiB; write"):
        prober.scaling(linear, [2, 800])


# -- what it says --


def test_who_waits_is_told_of_every_probe(meter, tmp_path):
    meter.room.cap(1000 * MIB)
    lines = []
    Prober(meter, lines.append, patience=-1).largest(linear)
    assert lines[0] == "probe 1: 1 fits, 40.00 MiB of 1000.00 MiB reserved"
    refused = [line for line in lines if "98" in line]
    assert refused == [f"probe {len(lines) - 1}: 98 does not fit: 980.00 MiB more requested"]
    lines.clear()
    Prober(meter, lines.append, patience=3600).largest(linear)
    assert lines == []


def steep(value):
    """Memory that grows with the square, so that the line through two probes misses."""
    tensors = [tensor(value * value), tensor(1 + value % 7)]
    assert tensors


def test_a_line_tells_how_many_probes_are_left_and_how_long_they_take(meter, tmp_path, monkeypatch):
    meter.room.cap(4000 * MIB)
    minutes = SimpleNamespace(monotonic=itertools.count(0, 60).__next__)
    monkeypatch.setattr("pytest_gpumem.fit.prober.time", minutes)
    lines = []
    assert Prober(meter, lines.append).largest(steep).value == 63
    assert lines[:3] == [
        "probe 1: 1 fits, 22.00 MiB of 4000.00 MiB reserved",
        "probe 2: 64 does not fit: 4096.00 MiB more requested; about 6 more, 6 min",
        "probe 3: 8 fits, 84.00 MiB of 4000.00 MiB reserved; about 6 more, 6 min",
    ]


def test_a_long_scaling_shows_a_line_for_each_size(meter, tmp_path):
    lines = []
    Prober(meter, lines.append, patience=-1).scaling(linear, [2, 4])
    assert [line.partition(",")[0] for line in lines] == ["2 fits", "4 fits"]


def test_an_interrupted_search_says_what_it_knows(prober, meter):
    meter.room.cap(1000 * MIB)
    with pytest.raises(KeyboardInterrupt):
        prober.largest(fails_above(50, KeyboardInterrupt))
    assert re.fullmatch(r"interrupted after \d probes: \d+ fits", told[-1])
    assert meter.peaks()[0].allocated == 0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda it: it.largest(3), "gpu_memory.largest(3): the step cannot be called"),
        (lambda it: it.largest(linear, 0), "(start=0): start must be a whole number from 1"),
        (lambda it: it.largest(linear, 1.5), "(start=1.5): start must be"),
        (lambda it: it.largest(linear, limit=True), "(limit=True): limit must be"),
        (lambda it: it.largest(linear, multiple=-1), "(multiple=-1): multiple must be"),
        (
            lambda it: it.largest(linear, limit=4, multiple=8),
            "the limit is smaller than the smallest multiple",
        ),
        (lambda it: it.scaling(linear, [8]), "(sizes=[8]): a line needs two different sizes"),
        (lambda it: it.scaling(linear, 8), "(sizes=8): a line needs two different sizes"),
        (lambda it: it.scaling(linear, [8, 0]), "(sizes=0): sizes must be"),
        (lambda it: it.scaling(None, [8, 9]), "gpu_memory.scaling(None): the step cannot"),
        (lambda it: it.scaling(linear, [1, 2], predict="x"), "(predict='x'): predict must be"),
    ],
)
def test_arguments_that_are_no_good(prober, call, error):
    with pytest.raises(SpecError, match=re.escape(error)):
        call(prober)


def test_an_optimizers_only_step_in_a_probe_is_no_note_of_the_test(meter, prober):
    import torch

    def one_step(value):
        weight = torch.nn.Parameter(tensor(10 * value).float())
        tensor(500 * value)  # the passes reach the peak: the state comes later
        weight.grad = torch.empty_like(weight)
        torch.optim.Adam([weight], fused=True).step()

    prober.probe(one_step, 1)
    assert meter.result().notes == ()
    one_step(1)
    assert "only one step ran with a new Adam" in meter.result().note_texts[0]


def test_what_threads_let_go_of_late_after_a_refusal_is_not_the_next_probes(meter, prober):
    meter.room.cap(1000 * MIB)
    threads = []

    def refused(value):
        caller, go = busy_backward(hold=lambda: tensor(300))
        threads.extend([caller, threading.Timer(0.5, go.set)])
        threads[-1].start()
        tensor(value)

    assert not prober.probe(refused, 2000).fits
    # Its caller may not have ended, and hold small tensors: one segment of those made before the
    # device was settled, whose rooms were filled then, and one of those made after.
    assert meter.counted()[0].reserved <= 4 * MIB
    assert prober.probe(tensor, 900).fits
    for thread in threads:
        thread.join()


# -- nothing depends on the clock --


def test_the_collector_runs_alike_in_every_probe_whatever_is_shown_between(prober, meter, request):
    if "PYTEST_XDIST_WORKER" in os.environ:
        # A worker's own thread reads the next tests, and makes objects that the collector counts,
        # at any time: one run in some 300 had another figure.
        options = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider")
        command = [sys.executable, "-m", "pytest", *options, request.node.nodeid]
        left = {"PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"}
        environment = {name: value for name, value in os.environ.items() if name not in left}
        root = request.config.rootpath
        alone = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False
        )
        assert alone.stdout.splitlines()[-1].startswith("1 passed"), alone.stdout
        return

    def step(value):
        for _ in range(value):
            cycle = [tensor(1)]
            cycle.append(cycle)

    step(1)  # Python 3.10 makes an object for a function's frame when it is first called
    meter.room.cap(2000 * MIB)
    shown = []
    prober.show = lambda line: shown.append([[line] for _ in range(300)])
    prober.patience = 10**9
    in_silence = [prober.scaling(step, [500, 600, 700]).points for _ in range(2)]
    assert shown == []
    prober.patience = -1
    with_lines = [prober.scaling(step, [500, 600, 700]).points for _ in range(2)]
    assert len(shown) == 6
    assert in_silence + with_lines == [in_silence[0]] * 4


def test_a_search_finds_the_same_whatever_the_clock_says(prober, meter, busy_clock):
    meter.room.cap(1000 * MIB)
    largest = prober.largest(linear)
    busy_clock()
    assert prober.largest(linear) == largest


def test_what_a_refused_probe_left_is_told(prober, meter):
    kept = []

    def step(value):
        tensors = [tensor(10 * value)]
        if value > 50:
            kept.append(tensor(7))
            tensors.append(tensor(1000))
        assert tensors

    meter.room.cap(1000 * MIB)
    largest = prober.largest(step)
    assert largest.value == 50
    assert largest.left == 7 * MIB
    assert "7.00 MiB that a refused probe left behind count in later probes" in str(largest)
    meter.room.cap(1000 * MIB)
    assert prober.largest(linear).left == 0
