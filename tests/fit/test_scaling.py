"""Memory as a line over the batch size, and what is not on it."""

from pytest_gpumem.fit.scaling import Prediction, Scaling, grows_evenly, uneven
from pytest_gpumem.measurement import Breakdown, Peak, Site, Slope

MIB = 1 << 20


def points(**allocated):
    return {int(size[1:]): Peak(mib * MIB, 2 * mib * MIB) for size, mib in allocated.items()}


def test_fixed_and_per_sample_are_those_of_the_line():
    scaling = Scaling.of(points(n16=180, n8=100, n32=340))
    assert (scaling.fixed, scaling.per_sample, scaling.residual) == (20 * MIB, 10 * MIB, 0)
    assert scaling.reserved.slope == 20 * MIB
    assert scaling.at(64) == 660 * MIB
    assert scaling.slope == Slope((8, 16, 32), 20 * MIB, 10 * MIB)
    assert str(scaling) == (
        "20.00 MiB and 10.00 MiB a sample allocated, at most 0 B off at 8, 16, 32"
    )


def test_an_allocators_rounding_is_even_and_a_curve_is_not():
    assert grows_evenly(Scaling.of(points(n8=100, n16=183, n32=340)))
    assert not grows_evenly(Scaling.of(points(n8=64, n16=256, n32=1024)))


def test_a_prediction_is_held_to_what_a_run_took():
    scaling = Scaling.of(points(n8=100, n16=180))
    right = scaling.predicted(Prediction(32, scaling.at(32), 400 * MIB))
    assert right.prediction.error == -0.15
    assert str(right).endswith("; predicted 340.00 MiB at 32, it took 400.00 MiB (-15.00%)")
    over = scaling.predicted(Prediction(64, scaling.at(64), None))
    assert over.prediction.error is None
    assert str(over).endswith("; predicted 660.00 MiB at 64, which does not fit")


def site(line, mib, category="activations"):
    return Site("model.py", line, "f", "x = x", "Net", category, mib * MIB, 1)


def test_the_lines_are_named_whose_memory_is_not_on_a_line():
    breakdowns = {
        size: Breakdown(
            {},
            0,
            (site(3, size), site(7, size * size), site(9, size * size // 8), site(9, 5, "other")),
        )
        for size in (8, 16, 32)
    }
    assert uneven(breakdowns) == (
        "model.py:7 (f), activations: 64.00 MiB at 8, 256.00 MiB at 16, 1024.00 MiB at 32",
        "model.py:9 (f), activations: 8.00 MiB at 8, 32.00 MiB at 16, 128.00 MiB at 32",
    )


def test_two_sizes_say_nothing_about_lines():
    breakdowns = {size: Breakdown({}, 0, (site(7, size * size),)) for size in (8, 16)}
    assert uneven(breakdowns) == ()
    assert uneven({}) == ()
