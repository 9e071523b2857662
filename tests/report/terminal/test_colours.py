"""Colours of the session's text: they change no letter of it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import pytest
from helpers.sources import TWO_TESTS
from helpers.terminal_results import (
    GROWN,
    NEW,
    TOO_LARGE,
    WITHIN,
    measured,
    peak,
    result,
)

from pytest_gpumem.judge.verdict import Kind, Lookup, Policy
from pytest_gpumem.report.parts import session_words
from pytest_gpumem.report.parts.styles import Style
from pytest_gpumem.report.terminal.failure_text import failure_section
from pytest_gpumem.report.terminal.summary_table import summary_table

ESCAPE = re.compile("\x1b\\[[\\d;]*m")


def styles_of(lines):
    """The stretches that have a style."""
    return {span.text: span.style for line in lines for span in line if span.style}


def test_words_of_verdicts_have_styles():
    expected = replace(TOO_LARGE, expected=True)
    recorded = result("test_recorded", measured(peak(1, 1)), Lookup(), policy=Policy(updating=True))
    results = [WITHIN, GROWN, expected, NEW, recorded]
    assert styles_of(summary_table(results, 1, 80)) == {
        "ok": "good",
        "regressed": "bad",
        "out of memory (xfail)": "open",
        "no baseline": "open",
        "recorded": "good",
    }
    assert styles_of([session_words.counts(results)]) == {
        "1 ok": "good",
        "1 regressed": "bad",
        "1 out of memory (1 as expected)": "bad",
        "1 without baseline": "open",
        "1 recorded": "good",
    }


def test_a_test_of_the_name_of_a_verdict_has_none():
    named = replace(WITHIN, nodeid="t.py::test_x  regressed")
    assert styles_of(summary_table([named], 1, 80)) == {"ok": "good"}


def test_every_kind_has_a_style():
    assert {kind.tone for kind in Kind} < set(get_args(Style))


def test_a_failure_in_full_has_its_headline_and_its_command():
    lines = failure_section(GROWN)
    assert [line.style for line in lines[:2]] == ["headline", "headline"]
    assert [line.text.split()[0] for line in lines if line.style == "command"] == ["pytest"]
    assert {line.style for line in lines[3:]} == {"", "command"}


@pytest.mark.parametrize("verbosity", ["-v", "--color=auto"])
def test_colour_is_where_the_terminal_has_it_and_the_text_is_the_same(
    suite, monkeypatch, verbosity
):
    for name in ("NO_COLOR", "FORCE_COLOR", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)

    def shown(*options):
        out = suite.run(verbosity, *options, source=TWO_TESTS).out
        return re.sub(r"in \d+\.\d+s.*", "", out).replace("=", "")

    plain, colours = shown("--color=no"), shown("--color=yes")
    assert not ESCAPE.search(plain)
    assert ESCAPE.sub("", colours) == plain
    for words in (r"\x1b\[31mover budget\x1b", r"\x1b\[33m\d without baseline\x1b"):
        assert re.search(words, colours)
    assert re.search(r"\x1b\[1mpytest test_it.py::test_fits ", colours)
    assert re.search(r"\x1b\[31m\x1b\[1m(?:part part: )?over budget: ", colours)
    if verbosity == "--color=auto":
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert ESCAPE.sub("", shown()) == plain
        assert "\x1b[31mover budget" in shown()
        monkeypatch.setenv("NO_COLOR", "1")
        assert not ESCAPE.search(shown())
