"""JSON reports, whatever was done to them: refused as such, or as good as any in every output."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from helpers.damage import DEPTHS, JSON, damaged, damages, nested, places
from helpers.damage import with_value as text_with_value
from helpers.sample_report import sample, with_updates
from helpers.styled_lines import plain_text
from helpers.terminal_results import sections
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.errors import ReportError
from pytest_gpumem.report.item_properties import properties
from pytest_gpumem.report.json_report import dumps, loads
from pytest_gpumem.report.markdown import markdown
from pytest_gpumem.report.page.html import page
from pytest_gpumem.report.parts import session_words
from pytest_gpumem.report.terminal.summary_table import summary_table
from pytest_gpumem.report.text import printable

WHEN = "2026-11-21T15:06:07Z"
TEXT = dumps(replace(sample(), updates=with_updates()), created=WHEN)
PLACES = list(places(json.loads(TEXT)))


def read_or_refused(text):
    """A report is an error, or stays what it is and is shown."""
    saved = None
    with suppress(ReportError):
        saved = loads(text, "report.json")
    if saved is None:
        return
    again = dumps(saved.report, created=saved.created, gpumem=saved.gpumem)
    reread = loads(again, "report.json")
    # Errors of updates are exceptions, which are never equal.
    assert dumps(reread.report, created=reread.created, gpumem=reread.gpumem) == again
    assert reread.results == saved.results
    shown = [
        sections(saved.results),
        plain_text([session_words.counts(saved.results)]),
        printable(str(session_words.next_command(saved.results))),
        plain_text(summary_table(saved.results, 2, 80)),
        markdown(saved.report),
        page(saved.report),
    ]
    assert all(isinstance(value, (str, int)) for _, value in properties(saved.results))
    assert "\x1b" not in "".join(shown)
    assert "<script>alert(9)" not in shown[-1]
    "".join(shown).encode()


def test_as_it_is():
    read_or_refused(TEXT)


def test_no_text_about_updated_baselines_reaches_a_terminal_raw():
    for place in PLACES:
        if place[:1] == ("updates",) and place[-1] in {"device_key", "module", "test", "part"}:
            saved = loads(text_with_value(TEXT, "\x1b[31mred\udc80", place), "report.json")
            shown = markdown(saved.report)
            assert "\x1b" not in shown
            shown.encode()


def test_no_category_of_a_cause_reaches_a_terminal_raw():
    for place in PLACES:
        if place[-3:-2] == ("causes",) and place[-1] == "category":
            read_or_refused(text_with_value(TEXT, "\x1b[31mred", place))


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_an_error_or_a_report(content):
    read_or_refused(content)


@settings(deadline=None, max_examples=100)
@given(damages(len(TEXT)))
def test_any_damage_to_a_report_is_an_error_or_a_report(pieces):
    read_or_refused(damaged(TEXT.encode(), pieces))


@settings(deadline=None, max_examples=100)
@given(JSON | st.just(...), st.sampled_from(PLACES[1:]))
def test_any_json_in_any_place_is_an_error_or_a_report(value, place):
    read_or_refused(text_with_value(TEXT, value, place))


def test_failures_without_causes_are_a_report():
    for number, result in enumerate(json.loads(TEXT)["results"]):
        if result["verdict"].get("causes"):
            read_or_refused(text_with_value(TEXT, [], ("results", number, "verdict", "causes")))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("bracket", "[{")
def test_brackets_of_any_depth_are_an_error(bracket, depth):
    for place in PLACES[:: max(len(PLACES) // 40, 1)]:
        read_or_refused(nested(TEXT, place, depth, bracket=bracket))


HOSTILE = "\x1b[31m\udc80<script>alert(9)</script>"


def found_at(place):
    """What stands at a place of the report."""
    found = json.loads(TEXT)
    for name in place:
        found = found[name]
    return found


FIELDS = {tuple(name for name in place if isinstance(name, str)): place for place in PLACES[1:]}
TEXTS = [place for place in FIELDS.values() if isinstance(found_at(place), str)]


@pytest.mark.parametrize("place", TEXTS, ids=lambda place: ".".join(map(str, place)))
def test_text_of_any_field_is_an_error_or_shown_without_control_characters(place):
    """A device's kind was shown as it was: a baseline's folder has its name, too."""
    read_or_refused(text_with_value(TEXT, HOSTILE, place))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(PLACES[1:]), st.data())
def test_values_of_other_places_are_an_error_or_a_report(place, data):
    """Such as are of the same kind, and figures that no device has."""
    found = found_at(place)
    alike = [0, 2**63 - 1] if type(found) is int else ["", HOSTILE]
    value = data.draw(st.sampled_from({int: alike, str: alike}.get(type(found), [[], {}, None])))
    read_or_refused(text_with_value(TEXT, value, place))
