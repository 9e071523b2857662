"""Whether memory stops growing from step to step."""

import pytest

from pytest_gpumem.step_growth import growth


@pytest.mark.parametrize(
    "held",
    [
        [10, 30, 30, 30],
        [10, 30, 20, 20],
        [10, 30, 31, 31],  # it stopped
        [10, 30, 30, 31, 31],
        [10, 30, 35, 31, 40],  # shapes differ
        [10, 20],
        [10],
        [],
    ],
)
def test_what_stops_growing(held):
    assert growth(held) is None


@pytest.mark.parametrize(
    ("held", "rises"),
    [
        ([10, 30, 31, 32], (1, 1)),
        ([10, 30, 30, 31], (0, 1)),  # nobody knows whether it stops
        ([10, 30, 30, 31, 31, 32, 32], (0, 1, 0, 1, 0)),
        ([50, 30, 31, 35, 36], (1, 4, 1)),
    ],
)
def test_what_grows(held, rises):
    found = growth(held)
    assert found.rises == rises
    assert (found.initial, found.final) == (held[1], held[-1])
