"""Whether memory still grows when the last step ends."""

from itertools import accumulate

import pytest

from pytest_gpumem.judge.comparison import MIN_STEPS, growth

LENGTHS = (*range(MIN_STEPS, 24), 40, 100, 200)


def filled(steps, filling):
    """Levels of memory that rises in each of the first steps."""
    return [min(step, filling) for step in range(1, steps + 1)]


@pytest.mark.parametrize("steps", [8, 9, 20, 40, 200])
def test_a_buffer_that_is_full_after_four_steps_is_no_growth(steps):
    assert growth(filled(steps, 4)) is None


@pytest.mark.parametrize("steps", LENGTHS)
def test_what_a_warm_up_of_half_the_steps_fills_is_no_growth(steps):
    assert growth(filled(steps, (steps + 1) // 2)) is None


@pytest.mark.parametrize("steps", LENGTHS)
def test_what_fills_once_is_no_growth_in_whatever_step(steps):
    for step in range(steps):
        assert growth([10] * step + [30] * (steps - step)) is None


@pytest.mark.parametrize("steps", LENGTHS)
def test_a_leak_in_each_step_is_growth_of_the_last_half(steps):
    grown = growth(range(1, steps + 1))
    assert grown == ((steps + 1) // 2, steps, (1,) * (steps // 2))


@pytest.mark.parametrize("steps", LENGTHS)
def test_a_leak_in_each_kth_of_4_k_steps_is_growth_wherever_it_begins(steps):
    for k in range(1, steps // 4 + 1):
        for first in range(k):
            rises = [step % k == first for step in range(steps)]
            assert growth([*accumulate(rises)]) is not None, (k, first)


@pytest.mark.parametrize("steps", LENGTHS)
def test_a_leak_that_grows_is_growth(steps):
    assert growth([step * step for step in range(steps)]) is not None


@pytest.mark.parametrize("steps", LENGTHS)
def test_memory_that_comes_and_goes_is_no_growth(steps):
    for period in range(2, steps):
        assert growth([step % period for step in range(steps)]) is None or period > steps // 2


def test_a_leak_is_seen_beside_memory_that_comes_and_goes_if_it_is_larger():
    come_and_go = [0, 3, 1, 2, 3, 0, 2, 1, 3, 0, 1, 2]
    assert growth(come_and_go) is None
    leaking = [level + 2 * step for step, level in enumerate(come_and_go)]
    assert growth(leaking) is not None
    assert growth([level + step // 4 for step, level in enumerate(come_and_go)]) is None


@pytest.mark.parametrize("levels", [[], [1], [1, 2, 3], [10, 30, 30, 31], [10, 30, 20, 20]])
def test_too_few_steps_or_a_rise_in_the_last_alone_tell_nothing(levels):
    assert growth(levels) is None
