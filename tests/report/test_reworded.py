"""Sentences may be worded anew: code reads the kinds of notes and verdicts, and never their words.

In reworded results each letter of each sentence is another one, so that the words are gone and the
lines stay as long as they are.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest
from helpers.noted import noted
from helpers.sample_report import sample
from helpers.styled_lines import plain_text
from helpers.terminal_results import (
    ALL,
    GROWN,
    TOO_LARGE,
    WITHIN,
    grown,
    known,
    measured,
    peak,
    result,
)

from pytest_gpumem.judge.verdict import Policy
from pytest_gpumem.measurement import Holder, Stayed
from pytest_gpumem.notes import Note, NoteKind, Severity, notes_of, ranked
from pytest_gpumem.report.github import error_lines
from pytest_gpumem.report.markdown import markdown
from pytest_gpumem.report.model import Report
from pytest_gpumem.report.parts import session_words
from pytest_gpumem.report.terminal import session_text
from pytest_gpumem.report.terminal.brief_text import brief_failures, repeated_lines
from pytest_gpumem.report.terminal.failure_text import failure_sections
from pytest_gpumem.report.terminal.summary_table import summary_table
from pytest_gpumem.report.terminal.toolchain_lead import lead_lines, short_texts


def letters(text):
    """A text of the same length without its words."""
    return re.sub(r"[a-zA-Z]", "x", text)


def reworded(outcome):
    """A result of which no sentence is as it was."""

    def notes(of):
        return tuple(replace(note, text=letters(note.text)) for note in of)

    verdict = outcome.verdict
    causes = tuple(
        replace(cause, reasons=tuple(map(letters, cause.reasons))) for cause in verdict.causes
    )
    lead = verdict.lead and replace(verdict.lead, sentence=letters(verdict.lead.sentence))
    verdict = replace(
        verdict,
        headline=letters(verdict.headline),
        notes=notes(verdict.notes),
        advice=letters(verdict.advice),
        causes=causes,
        lead=lead,
    )
    measurement = outcome.measurement
    stayed = measurement.stayed
    if stayed is not None:
        holders = tuple(replace(holder, text=letters(holder.text)) for holder in stayed.holders)
        stayed = replace(stayed, holders=holders)
    attributions = tuple(
        replace(it, notes=notes(it.notes), hints=notes(it.hints)) for it in measurement.attributions
    )
    measurement = replace(
        measurement,
        notes=notes(measurement.notes),
        hints=notes(measurement.hints),
        attributions=attributions,
        stayed=stayed,
    )
    return replace(outcome, verdict=verdict, measurement=measurement)


HINTS = (
    Note(NoteKind.NEXT_STEP, "only one step ran with a new Adam"),
    Note(NoteKind.STILL_HELD, "gradients of 4.00 MiB were still allocated at the peak"),
    Note(NoteKind.AUTOCAST, "torch.autocast would roughly halve them"),
)


def with_hints(outcome):
    """A result with a note that one of its hints tells as well."""
    fresh = Note(NoteKind.FRESH_OPTIMIZER, "only one step ran with a new Adam")
    notes = (*outcome.verdict.notes, fresh)
    measurement = replace(outcome.measurement, hints=HINTS)
    return replace(outcome, measurement=measurement, verdict=replace(outcome.verdict, notes=notes))


RECORDED = result("test_recorded", measured(peak(1, 1)), policy=Policy(updating=True))
REWRITTEN = result(
    "test_rewritten", measured(peak(900, 900)), known(peak(1, 1)), policy=Policy(updating=True)
)
LEAKED = replace(
    GROWN, measurement=replace(GROWN.measurement, stayed=Stayed(0, 9, (), (Holder("x", 9, 1),)))
)
RESULTS = [
    *ALL,
    *(grown(f"test_{i}") for i in range(4)),
    with_hints(TOO_LARGE),
    with_hints(GROWN),
    with_hints(WITHIN),
    RECORDED,
    REWRITTEN,
    LEAKED,
    *sample().results,
]


def of_terminal(results):
    """Yield the terminal's texts, with their styles."""
    for verbosity in (0, 1, 2):
        table = summary_table(results, verbosity, 80)
        yield plain_text(table), [span.style for line in table for span in line]
    lead = lead_lines(results)
    yield plain_text(lead), [span.style for line in lead for span in line]
    yield plain_text([session_words.counts(results)])
    yield plain_text([session_text.quiet_line(results)])
    yield str(session_words.next_command([one for one in results if one.verdict.command]))
    yield "\n".join(sorted(short_texts(results)))
    yield "\n".join(sorted(repeated_lines(results)))
    for render in (brief_failures, failure_sections):
        for one in results:
            lines = render([one])
            yield "\n".join(line.text for line in lines), [line.style for line in lines]


def without_words(texts):
    return [
        letters(text) if isinstance(text, str) else (letters(text[0]), text[1]) for text in texts
    ]


def test_reworded_sentences_change_nothing_but_their_words_on_the_terminal():
    plain, other = (
        without_words(of_terminal(results)) for results in (RESULTS, [*map(reworded, RESULTS)])
    )
    assert plain == other


def test_reworded_sentences_change_nothing_but_their_words_in_files(tmp_path):
    plain, other = (
        letters(markdown(Report(tuple(results)), when=""))
        for results in (RESULTS, [*map(reworded, RESULTS)])
    )
    assert plain == other
    plain, other = (
        [letters(line) for line in error_lines(results, root=tmp_path, workspace=tmp_path)]
        for results in (RESULTS, [*map(reworded, RESULTS)])
    )
    assert plain == other


SUITE = """
import warnings

@pytest.mark.gpu_memory
def test_measured():
    mib(100)

@pytest.mark.gpu_memory
def test_unused():
    pass

@pytest.mark.gpu_memory(max_gib=0.05)
def test_too_large():
    mib(100)

@pytest.mark.gpu_memory(max_leak_mib=0)
def test_leaks():
    KEPT.append(mib(8))

KEPT = []
"""


def test_a_session_whose_notes_are_reworded_is_the_same(suite, monkeypatch):
    """Recorded, unused, too large, leaking: what is written and what fails does not change."""

    def session(*options):
        done = suite.run(*options, source=SUITE)
        counts = [line for line in done.out.splitlines() if line.startswith("gpumem: ")]
        return done.outcomes, counts, suite.baselined()

    expected = [session("--gpumem-update-baselines"), session(), session("-q"), session("-v")]
    shutil.rmtree(suite.path / "baselines")
    make = Note.__init__
    monkeypatch.setattr(Note, "__init__", lambda note, kind, text: make(note, kind, letters(text)))
    again = [session("--gpumem-update-baselines"), session(), session("-q"), session("-v")]
    for plain, other in zip(expected, again, strict=True):
        assert other == plain
    _, counts, baselined = expected[0]
    assert "1 recorded" in " ".join(counts)
    assert set(baselined) == {"test_it.py::test_measured"}


# -- the order of notes --


def test_what_matters_most_comes_first():
    mixed = [Note(kind, "it") for kind in reversed(NoteKind)]
    assert [note.severity for note in ranked(mixed)] == sorted(note.severity for note in mixed)


@pytest.mark.parametrize("verbosity", [0, 1])
def test_a_warning_that_a_figure_may_be_wrong_is_never_hidden(verbosity):
    """Whatever else there is, and however many tests have it."""
    chatter = [noted(f"chatter {i:c}") for i in range(65, 95) for _ in range(3)]
    warnings = [
        notes_of(kind, [f"{kind} of test {i}"])
        for kind in NoteKind
        if kind.severity is Severity.FIGURE
        for i in "ab"
    ]
    results = [
        result(f"test_{i}", measured(peak(1, 1), notes=notes), known(peak(1, 1)))
        for i, notes in enumerate([*chatter, *warnings])
    ]
    text = plain_text(summary_table(results, 1, 80))
    for kind in NoteKind:
        assert (f"note: {kind} of test" in text) is (kind.severity is Severity.FIGURE)
    told = len(re.findall("^note: ", text, re.MULTILINE)) - 1
    assert text.endswith(f"note: and {30 + len(warnings) - told} more notes (-vv lists all)")
    assert "chatter ^" in plain_text(summary_table(results, 2, 80))
