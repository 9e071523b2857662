"""The terminal's table: its columns, groups, widths and notes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from helpers.noted import noted
from helpers.styled_lines import plain_text
from helpers.terminal_results import (
    ALL,
    BEFORE,
    GROWN,
    H200,
    MODULE,
    NEW,
    TOO_LARGE,
    TOO_LARGE_BY,
    WITHIN,
    known,
    matches_gold,
    measured,
    peak,
    result,
    section,
)

from pytest_gpumem.judge.result import Result
from pytest_gpumem.judge.verdict import Kind, Verdict
from pytest_gpumem.report.parts import session_words
from pytest_gpumem.report.parts.styles import encodable_lines
from pytest_gpumem.report.terminal.summary_table import FEW_ROWS, summary_table
from pytest_gpumem.report.text import shortened
from pytest_gpumem.session.terminal_summary import Screen, failure_lines


def table_text(*arguments, **options):
    """The table without its styles."""
    return plain_text(summary_table(*arguments, **options))


@pytest.mark.parametrize(("verbosity", "name"), [(0, "default"), (2, "vv")])
def test_the_table_says_more_with_each_v(verbosity, name):
    assert matches_gold(f"summary_{name}", table_text(ALL, verbosity, 80))


def test_the_table_is_grouped_where_there_are_several_devices_or_files():
    there = result("test_h200", measured(peak(100, 120), device=H200))
    part = replace(NEW, part="forward")
    elsewhere = replace(NEW, nodeid="tests/test_other.py::test_with_a_name", part="alone")
    text = table_text([NEW, part, there, elsewhere], 0, 80)
    assert matches_gold("summary_devices", text)


@pytest.mark.parametrize("verbosity", [-1, -2])
def test_quiet_has_no_table(verbosity):
    assert table_text(ALL, verbosity, 80) == ""


def test_many_results_list_those_that_are_not_within_unless_asked():
    few = [replace(WITHIN, nodeid=f"t.py::test_{i}") for i in range(FEW_ROWS)]
    assert "test_24" in table_text(few, 0, 80)
    many = [*few, GROWN]
    text = table_text(many, 0, 80)
    assert "test_24" not in text
    assert "(1 of 26, -v lists all)" in " ".join(text.split())
    assert "test_24" in table_text(many, 1, 80)
    assert table_text([*few, WITHIN], 0, 80) == ""
    assert table_text([], 2, 80) == ""


def test_tests_of_several_modules_are_named_with_them():
    there = replace(WITHIN, nodeid="t.py::test_there")
    text = table_text([WITHIN, there], 0, 80)
    assert "\nt.py\n  test_there " in text
    assert text.startswith("Peak memory in MiB on virtual-T4\n")


def test_what_failed_as_its_xfail_says_is_told_apart():
    expected = replace(TOO_LARGE, expected=True)
    assert "out of memory (xfail)" in table_text([expected], 0, 80)
    spans = session_words.counts([TOO_LARGE, expected, WITHIN])
    assert plain_text([spans]) == "1 ok, 2 out of memory (1 as expected)"


@pytest.mark.parametrize("width", [80, 90, 120, 200])
def test_the_table_fits_the_width_and_uses_it(width):
    widest = max(map(len, table_text(ALL, 1, width).splitlines()))
    natural = max(map(len, table_text(ALL, 1, 1000).splitlines()))
    assert widest == min(width, natural)


def test_a_narrow_terminal_leaves_a_name_its_end():
    assert "…st_resnet50 " in table_text(ALL, 1, 20)


def test_nothing_but_ascii_where_asked():
    named = replace(GROWN, nodeid=f"{MODULE}::test_größe_" + "x" * 80)
    table = plain_text(encodable_lines(summary_table([named], 2, 80), "ascii"))
    assert table.isascii()
    assert "...xxx" in table
    screen = Screen(80, "ascii", interactive=True)
    for verbosity in (0, 1):
        (lines,) = failure_lines([replace(GROWN, part="größe")], screen, verbosity).values()
        assert all(line.text.isascii() for line in lines)


def test_a_shortened_name_counts_columns_and_not_characters():
    assert shortened("測" * 40, 12) == "…測測測測測"
    assert shortened("e\u0301" * 12, 12) == "e\u0301" * 12
    assert shortened("x" * 13, 12) == "…" + "x" * 11


@pytest.mark.parametrize(
    ("used", "percent"), [(8192, "100%"), (8191.99, "99%"), (8192.01, "101%"), (0.01, "0%")]
)
def test_use_of_a_budget_is_never_rounded_across_it(used, percent):
    text = table_text([result("test", measured(peak(0, used)))], 1, 80)
    assert f" {percent} " in text


def test_out_of_memory_shows_more_than_what_it_got_where_its_need_is_unknown():
    text = table_text([TOO_LARGE], 0, 80)
    assert ">7987.00" in text
    assert ">8180.00" in text
    assert ">100%" in text
    assert ">" not in table_text([TOO_LARGE_BY], 0, 80)


def test_a_result_without_a_measurement_is_listed():
    bare = Result("t.py::test", Verdict(Kind.LEAKED, failed=True, headline="leaked: 1.00 MiB"))
    assert "leaked" in table_text([bare], 2, 80)
    assert section(bare).startswith("leaked: 1.00 MiB\n")


def test_notes_of_passing_tests_are_told_once_with_their_number():
    moved = result(
        "test_a", measured(peak(2978.05, 3294)), known(peak(2978.05, 3294), provenance=BEFORE)
    )
    text = table_text([moved, moved, GROWN], 1, 200)
    assert text.count("baseline made with torch 2.14.0") == 1
    assert "measured with torch 2.15.0, CUDA 13.2 (2 tests)" in text
    noisy = [
        result(f"test_{word}", measured(peak(1, 1), notes=noted(word)), known(peak(1, 1)))
        for word in "abcdefghijkl"
    ]
    assert table_text(noisy, 1, 80).endswith("\nnote: and 2 more notes (-vv lists all)")


def test_of_notes_that_differ_in_sizes_alone_one_stands_for_all():
    """The one that most tests have."""
    texts = ["4.50 KiB to 10.50 KiB: cuFFT"] * 2 + ["18.00 KiB to 1,052.00 KiB: cuFFT", "t.py:7"]
    texts.append("t.py:8")  # lines, which differ as such
    results = [
        result(f"test_{i}", measured(peak(1, 1), notes=noted(text)), known(peak(1, 1)))
        for i, text in enumerate(texts)
    ]
    text = table_text(results, 1, 80)
    assert "note: 4.50 KiB to 10.50 KiB: cuFFT (2 tests; 1 test with other sizes)\n" in text
    assert "1,052" not in text
    assert text.endswith("note: t.py:7 (1 test)\nnote: t.py:8 (1 test)")
    assert "1,052.00 KiB: cuFFT (1 test)" in table_text(results, 2, 80)


def test_different_provenances_are_told_apart():
    other = replace(WITHIN, measurement=replace(WITHIN.measurement, provenance=BEFORE))
    text = table_text([WITHIN, WITHIN, other], 2, 200)
    assert "made with: torch 2.15.0, CUDA 13.2, cuDNN 9.19.0, driver virtual, " in text
    assert "allocator settings none (2 tests)\nmade with: torch 2.14.0" in text


def test_ten_thousand_tests_are_listed_in_seconds():
    """About 1.3 s of CPU on a slow core; what grows with the square takes minutes."""
    many = [replace(GROWN, nodeid=f"{MODULE}::test_{i}") for i in range(10_000)]
    start = time.process_time()
    text = table_text(many, 1, 80)
    assert time.process_time() - start < 6
    assert "test_9999 " in text
