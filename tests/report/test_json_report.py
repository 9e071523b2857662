"""The JSON report: what is written is read again, and what is no report is refused by name."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace

import pytest
from helpers.paths import GOLD, ROOT
from helpers.sample_report import (
    EVIL,
    LINES,
    T4,
    attribution,
    entry,
    measured,
    result,
    sample,
    with_updates,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem import __version__
from pytest_gpumem.baselines.paths import Key
from pytest_gpumem.baselines.store import EntryUpdate, UpdateSummary
from pytest_gpumem.errors import ReportError
from pytest_gpumem.judge.result import Result
from pytest_gpumem.judge.verdict import Comparison, Kind, Lookup, Verdict
from pytest_gpumem.measurement import (
    Attribution,
    BaselineEntry,
    DeviceInfo,
    Keeper,
    Measurement,
    Peak,
    Slope,
)
from pytest_gpumem.report import json_schema
from pytest_gpumem.report.json_report import dumps, loads, read_report, schema
from pytest_gpumem.report.model import Origin, OwnOutcome, Report, Shard

DOCS = ROOT / "docs"
WHEN = "2026-11-21T15:06:07Z"


def without_drawings(one):
    """A result without the data of drawings: timelines, and the courses of baselines."""
    entry = one.baseline_entry
    if entry is not None:
        breakdowns = tuple(replace(it, course=()) for it in entry.breakdowns)
        one = replace(one, baseline_entry=replace(entry, breakdowns=breakdowns))
    if one.measurement is None:
        return one
    found = tuple(replace(it, timeline=None) for it in one.measurement.attributions)
    return replace(one, measurement=replace(one.measurement, attributions=found))


def test_what_was_written_is_read_and_written_again_to_the_byte():
    slope = Slope((8, 16), -5, 100)
    scaled = replace(measured(attribution(layers=1)), slope=slope)
    known = replace(entry(attribution(layers=1)), slope=slope)
    more = (result("test_scaled", scaled, Lookup(known)),)
    report = replace(sample(more), updates=with_updates(), options={"--gpumem-card": "T4"})
    text = dumps(report, created=WHEN)
    read = loads(text, "report.json")
    assert dumps(read.report, created=read.created, gpumem=read.gpumem) == text
    assert read.results == tuple(map(without_drawings, report.results))
    assert (read.created, read.gpumem) == (WHEN, __version__)
    assert read.report.options == report.options
    assert read.report.remarks == report.remarks
    assert read.report.updates.files == report.updates.files
    (error,) = read.report.updates.errors
    assert str(error) == "b.json: is a folder; move it"
    assert [it.new for it in read.report.updates.removed] == [None]


KEPT = Keeper(*LINES[0][:2], "activations", "local variable best (train.py:11)", 1 << 20, 1, (2,))


def few_results():
    """A report with causes, one of them with a keeper."""
    regressed, *others = sample().results[1:6:2]
    (cause, *causes) = regressed.verdict.causes
    kept = replace(cause, keepers=(KEPT,), reasons=(f"kept by {KEPT.text}, of step 2",))
    verdict = replace(regressed.verdict, causes=(kept, *causes))
    first, *others = others
    attributions = tuple(replace(it, keepers=(KEPT,)) for it in first.measurement.attributions)
    held = replace(first, measurement=replace(first.measurement, attributions=attributions))
    results = (replace(regressed, verdict=verdict), held, *others)
    return replace(sample(), results=results, updates=with_updates())


ORIGIN = Origin(
    commit="0123456789abcdef0123456789abcdef01234567",
    root="packages/core",
    folder="baselines/core",
    shard=Shard(3, 8),
    artifact="gpu-memory-3",
    collected=("tests/test_a.py",),
    unseen=(Key("virtual-T4", "tests/test_a.py", "test_gone"),),
)


OWN = OwnOutcome("tests/test_a.py::test_wrong", "failed", "assert 1 == 3", "E   assert 1 == 3")


def test_a_report_of_format_1_is_read_for_good():
    """Files that others keep: a change of this one wants a new format."""
    path, few = GOLD / "report.json", few_results()
    results = tuple(replace(it, outcome="passed") for it in few.results)
    few = replace(few, results=results, origins=(ORIGIN,), own_outcomes=(OWN,))
    if os.environ.get("GPUMEM_REWRITE_GOLD") == "1":
        path.write_text(dumps(few, created=WHEN, gpumem="0.1.0"), encoding="utf-8")
    read = read_report(path)
    assert read.report.origins == (ORIGIN,)
    assert read.report.own_outcomes == (OWN,)
    assert read.results == tuple(map(without_drawings, few.results))
    assert dumps(read.report, created=WHEN, gpumem="0.1.0") == path.read_text(encoding="utf-8")


def test_a_note_without_a_kind_is_refused():
    plain = json.loads(dumps(Report((sample().results[1],)), created=WHEN))
    notes = plain["results"][0]["verdict"]["notes"]
    notes.append("of no kind")
    with pytest.raises(ReportError, match=f"{len(notes)} notes have {len(notes) - 1} kinds - at"):
        loads(json.dumps(plain), "r.json")


TEXT = dumps(Report((result("t", measured(attribution(layers=1))),)), created=WHEN)
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([{}])


@settings(deadline=None)
@given(st.data())
def test_whatever_a_report_holds_it_is_read_or_refused(data):
    """One value anywhere in it is another."""
    plain = json.loads(TEXT)
    node = plain
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = data.draw(st.sampled_from(keys))
        if not node[key] or not isinstance(node[key], (dict, list)) or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(VALUES)
    try:
        read = loads(json.dumps(plain), "it")
    except ReportError:
        return
    again = dumps(read.report, created=read.created, gpumem=read.gpumem)
    assert loads(again, "it") == read


@settings(deadline=None)
@given(st.text() | st.binary())
def test_whatever_a_file_holds_it_is_refused(content):
    with pytest.raises(ReportError):
        loads(content, "it")


def test_a_report_of_nothing_is_one():
    text = dumps(Report(), created=WHEN)
    assert loads(text, "it").report == Report()
    assert json.loads(text)["results"] == []


def test_every_result_is_a_line():
    lines = dumps(sample(), created=WHEN).splitlines()
    found = [json.loads(line.rstrip(",")) for line in lines if line.startswith('  {"nodeid"')]
    assert [it["nodeid"] for it in found] == [it.nodeid for it in sample().results]


def test_figures_are_whole_bytes_and_names_are_what_the_documentation_says():
    (one,) = json.loads(dumps(Report((sample().results[1],)), created=WHEN))["results"]
    (peak,) = one["measurement"]["peaks"]
    assert peak["allocated"] > one["baseline"]["peaks"][0]["allocated"] > 2**30
    assert one["verdict"]["kind"] == "regressed"
    assert one["verdict"]["failed"] is True
    assert one["baselined"] is True
    assert one["measurement"]["device"]["key"] == "virtual-T4"
    (found,) = one["measurement"]["attributions"]
    assert sum(found["breakdown"]["categories"].values()) == peak["allocated"]
    assert found["breakdown"]["sites"][0]["bytes"] > 0
    assert "timeline" not in found


def test_a_file_that_is_no_report_is_not_to_be_written_over():
    """A page, a log or a baseline that was named by mistake; what was cut short is."""
    for name, content in (("all.html", "<html>"), ("b.json", '{"format": 1, "module": "a.py"}')):
        with pytest.raises(ReportError) as caught:
            loads(content, name)
        assert str(caught.value).endswith("; name a file that pytest --gpumem-json=PATH wrote")
    with pytest.raises(ReportError, match="; write the report again with pytest --gpumem-json=r"):
        loads('{"format": 1, "gpu', "r.json")


def test_names_of_markup_and_of_no_unicode_travel():
    odd = result(f"{EVIL}\udc80", measured(attribution(layers=1)))
    text = dumps(Report((odd,)), created=WHEN)
    assert text.isascii()
    assert loads(text.encode(), "it").results == (without_drawings(odd),)


NOTED = {"notes", "note_texts", "note_kinds"}
HINTED = NOTED | {"hints", "hint_texts", "hint_kinds"}
"""JSON has the sentences and their kinds apart; notes have a part's beginning, and garbage"""


@pytest.mark.parametrize(
    ("record", "form", "left_out"),
    [
        (Result, json_schema.ResultJson, set()),
        (Verdict, json_schema.VerdictJson, NOTED | {"advice", "remedy", "command_text"}),
        (Comparison, json_schema.ComparisonJson, set()),
        (Measurement, json_schema.MeasurementJson, HINTED | {"began", "garbage"}),
        (DeviceInfo, json_schema.DeviceJson, {"key"}),
        (
            Attribution,
            json_schema.AttributionJson,
            HINTED | {"timeline", "segments", "earlier", "kept"},
        ),
        (BaselineEntry, json_schema.BaselineJson, set()),
        (EntryUpdate, json_schema.EntryUpdateJson, set()),
        (OwnOutcome, json_schema.OwnOutcomeJson, set()),
        (UpdateSummary, json_schema.UpdatesJson, set()),
    ],
)
def test_no_field_of_a_record_is_forgotten(record, form, left_out):
    names = {it.name for it in fields(record)}
    assert names ^ set(form.__struct_fields__) == left_out


def with_sorted_choices(value):
    """A part of a schema with its choices in one order: versions of msgspec have several."""
    if isinstance(value, dict):
        value = {key: with_sorted_choices(each) for key, each in value.items()}
        if "anyOf" in value:
            value["anyOf"].sort(key=json.dumps)
        return value
    return [with_sorted_choices(each) for each in value] if isinstance(value, list) else value


def test_the_schema_in_the_documentation_is_up_to_date():
    path = DOCS / "reference/report-schema.json"
    text = json.dumps(schema(), indent=1) + "\n"
    if os.environ.get("GPUMEM_REWRITE_GOLD") == "1":
        path.write_text(text, encoding="utf-8")
    documented = json.loads(path.read_text(encoding="utf-8"))
    assert with_sorted_choices(documented) == with_sorted_choices(json.loads(text))


def test_the_documentation_names_every_field():
    text = (DOCS / "reference/json-report.md").read_text(encoding="utf-8")
    forms = (
        json_schema.Document,
        json_schema.ResultJson,
        json_schema.VerdictJson,
        json_schema.MeasurementJson,
    )
    names = {name for form in forms for name in form.__struct_encode_fields__}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def changed(**values):
    return json.dumps({**json.loads(dumps(Report(), created=WHEN)), **values})


def first(**values):
    """A report whose first result has other values."""
    plain = json.loads(dumps(Report((result("t", measured(attribution(layers=1))),)), created=WHEN))
    plain["results"][0].update(values)
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("{", "is not JSON: Expecting property name"),
        ("<<<<<<< HEAD\n", "has a merge-conflict marker (<<<<<<<) in line 1"),
        (b"\xff\xfe{}", "is not UTF-8 text: byte 0xff at 0"),
        ("[" * 100_000, "is nested too deeply for a report"),
        ("[]", 'it has no "format" and "gpumem"'),
        ("{}", 'it has no "format" and "gpumem"'),
        ('{"format": 1, "module": "tests/test_a.py"}', 'it has no "format" and "gpumem"'),
        (changed(format=True), 'it has no "format" and "gpumem"'),
        (changed(format=0), 'it has no "format" and "gpumem"'),
        (changed(format=2), "a newer pytest-gpumem (format 2; this one reads 1)"),
        (changed(more=1), "unknown field `more`"),
        (changed(results={}), "Expected `array`, got `object` - at `$.results`"),
        (first(nodeid=None), "Expected `str`, got `null` - at `$.results[0].nodeid`"),
        (
            first(batch_size=1.5),
            "Expected `int | null`, got `float` - at `$.results[0].batch_size`",
        ),
        (first(batch_size=-1), ">= 0 - at `$.results[0].batch_size`"),
        (first(batch_size=2**63), "<= 9223372036854775807 - at `$.results[0].batch_size`"),
        ('{"format": 1, "format": 1, "gpumem": ""}', '"format" occurs twice in one object'),
        ('{"format": NaN, "gpumem": ""}', "NaN is not a number of bytes"),
        (
            '{"format": 1, "gpumem": ' + "9" * 5000 + "}",
            "is not a report of pytest-gpumem: Exceeds",
        ),
    ],
)
def test_what_is_no_report_is_refused(text, problem):
    with pytest.raises(ReportError) as caught:
        loads(text, "the/report.json")
    assert problem in caught.value.problem
    assert caught.value.given == "the/report.json"
    assert caught.value.remedy


def test_a_file_is_read(tmp_path):
    path = tmp_path / "report.json"
    path.write_bytes(b"\xef\xbb\xbf" + dumps(sample(), created=WHEN).encode())  # an editor's mark
    assert read_report(path).results == tuple(map(without_drawings, sample().results))


def test_a_file_that_is_not_there_and_a_folder_are_refused(tmp_path):
    for path, problem in ((tmp_path / "no.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ReportError, match=problem) as caught:
            read_report(path)
        assert caught.value.given == str(path)
    with pytest.raises(ReportError, match="null byte"):
        read_report("a\0b")


@pytest.mark.parametrize("peak", [Peak(-1, 0), Peak(1.5, 0), Peak(2**63, 0), Peak(None, 0)])
def test_a_hooks_figure_that_is_none_is_refused_when_written(peak):
    found = Measurement(T4, entry(attribution(layers=1)).provenance, (peak,), (), ())
    one = Result("test_a.py::test_it", Verdict(Kind.WITHIN, failed=False, headline=""), found)
    with pytest.raises(ReportError, match="hooks that change measurements") as caught:
        dumps(Report((one,)), created=WHEN)
    assert caught.value.given == "the result of test_a.py::test_it"
