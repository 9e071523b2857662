"""Colours of the session's text: they change no letter of it."""

from __future__ import annotations

import re

import pytest
from helpers.sources import TWO_TESTS
from helpers.terminal_results import GROWN

from pytest_gpumem.judge.verdict import WORDS, Kind
from pytest_gpumem.report.terminal.colours import TONES, styled
from pytest_gpumem.report.terminal.failure_text import failure_section

ESCAPE = re.compile("\x1b\\[[\\d;]*m")


@pytest.mark.parametrize(
    ("line", "stretches"),
    [
        ("test_a   100.00   +9.0%  regressed", {"regressed": "bad"}),
        ("test_a   100.00   +9.0%  over budget (xfail)", {"over budget (xfail)": "open"}),
        ("test_ok  100.00   0  ok", {"ok": "good"}),
        (
            "gpumem: 2 ok, 1 regressed (1 as expected), 3 without baseline, 1 recorded",
            {
                "2 ok": "good",
                "1 regressed (1 as expected)": "bad",
                "3 without baseline": "open",
                "1 recorded": "good",
            },
        ),
        ("gpumem: to record baselines: pytest a.py", {"pytest a.py": "command"}),
        ("    pytest a.py", {"pytest a.py": "command"}),
        ("gpumem: baselines: 2 ok", {}),
        ("      kept by local variable  regressed (x)", {}),
        ("", {}),
    ],
)
def test_words_of_verdicts_and_commands_have_styles(line, stretches):
    parts = list(styled(line))
    assert "".join(text for text, _ in parts) == line
    assert {text: style for text, style in parts if style} == stretches


def test_every_kind_has_a_style():
    assert {WORDS.get(kind, str(kind)) for kind in Kind} <= TONES.keys()


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
