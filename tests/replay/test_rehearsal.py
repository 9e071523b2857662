"""Requests that are made again: what they say is what PyTorch's allocator does."""

from fractions import Fraction

import pytest
from helpers.virtual_gpu import GIB, MIB

from pytest_gpumem.replay.rehearsal import Rehearsal, perform, rehearsable, shape


def event(action, addr, size=0, stream=0):
    return {"action": action, "addr": addr, "size": size, "stream": stream, "time_us": 0}


def plain(*sizes, second_stream=5, freed=1):
    """Return events: three requests, with one block freed before the last."""
    return [
        event("segment_alloc", 1, 2 * MIB),
        event("alloc", 1, sizes[0]),
        event("alloc", 2, sizes[1], stream=second_stream),
        event("free_requested", freed),
        event("free_completed", freed),
        event("alloc", freed, sizes[2]),
    ]


def test_a_script_is_the_requests_and_what_is_freed_between_them():
    script = rehearsable(plain(100, 200, 300))
    assert [(request.size, request.stream) for request in script.requests] == [
        *((100, 0), (200, 5), (300, 0))
    ]
    steps = [(action, number) for _, action, number in script.steps]
    assert steps == [("take", 0), ("take", 1), ("give", 0), ("take", 2)]
    assert shape(script) == shape(rehearsable(plain(1, 2, 3)))
    assert shape(script) != shape(rehearsable(plain(1, 2, 3, second_stream=0)))
    assert shape(script) != shape(rehearsable(plain(1, 2, 3, freed=2)))


@pytest.mark.parametrize(
    "more",
    [
        [event("free_completed", 9)],
        [event("segment_free", 1)],
        [event("segment_unmap", 1)],
    ],
)
def test_what_cannot_be_done_again_has_no_script(more):
    assert rehearsable([event("alloc", 1, 100), *more]) is None


def scripts_of(meter, step, value):
    with meter.apart(script=True) as tally:
        step(value)
    return [rehearsable(events) for events in tally.events]


def fits(meter, step, value):
    import torch

    try:
        with meter.apart():
            step(value)
    except torch.OutOfMemoryError:
        return False
    return True


def layers(value):
    """A net's forward and backward, with a workspace that comes and goes."""
    import torch

    model = torch.nn.Sequential(
        *(layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU()))
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.empty(value * 100, 1024, device="cuda")).square().sum().backward()
        torch.empty(value * 77777, dtype=torch.uint8, device="cuda")
        optimizer.step()
        optimizer.zero_grad()


def attention(value):
    import torch

    x = torch.empty(1, value, 256, device="cuda", requires_grad=True)
    (torch.softmax(x @ x.transpose(1, 2), -1) @ x).sum().backward()


def test_a_rehearsal_has_the_peaks_of_the_step(meter):
    (script,) = scripts_of(meter, layers, 100)
    with meter.apart() as step:
        layers(100)
    with meter.apart() as rehearsal:
        assert perform(0, [script], [Fraction(1)])
    assert rehearsal.peaks == step.peaks
    for cap in range(540, 640, 20):  # 600 MiB is about what it takes
        meter.cap(cap * MIB)
        with meter.apart():
            again = perform(0, [script], [Fraction(1)])
        assert again == fits(meter, layers, 100)


@pytest.mark.parametrize(
    ("step", "known", "cap", "multiple"),
    [
        (layers, (32, 40), 600, 1),
        (layers, (32, 40), 900, 1),
        (attention, (512, 1024, 1536), 500, 8),
    ],
)
def test_the_largest_by_rehearsal_is_near_the_largest_by_running(meter, step, known, cap, multiple):
    meter.cap(cap * MIB)
    rehearsal = Rehearsal(meter.apart)
    for value in known:
        rehearsal.learn(value, scripts_of(meter, step, value))
    largest = rehearsal.largest(known[-1], None, 100_000, multiple)
    assert largest > known[-1]
    off = -(-largest // 32 // multiple) * multiple  # kernels' own scratch is no polynomial
    assert fits(meter, step, largest - off)
    assert not fits(meter, step, largest + off)


def test_it_keeps_within_its_bounds_and_to_its_multiples(meter):
    meter.cap(1000 * MIB)
    rehearsal = Rehearsal(meter.apart)
    for value in (32, 40):
        rehearsal.learn(value, scripts_of(meter, layers, value))
    free = rehearsal.largest(40, None, 320, 1)
    assert 60 < free < 320
    assert rehearsal.largest(40, None, 50, 1) == 50
    assert rehearsal.largest(40, 45, 320, 1) == 44
    assert rehearsal.largest(40, None, 320, 8) == free // 8 * 8
    assert rehearsal.largest(40, None, 40, 1) is None


def test_it_says_nothing_of_steps_that_differ_in_more_than_sizes(meter):
    def step(value):
        import torch

        tensors = [torch.empty(value, device="cuda") for _ in range(value)]
        assert tensors

    rehearsal = Rehearsal(meter.apart)
    assert rehearsal.largest(1, None, 100, 1) is None
    for value in (2, 4, 8):
        rehearsal.learn(value, scripts_of(meter, step, value))
    assert rehearsal.largest(8, None, 100, 1) is None
    rehearsal.learn(16, [None])
    assert rehearsal.largest(8, None, 100, 1) is None


def test_it_leaves_nothing_behind(meter):
    import torch

    meter.cap(200 * MIB)
    rehearsal = Rehearsal(meter.apart)
    for value in (2, 4):
        rehearsal.learn(value, scripts_of(meter, layers, value))
    before = torch.cuda.memory_allocated()
    assert rehearsal.largest(4, None, 32, 1) < 32
    assert torch.cuda.memory_allocated() == before
    assert meter.peaks()[0].allocated < GIB // 1024
    assert meter.result().alloc_retries == 0
