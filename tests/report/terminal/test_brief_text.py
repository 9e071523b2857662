"""A failed test in at most fifteen lines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.noted import noted
from helpers.terminal_results import (
    BROKEN,
    CACHE_GREW,
    GROWN,
    LINE,
    MODULE,
    NASTY,
    NEW,
    OVER,
    TOO_LARGE,
    TOO_LARGE_BY,
    TWO_DEVICES,
    WITHIN,
    grown,
    matches_gold,
)

from pytest_gpumem.judge.verdict import UpdateCommand
from pytest_gpumem.measurement import Attribution, Breakdown
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.report.terminal.brief_text import MAX_LINES, brief_failures, repeated_lines
from pytest_gpumem.session.terminal_summary import Screen, failure_lines
from pytest_gpumem.sizes import MIB


def text(*results, **how):
    return "\n".join(line.text for line in brief_failures(results, **how))


EXPLAINED = Attribution(
    Breakdown({"activations": 64 * MIB, "parameters": 36 * MIB}, 0, (LINE,)),
    hints=noted("batch size 16 fits, with 740.00 MiB of 1024.00 MiB reserved"),
)


@pytest.mark.parametrize(
    ("name", "failed"),
    [
        ("regressed", GROWN),
        ("regressed_reserved", CACHE_GREW),
        ("regressed_devices", TWO_DEVICES),
        ("explained", grown("test_train_step")),
        ("over_budget", OVER),
        ("out_of_memory", TOO_LARGE_BY),
        ("broken_baseline", BROKEN),
    ],
)
def test_a_failure_is_brief_and_fits_eighty_columns(name, failed):
    failed = replace(failed, verdict=replace(failed.verdict, failed=True))
    brief = text(failed)
    assert matches_gold(f"brief_{name}", brief, width=90)
    assert len(brief.splitlines()) <= MAX_LINES
    assert brief.startswith(f"{failed.verdict.kind}: ")


def test_more_notes_than_fit_are_counted():
    notes = noted(*(f"note {i} {'of many words ' * 8}" for i in range(20)))
    noisy = replace(GROWN, verdict=replace(GROWN.verdict, notes=notes))
    brief = text(noisy)
    assert len(brief.splitlines()) <= MAX_LINES
    shown = brief.count("note: ")
    assert shown
    assert f"({20 - shown} more notes and hints with -v)" in brief
    assert brief.endswith(GROWN.verdict.command_text)


def test_hints_are_for_what_does_not_fit_or_explain_a_change():
    measurement = replace(TOO_LARGE.measurement, attributions=(EXPLAINED,))
    assert "hint: batch size 16 fits" in text(replace(TOO_LARGE, measurement=measurement))
    changed = grown("test")
    kept = "activations of 64.00 MiB were still allocated at the peak: a tensor keeps their graph"
    hints = (*EXPLAINED.hints, Note(NoteKind.STILL_HELD, kept))
    attribution = replace(changed.measurement.attributions[0], hints=hints)
    measurement = replace(changed.measurement, attributions=(attribution,))
    brief = text(replace(changed, measurement=measurement))
    assert "hint: activations of 64.00 MiB were still allocated" in brief
    assert brief.count("hint: ") == 1


def test_what_holds_most_is_named_where_a_limit_was_met():
    measurement = replace(TOO_LARGE.measurement, attributions=(EXPLAINED,))
    brief = text(replace(TOO_LARGE, measurement=measurement))
    assert "  64.00 MiB  activations  model.py:29 in Tiny.forward: return self.head(x)" in brief
    assert "requested at examples/test_mlp.py:31 in step" in brief


def test_a_command_comes_once_below_the_parts():
    part = replace(GROWN, part="forward")
    brief = text(GROWN, WITHIN, part)
    assert brief.startswith("part forward: regressed: ")
    assert brief.count(GROWN.verdict.command_text) == 1
    assert brief.endswith(GROWN.verdict.command_text)
    assert brief_failures([WITHIN, replace(NEW, verdict=WITHIN.verdict)]) == []


def test_the_headline_and_the_command_have_styles():
    lines = brief_failures([GROWN])
    assert lines[0].style == "headline"
    assert (lines[-1].text, lines[-1].style) == (f"    {GROWN.verdict.command}", "command")
    assert {line.style for line in lines[2:-1]} == {""}


def test_the_same_cause_is_shown_once():
    moved = [grown(f"test_{i}") for i in range(4)]
    lines = repeated_lines([*moved, GROWN])
    assert set(lines) == {f"{MODULE}::test_{i}" for i in (1, 2, 3)}
    (first, second) = lines[f"{MODULE}::test_1"]
    assert f"{first.text} {second.text}" == (
        f"regressed: same cause as {MODULE}::test_0: model.py:29 (Tiny.forward)"
    )


def test_control_characters_are_shown_and_ascii_is_kept_to():
    verdict = replace(
        GROWN.verdict,
        notes=noted(NASTY),
        advice=f"run {NASTY}",
        command=UpdateCommand(targets=(NASTY,)),
    )
    nasty = replace(grown("test", line=replace(LINE, code=NASTY)), verdict=verdict, budget=NASTY)
    (lines,) = failure_lines([nasty], Screen(200, "ascii", interactive=True), 0).values()
    brief = "\n".join(line.text for line in lines)
    assert brief.count("\\x1b[31mred") >= 3
    assert brief.isascii()
    assert all(line.isprintable() for line in brief.splitlines())
