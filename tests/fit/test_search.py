"""The search for the largest value that fits, on memory that is a function."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pytest_gpumem.fit.search import Largest, MemoryLine, Probe, Search, fit_line
from pytest_gpumem.measurement import Peak

GIB = 1 << 30
MIB = 1 << 20


def found(search, allocated, fits=None):
    """Run a search over a function from value to bytes; reserved is the same and 20 MiB."""
    fits = fits or (lambda value: allocated(value) + 20 * MIB <= search.capacity)
    while (value := search.next()) is not None:
        assert len(search.probes) < 200
        held = allocated(value)
        if fits(value):
            peak = Peak(held, min(held + 20 * MIB, search.capacity))
            search.add(Probe(value, True, peak, peak))
        else:
            search.add(Probe(value, False, Peak(min(held, search.capacity), search.capacity)))
    return search.result()


def tried(largest):
    return [it.value for it in largest.probes]


# -- the answer --


@given(
    capacity=st.integers(1, 80).map(GIB.__mul__),
    fixed=st.floats(0, 0.9),
    slope=st.integers(1, 4 * GIB),
    start=st.integers(1, 100),
    multiple=st.sampled_from([1, 1, 8]),
)
def test_the_answer_is_the_largest_multiple_that_fits(capacity, fixed, slope, start, multiple):
    base = int(fixed * capacity)
    room = capacity - 20 * MIB - base
    assume(room > 0)
    largest = found(
        Search(capacity, start=start, multiple=multiple), lambda value: base + slope * value
    )
    assert largest.value == room // slope // multiple * multiple
    assert largest.stopped == "memory"
    assert largest.monotonic
    assert len(largest.probes) == len(set(tried(largest)))
    assert all(value % multiple == 0 for value in tried(largest))


@given(slope=st.integers(1, GIB), limit=st.integers(1, 1000), start=st.integers(1, 2000))
def test_no_value_over_the_limit_is_tried(slope, limit, start):
    largest = found(Search(8 * GIB, start=start, limit=limit), lambda value: slope * value)
    assert largest.value == min(limit, (8 * GIB - 20 * MIB) // slope)
    assert max(tried(largest)) <= limit
    assert largest.stopped == ("limit" if largest.value == limit else "memory")


def test_a_line_takes_four_probes_and_one_more_that_it_is_one():
    """From 1 as far as is safe, to where the line ends, one more; then a multiple of eight."""
    largest = found(Search(8 * GIB), lambda value: 500 * MIB + 150 * MIB * value)
    assert tried(largest) == [1, 12, 51, 52, 56]
    assert largest.value == 51


def test_an_optimizers_peak_that_hides_the_slope_does_not_mislead():
    search = Search(8 * GIB)
    while (value := search.next()) is not None:
        passes = GIB + 100 * MIB * value
        peak = max(passes, 3 * GIB)
        fits = peak + 20 * MIB <= 8 * GIB
        search.add(Probe(value, fits, Peak(peak, peak + 20 * MIB), Peak(passes, passes)))
    assert search.result().value == 71
    assert len(search.probes) <= 6


@pytest.mark.parametrize("power", [2, 3])
def test_what_is_no_line_is_found_all_the_same(power):
    largest = found(Search(8 * GIB), lambda value: 1000 * value**power)
    assert largest.value == int((8 * GIB - 20 * MIB) // 1000) ** (1 / power) // 1


def test_not_even_the_least_fits():
    largest = found(Search(GIB, start=8), lambda value: 2 * GIB)
    assert tried(largest) == [8, 4, 2, 1]
    assert (largest.value, largest.peak) == (0, Peak(0, 0))
    assert str(largest) == "not even 1 fits in 1024.00 MiB (4 probes)"


@pytest.mark.parametrize(
    ("start", "most", "down"),
    [
        (128, 120, [128, 115]),
        (128, 110, [128, 115, 102]),
        (128, 60, [128, 115, 102, 6]),
        (4096, 15, [4096, 3686, 3276, 204, 12]),
        (63, 60, [63, 31]),
    ],
)
def test_below_a_first_value_that_does_not_fit_near_then_far_is_tried(start, most, down):
    search = Search(most * GIB, start=start)
    largest = found(search, lambda value: GIB * value - 20 * MIB)
    assert tried(largest)[: len(down)] == down
    assert largest.value == most


def test_a_value_that_memory_does_not_depend_on_ends_the_search():
    largest = found(Search(GIB), lambda value: 100 * MIB)
    assert largest.stopped == "no growth"
    assert len(largest.probes) == 4
    assert "memory does not grow with the value" in str(largest)


# -- what is not monotonic --


def test_a_multiple_of_eight_that_fits_above_what_does_not_is_found():
    def allocated(value):
        return (100 if value % 8 else 90) * MIB * value

    largest = found(Search(8 * GIB, start=3), allocated)
    assert largest.value == 88
    assert not largest.monotonic
    assert largest.holes == (82,)
    assert "7940.00 MiB reserved, though 82 does not; 89 does not (" in str(largest)


def test_values_that_take_less_than_smaller_ones_are_told():
    probes = [Probe(8, True, Peak(100, 100)), Probe(12, True, Peak(90, 100))]
    largest = Largest(12, GIB, (*probes, Probe(13, False, Peak(0, 0))), "memory")
    assert largest.dips == (12,)
    assert not largest.monotonic
    assert "12 take less than smaller values" in str(largest)


# -- words --


def test_the_answer_in_a_sentence():
    search = Search(8 * GIB, limit=40)
    assert str(found(search, lambda value: value * 100 * MIB)) == (
        "40 fits in 8192.00 MiB with 4020.00 MiB reserved, the limit of the search (2 probes)"
    )
    search = Search(8 * GIB)
    search.add(Probe(1, True, Peak(GIB, GIB)))
    assert str(search.result(interrupted=True)) == "interrupted after 1 probe: 1 fits"
    assert str(Search(GIB).result(interrupted=True)) == (
        "interrupted after 0 probes: no value is known to fit"
    )


# -- the line --


def test_the_line_through_two_points_is_exact():
    assert fit_line({8: 100, 16: 180}) == MemoryLine(20, 10, 0)
    assert fit_line({8: 100, 16: 180}).at(32) == 340


@given(st.integers(0, 10**12), st.integers(0, 10**9), st.sets(st.integers(1, 10**4), min_size=2))
def test_points_on_a_line_give_it_back(fixed, slope, values):
    assert fit_line({it: fixed + slope * it for it in values}) == MemoryLine(fixed, slope, 0)


def test_the_residual_is_that_of_the_farthest_point():
    line = fit_line({1: 0, 2: 30, 3: 0})
    assert (line.fixed, line.slope, line.residual) == (10, 0, 20)
