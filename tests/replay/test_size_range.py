"""The ends of a range of peaks."""

from pytest_gpumem.measurement import Peak
from pytest_gpumem.replay.size_range import widened


def test_more_may_be_reserved_up_to_the_cap():
    assert widened(Peak(90, 100), 25, 1000, full=False) == Peak(90, 125)
    assert widened(Peak(90, 100), 25, 110, full=False) == Peak(90, 110)
    assert widened(Peak(90, 100), 25, 80, full=False) == Peak(90, 100)


def test_where_the_largest_did_not_fit_the_memory_may_be_full():
    assert widened(Peak(90, 100), 25, 1000, full=True) == Peak(1000, 1000)
