"""The timeline of a recorded run."""

from helpers.recorded_runs import ROOT, linears, recorded, train
from helpers.virtual_gpu import MIB

from pytest_gpumem.explain.explanations import explanations
from pytest_gpumem.explain.timeline import COURSE_POINTS, course_of
from pytest_gpumem.measurement import CATEGORIES


def test_the_timeline_stacks_up_to_what_was_allocated(torch):
    with recorded() as run:
        model = linears(torch)
        train(torch, run, model, torch.optim.Adam(model.parameters()), rows=4096)
        measurement = run.measurement()
        found = explanations(run.recorded([""]), ROOT, timelines=True).attached("", measurement)
    (attribution,) = found.attributions
    line = attribution.timeline
    sums = [
        sum(column[i] for column in line.categories.values()) for i in range(len(line.reserved))
    ]
    assert max(sums) == sums[line.peak] == measurement.peaks[0].allocated
    assert all(total <= held for total, held in zip(sums, line.reserved, strict=True))
    assert max(line.reserved) == measurement.peaks[0].reserved
    names = [phase.name for phase in line.phases]
    once = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    assert once == ["forward", "backward", "optimizer"] * 2
    at_peak = {name: column[line.peak] for name, column in line.categories.items()}
    assert {k: v for k, v in at_peak.items() if v} == attribution.breakdown.categories
    assert list(line.categories) == [it for it in CATEGORIES if it in line.categories]


def test_a_long_timeline_keeps_its_peaks(torch):
    from pytest_gpumem.explain.timeline import MAX_POINTS

    with recorded() as run:
        for index in range(MAX_POINTS * 3):
            held = torch.empty((100 if index == 700 else 1) * MIB, dtype=torch.uint8, device="cuda")
            del held
        measurement = run.measurement()
        found = explanations(run.recorded([""]), ROOT, timelines=True).attached("", measurement)
    line = found.attributions[0].timeline
    assert len(line.reserved) <= MAX_POINTS + 3
    assert line.categories["other"][line.peak] == 100 * MIB
    course = found.attributions[0].breakdown.course
    assert len(course) == COURSE_POINTS
    # Of the stretch with the peak that one, of every other one its own highest.
    place = COURSE_POINTS * 700 // (MAX_POINTS * 3)
    assert [nbytes // MIB for nbytes in course] == [
        100 if number == place else 1 for number in range(COURSE_POINTS)
    ]


def test_a_course_has_the_highest_of_equal_stretches():
    assert course_of(range(3), [0, 5, 7, 6]) == (5, 7, 6)
    assert course_of([4, 9], [0] * 5 + [3] * 6) == (3, 3)
    levels = [0, *range(1000)]
    course = course_of(range(1000), levels)
    assert course == tuple(range(24, 1000, 25))
