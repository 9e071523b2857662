"""Sizes and tolerances: read strictly, printed for people, and read back."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.errors import SpecError
from pytest_gpumem.sizes import (
    GIB,
    KIB,
    MIB,
    Tolerance,
    duration,
    format_size,
    gib,
    parse_size,
    parse_tolerance,
    shown,
)

ANY_BYTES = st.integers(-(2**60), 2**60)
UNIT_BYTES = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
SIZE_LIKE = st.text("0123456789.,+-%eE_ \tkKmMgGiIbB", max_size=60)


class Unprintable:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError


NoList = type("list", (), {})  # reprlib goes by the name, up to Python 3.11


# parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1.5GiB", 3 * 2**29),
        ("64 MiB", 64 * 2**20),
        ("512KiB", 512 * 2**10),
        ("2TiB", 2**41),
        ("8,519,680 B", 8_519_680),
        ("1,024.5 KiB", 1_049_088),
        ("0B", 0),
        ("+512.00 MiB", 2**29),
        ("-8.00 KiB", -8192),
        ("  7 B\n", 7),
    ],
)
def test_size_with_a_unit_is_read_as_bytes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1GB", 10**9),
        ("1GiB", 2**30),
        ("1MB", 10**6),
        ("1MiB", 2**20),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("1TB", 10**12),
    ],
)
def test_decimal_and_binary_units_are_never_confused(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["3gib", "3GIB", "3Gib", "3giB"])
def test_case_of_a_unit_is_free(text: str) -> None:
    assert parse_size(text) == 3 * GIB


@pytest.mark.parametrize(("text", "nbytes"), [("0.5B", 0), ("1.5B", 2), ("2.5B", 2), ("-1.5B", -2)])
def test_fraction_of_a_byte_is_rounded_half_to_even(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


def test_sizes_beyond_the_precision_of_a_float_are_exact() -> None:
    assert parse_size("9007199254740993 B") == 2**53 + 1


def test_number_without_a_unit_is_refused_and_both_readings_are_offered() -> None:
    with pytest.raises(SpecError) as caught:
        parse_size("123")
    assert str(caught.value) == (
        "'123': this number has no unit; write '123 MiB', or '123 B' for bytes"
    )


@pytest.mark.parametrize("text", ["8G", "8M", "8 bits", "8PiB", "8K"])
def test_unknown_unit_is_refused_and_the_known_ones_are_named(text: str) -> None:
    with pytest.raises(SpecError, match=r"not a unit of size; use B, KiB, .* GB, TB") as caught:
        parse_size(text)
    assert caught.value.given == repr(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "nan GiB",
        "inf",
        "infGiB",
        "1e3MiB",
        "1,5 GiB",
        "1,50,000 B",
        "1_000 B",
        "1.2.3 MiB",
        "1.MiB",
        "--1B",
        "- 1B",
        "1 MiB 2",
        "٣ MiB",  # an Arabic three
        "1 \N{KELVIN SIGN}iB",  # a letter that lower-cases to k
        "9" * 5000 + "B",
    ],
)
def test_what_is_not_a_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SpecError, match=r"not a size; write a number and its unit, such as '1.5G"):
        parse_size(text)


@given(st.text() | SIZE_LIKE)
def test_any_text_is_a_size_or_a_spec_error(text: str) -> None:
    with suppress(SpecError):
        assert type(parse_size(text)) is int


# format_size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (8_519_680, "8.12 MiB"),
        (3_122_711_757, "2978.05 MiB"),
        (10 * GIB - 10 * KIB, "10239.99 MiB"),
        (10 * GIB, "10.00 GiB"),
        (80 * GIB + GIB // 2, "80.50 GiB"),
        (-8192, "-8.00 KiB"),
    ],
)
def test_size_is_printed_in_the_unit_that_suits_it(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(MIB - 1, "1.00 MiB"), (10 * GIB - 1, "10.00 GiB"), (1 - MIB, "-1.00 MiB")]
)
def test_size_that_rounds_up_to_the_next_unit_is_printed_in_it(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(2**29, "+512.00 MiB"), (-8192, "-8.00 KiB"), (0, "+0 B"), (-1, "-1 B")]
)
def test_difference_is_printed_with_its_sign(nbytes: int, text: str) -> None:
    assert format_size(nbytes, signed=True) == text


@given(ANY_BYTES, st.booleans())
def test_every_printed_size_is_read_back_to_within_its_rounding(nbytes: int, signed: bool) -> None:
    text = format_size(nbytes, signed=signed)
    unit = UNIT_BYTES[text.split()[1]]
    assert abs(parse_size(text) - nbytes) <= Fraction(unit, 200) + Fraction(1, 2)


@given(ANY_BYTES)
def test_reading_back_changes_no_printed_size(nbytes: int) -> None:
    text = format_size(nbytes, signed=True)
    assert format_size(parse_size(text), signed=True) == text


@given(st.integers(-1023, 1023))
def test_sizes_below_a_kib_are_read_back_exactly(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


@given(ANY_BYTES, ANY_BYTES)
def test_printed_sizes_keep_their_order(one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert parse_size(format_size(small)) <= parse_size(format_size(large))


# gib


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [(8, 8 * GIB), (0.5, GIB // 2), (0.1, 107_374_182), (1.1, 1_181_116_006), (1e9, 10**9 * GIB)],
)
def test_number_of_gib_is_whole_bytes(value: float, nbytes: int) -> None:
    assert gib(value) == nbytes


def test_gib_takes_a_float_as_the_decimal_that_was_written() -> None:
    assert gib(987_654_321.7) == 9_876_543_217 * GIB // 10


def test_whole_gib_beyond_the_precision_of_a_float_are_exact() -> None:
    assert gib(2**53 + 1) == (2**53 + 1) * GIB


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_gib_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(SpecError, match="not a finite number"):
        gib(value)


# Tolerance


def test_allowance_is_the_larger_of_the_two_parts() -> None:
    tolerance = Tolerance(Fraction(1, 50), 64 * MIB)
    assert tolerance.allowance(GIB) == 64 * MIB
    assert tolerance.allowance(10 * GIB) == 10 * GIB // 50


def test_allowance_is_whole_bytes_rounded_down() -> None:
    assert Tolerance(Fraction(1, 50), 0).allowance(99) == 1


@pytest.mark.parametrize(
    ("tolerance", "text"),
    [
        (Tolerance(Fraction(1, 50), 0), "2%"),
        (Tolerance(Fraction(1, 1000), 0), "0.1%"),
        (Tolerance(Fraction(10), 0), "1000%"),
        (Tolerance(Fraction(0), 64 * MIB), "64.00 MiB"),
        (Tolerance(Fraction(1, 50), 64 * MIB), "2%, 64.00 MiB"),
        (Tolerance(Fraction(0), 64 * MIB + 1), "67,108,865 B"),
        (Tolerance(Fraction(0), 0), "0%"),
    ],
)
def test_tolerance_is_printed_as_it_is_written(tolerance: Tolerance, text: str) -> None:
    assert str(tolerance) == text
    assert parse_tolerance(text) == tolerance


@given(st.integers(0, 10**9), st.integers(0, 10**15))
def test_every_printed_tolerance_is_read_back_exactly(millionths: int, absolute: int) -> None:
    tolerance = Tolerance(Fraction(millionths, 10**6), absolute)
    assert parse_tolerance(str(tolerance)) == tolerance


def test_tolerance_that_is_no_finite_decimal_is_printed_and_read_back_nearly() -> None:
    third = Tolerance(Fraction(1, 3), 0)
    assert abs(parse_tolerance(str(third)).relative - third.relative) < Fraction(1, 10**20)


@pytest.mark.parametrize(
    "value",
    [
        "2%, 64MiB",
        "64 MiB,2 %",
        "2%,65,536 KiB",
        "67,108,864 B, 2%",
        ("2%", "64MiB"),
        ["64MiB", "2.0%"],
        Tolerance(Fraction(1, 50), 64 * MIB),
    ],
)
def test_tolerance_takes_both_parts_in_any_order_and_container(value: object) -> None:
    assert parse_tolerance(value) == Tolerance(Fraction(1, 50), 64 * MIB)


def test_comma_after_a_percentage_always_ends_it() -> None:
    assert parse_tolerance("2%,640MiB") == Tolerance(Fraction(1, 50), 640 * MIB)


def test_percentage_may_exceed_a_hundred() -> None:
    assert parse_tolerance("250%").allowance(100) == 250


@pytest.mark.parametrize("value", ["0%", "0B", "0 MiB"])
def test_no_tolerance_at_all_can_be_said(value: str) -> None:
    assert parse_tolerance(value).allowance(GIB) == 0


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (0.02, "this is not a tolerance"),
        (0, "this is not a tolerance"),
        (True, "this is not a tolerance"),
        (None, "this is not a tolerance"),
        (float("nan"), "this is not a tolerance"),
        ({"2%"}, "this is not a tolerance"),
        ((), "this is not a tolerance"),
        ("", "'' is neither a percentage nor a size with its unit"),
        ("0", "'0' is neither a percentage nor a size with its unit"),
        ("2%, 64", "'64' is neither a percentage nor a size with its unit"),
        ("nan%", "'nan%' is neither a percentage nor a size with its unit"),
        (("2%", 64), "64 is neither a percentage nor a size with its unit"),
        ("-2%", "'-2%' is negative"),
        ("2%, -64MiB", "'-64MiB' is negative"),
        ("2%, 3%", "this has two percentages"),
        ("0%, 3%", "this has two percentages"),
        (("1MiB", "2MiB"), "this has two sizes"),
    ],
)
def test_bad_tolerance_is_refused_with_the_ways_to_write_one(value: object, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_tolerance(value)
    assert caught.value.given == shown(value)
    assert caught.value.problem == problem
    assert caught.value.remedy == (
        "write '2%', '64MiB', '2%, 64MiB' (the larger of the two), or their sum, '2% + 64MiB'"
    )


@settings(deadline=None)
@given(JUNK | SIZE_LIKE | st.lists(SIZE_LIKE) | st.builds(Unprintable))
def test_anything_is_a_tolerance_or_a_spec_error(value: object) -> None:
    try:
        tolerance = parse_tolerance(value)
    except SpecError:
        return
    assert tolerance.relative >= 0
    assert tolerance.absolute >= 0


# shown


def test_short_value_is_shown_as_python_writes_it() -> None:
    assert shown("8GiB") == "'8GiB'"


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, [["y" * 1000] * 100] * 100, 10**4000, 10**6000, Unprintable(), NoList()],
    ids=["text", "nested", "integer", "integer beyond printing", "no repr", "no list"],
)
def test_hostile_value_is_shown_briefly(value: object) -> None:
    assert 1 < len(shown(value)) < 100


def test_long_text_is_shown_by_its_beginning_and_its_end() -> None:
    text = shown("first" + "x" * 1000 + "last")
    assert text.startswith("'first")
    assert text.endswith("last'")


def test_value_that_cannot_be_shown_is_shown_by_its_type() -> None:
    assert "Unprintable" in shown(Unprintable())


def test_value_is_shown_on_one_printable_line() -> None:
    class Coloured:
        def __repr__(self) -> str:
            return "two\n  lines \x1b[31m\ud800"

    assert shown(Coloured()) == "two lines [31m"


def test_a_tolerance_that_is_a_sum_allows_both_parts_together():
    for text in ("1% + 128MiB", "128 MiB+1%", " 1%+128.00 MiB "):
        tolerance = parse_tolerance(text)
        assert tolerance.allowance(1000 * MIB) == 138 * MIB
        assert str(tolerance) == "1% + 128.00 MiB"
        assert parse_tolerance(str(tolerance)) == tolerance
    assert parse_tolerance("1%, +128 MiB").allowance(1000 * MIB) == 128 * MIB
    for text in ("1% + 2%", "1MiB + 2MiB", "1% + 128", "1% + 1% + 1MiB", "1% +"):
        with pytest.raises(SpecError):
            parse_tolerance(text)


def test_time_is_told_in_one_unit():
    assert [duration(it) for it in (0.2, 45, 89, 90, 3600, 5399, 9000)] == [
        *("1 s", "45 s", "89 s", "2 min", "60 min", "90 min", "2 h"),
    ]
