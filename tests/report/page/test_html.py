"""The page as text: what is in it, that all of it is escaped, and that it needs nothing else.

How it looks and behaves is for tests/report/page/test_html_browser.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from helpers import sample_report
from helpers.html_pages import Page, keys_of, rows_of
from helpers.noted import noted
from helpers.sample_report import EVIL, MODULE, attribution, entry, many, measured, result, sample
from helpers.terminal_results import grown

from pytest_gpumem.breakdowns import site_rows
from pytest_gpumem.explain.lead import lead_of
from pytest_gpumem.judge.verdict import Kind, Lookup, Verdict
from pytest_gpumem.measurement import (
    Attribution,
    Breakdown,
    Holder,
    Keeper,
    Phase,
    Site,
    Stayed,
    Timeline,
)
from pytest_gpumem.report.model import OwnOutcome, Report, urgency
from pytest_gpumem.report.page import html, timeline_svg
from pytest_gpumem.report.page.html import MAX_OPEN, anchor, page
from pytest_gpumem.sizes import MIB

pytest.importorskip("jinja2", reason="pip install 'pytest-gpumem[html]'")


@pytest.fixture(scope="module")
def text():
    return page(sample(), when="2026-11-21 12:40 UTC")


@pytest.fixture(scope="module")
def parsed(text):
    return Page(text)


def section(report, name, parsed=None):
    """The text of one result's section."""
    parsed = parsed or Page(page(report))
    (it,) = [it for it in report.results if it.name == f"{MODULE}::{name}"]
    (found,) = parsed.texts("section", id=html.anchor(it))
    return found


def test_every_result_has_its_row_and_its_section(parsed):
    rows = parsed.texts("td", class_="verdict")
    assert rows == [
        "✕ out of memory",
        "✕ over budget",
        "✕ regressed",
        "✕ regressed",
        "✕ regressed (xfail)",
        "○ incomparable",
        "○ incomparable",
        "○ no baseline",
        "↓ improved",
        "✓ ok",
        "✓ ok",
        "✓ ok",
    ]
    links = [it.attributes["href"][1:] for it in parsed.all("a", class_="name")]
    assert len(set(links)) == len(sample().results)
    assert links == [it.attributes["id"] for it in parsed.all("section", class_="result")]
    counts = parsed.texts("ul", class_="counts")[0]
    assert counts.startswith("1 out of memory 1 over budget 2 regressed 1 regressed (xfail)")


def test_head_says_device_date_and_remarks(parsed):
    (head,) = parsed.texts("header", class_="page")
    assert "virtual GPU T4 (14.57 GiB, capability 7.5, 40 SMs)" in head
    assert "2026-11-21 12:40 UTC" in head
    assert "2 skipped: needs 4 devices, <b>this machine</b> has 1" in head


def test_its_table_begins_with_what_failed_and_why(parsed):
    causes = parsed.texts("span", class_="why")
    assert causes == [
        f"requested at {MODULE}:31 in step",
        "torch 2.14.0+cu130 -> 2.15.0+cu132, CUDA 13.0 -> 13.2",
        "parameters +237.50 MiB at src/model.py:41 (GPT.__init__)",
    ]
    failed = [f"#{anchor(it)}" for it in sorted(sample().results, key=urgency)[:4]]
    links = [it.attributes["href"] for it in parsed.all("a", class_="name")]
    assert links[:4] == failed
    (session,) = parsed.texts("details", class_="session")
    assert "2 skipped: " in session
    assert "baselines on virtual-T4: 8 of 10 compared" in session


def test_the_sentence_of_a_failure_stands_once(parsed):
    (main,) = parsed.texts("main")
    (head,) = parsed.texts("header", class_="page")
    failed = [it for it in sample().results if it.verdict.failed]
    findings = [it.verdict.headline.rpartition("; ")[2] for it in failed]
    assert len(set(findings)) > 2
    for finding in findings:
        assert main.count(finding) == findings.count(finding)
        assert finding not in head


def test_details_are_open_of_the_first_failures_alone(parsed):
    details = [it for it in parsed.all("details") if it.attributes.get("class") is None]
    opened = ["open" in it.attributes for it in details]
    assert opened == [True] * MAX_OPEN + [False] * (len(sample().results) - MAX_OPEN)
    fine = Page(page(Report(tuple(many(5)))))
    assert not any("open" in it.attributes for it in fine.all("details"))


def test_a_change_has_a_colour_where_it_is_beyond_its_tolerance_alone():
    plain = attribution()
    grown_little = entry(attribution(scale=0.9995))
    small = result("test_little", measured(plain), Lookup(grown_little))
    assert small.word == "ok"
    parsed = Page(page(Report((small, *sample().results))))
    moves = [it for it in parsed.all("span", class_="move") if "+" in "".join(it.text)]
    ways = {"".join(it.text): it.attributes["class"] for it in moves}
    assert ways.pop("+3.26 (+0.1%)") == "move"
    assert set(ways.values()) == {"move up"}


def own(word, name="test_loss", text="the <b>traceback</b>"):
    """A test that ended without a verdict."""
    return OwnOutcome(f"{MODULE}::{name}", word, f"{word} because x < 3", text)


def test_tests_that_got_no_verdict_are_listed_too():
    outcomes = (own("failed"), own("error"), own("skipped", "test_b", ""), own("xfailed", "test_c"))
    parsed = Page(page(replace(sample(), own_outcomes=outcomes)))
    verdicts = parsed.texts("td", class_="verdict")
    assert verdicts[3:6] == ["✕ regressed", "✕ failed", "✕ error"]
    assert verdicts[6:8] == ["✕ regressed (xfail)", "✕ xfailed"]
    assert verdicts[-1] == "○ skipped"
    assert len(verdicts) == len(sample().results) + 4
    (counts,) = parsed.texts("ul", class_="counts")
    assert "1 failed" in counts
    assert "1 error" in counts
    assert "failed because x < 3" in parsed.texts("span", class_="why")
    assert any("the <b>traceback</b>" in it for it in parsed.texts("pre"))
    assert [it.get("class") == "failed" for it in rows_of(parsed)][:7] == [True] * 6 + [False]
    assert len(set(parsed.ids)) == len(parsed.ids)


def test_a_page_of_tests_without_verdicts_alone_is_whole():
    parsed = Page(page(Report(own_outcomes=(own("failed"),))))
    assert parsed.texts("td", class_="verdict") == ["✕ failed"]
    assert "1 result" in parsed.texts("header", class_="page")[0]


def test_failures_of_one_cause_are_told_as_one():
    moved = tuple(grown(f"test_{i}") for i in range(7))
    (head,) = Page(page(Report(moved))).texts("header", class_="page")
    assert "7 of 7 failures share model.py:29 (Tiny.forward): activations +250.00 MiB" in head


def test_a_row_has_the_figures_of_the_terminals_table(parsed):
    (row,) = [it for it in parsed.texts("tr") if it.startswith(f"{MODULE}::test_gpt2_large")]
    assert f"requested at {MODULE}:31 in step" in row
    assert row[row.index("in step") :].split()[2:] == [
        *("virtual-T4", "8", "7368.73", "7400.00", "+847.73", "(+13.0%)", "181%"),
        *("✕", "out", "of", "memory"),
    ]


def kept(name, reason="kept by local variable best (train.py:11), step 1"):
    """A regression with a keeper of its first cause."""
    regressed = grown(name)
    cause = replace(regressed.verdict.causes[0], reasons=(reason,))
    return replace(regressed, verdict=replace(regressed.verdict, causes=(cause,)))


def test_a_failures_row_and_section_have_its_cause_and_its_keeper():
    parsed = Page(page(Report((kept("test_x"),))))
    (why,) = parsed.texts("span", class_="why")
    assert (
        why == "activations +250.00 MiB at model.py:29 (Tiny.forward); kept by local variable best "
        "(train.py:11), step 1"
    )
    (causes,) = parsed.texts("ul", class_="causes")
    assert causes.startswith("+250.00 MiB activations model.py:29 in Tiny.forward")
    assert "kept by local variable best (train.py:11), step 1" in causes
    (row,) = rows_of(parsed)
    assert row["data-group"] == "activations, model.py:29 (Tiny.forward)"
    assert "kept by local variable best" in row["data-cause"]


def test_a_row_names_a_keeper_once():
    regressed = kept("test_x")
    cause = regressed.verdict.causes[0]
    site = cause.site
    text = "local variable best (train.py:11)"
    keeper = Keeper(site.path, site.line, site.category, text, 250 * MIB, 1)
    cause = replace(cause, keepers=(keeper,))
    verdict = replace(regressed.verdict, causes=(cause,), lead=lead_of((cause,), growth=250 * MIB))
    (why,) = Page(page(Report((replace(regressed, verdict=verdict),)))).texts("span", class_="why")
    assert why.count("kept by") == 1


def test_a_leak_shows_what_stayed_and_who_holds_it_and_not_the_peaks_tables():
    stayed_site = site(7, 3 * MIB, path="cache.py", code="CACHE.append(x)")
    holder = Holder("global variable CACHE of <cache.py>", 3 * MIB, 3)
    measurement = replace(
        measured(attribution(layers=1)), stayed=Stayed(0, 3 * MIB, (stayed_site,), (holder,))
    )
    leak = result("test_leak", measurement)
    leak = replace(leak, verdict=Verdict(Kind.LEAKED, failed=True, headline="leaked"))
    told = section(Report((leak,)), "test_leak")
    assert "Still allocated after the test: 3.00 MiB" in told
    assert "global variable CACHE of <cache.py> 3.00 MiB 3" in told
    assert "cache.py:7 in f CACHE.append(x) other 3.00 MiB" in told
    assert "At the peak" not in told
    parsed = Page(page(Report((leak,))))
    (row,) = rows_of(parsed)
    assert row["data-group"] == "leaked, cache.py:7 (f)"
    assert parsed.texts("span", class_="why") == ["held by global variable CACHE of <cache.py>"]


def test_hints_are_in_the_section():
    hinted = replace(attribution(layers=1), hints=noted("under <autocast> 120.00 MiB less"))
    told = section(Report((result("test_x", measured(hinted)),)), "test_x")
    assert "under <autocast> 120.00 MiB less" in told


def test_tests_on_several_cards_have_a_table_of_them():
    results = [
        replace(result(f"test_x[{card}]", measured(attribution(layers=1))), card=card)
        for card in ("T4", "L4")
    ]
    (row,) = [
        text
        for text in Page(page(Report(tuple(results)))).texts("tr")
        if re.fullmatch(r"\S+::test_x \d+\.\d\d \d+\.\d\d", text)
    ]
    assert row


def test_tests_may_name_different_cards():
    results = [
        replace(result(f"{name}[{card}]", measured(attribution(layers=1))), card=card)
        for name, card in (("test_x", "T4"), ("test_x", "L4"), ("test_y", "L4"), ("test_y", "H100"))
    ]
    rows = Page(page(Report(tuple(results)))).texts("tr")
    for name in ("test_x", "test_y"):
        assert any(re.fullmatch(rf"\S+::{name}( \d+\.\d\d){{2}}", row.strip()) for row in rows)


def test_ids_are_unique_and_every_link_has_its_target(parsed):
    assert len(parsed.ids) == len(set(parsed.ids))
    links = [it.attributes["href"] for it in parsed.elements if "href" in it.attributes]
    assert {it for it in links if not it.startswith("#")} == {"data:,"}
    assert {it[1:] for it in links if it.startswith("#")} <= set(parsed.ids)
    for value in (it.attributes.get("clip-path") for it in parsed.elements):
        assert value is None or value[5:-1] in parsed.ids


def test_nothing_is_loaded_and_no_script_but_its_own_runs(text, parsed):
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert not [it for it in parsed.elements if {"src", "style", "srcset"} & set(it.attributes)]
    handlers = [name for it in parsed.elements for name in it.attributes if name.startswith("on")]
    assert handlers == []
    scripts = [it for it in parsed.all("script") if it.attributes.get("type") is None]
    styles = parsed.all("style")
    (meta,) = parsed.all("meta", **{"http-equiv": "Content-Security-Policy"})
    policy = meta.attributes["content"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert len(scripts) == len(styles) == 1
    for element in (*scripts, *styles):
        digest = hashlib.sha256("".join(element.text).encode()).digest()
        assert f"'sha256-{base64.b64encode(digest).decode()}'" in policy


def test_names_full_of_markup_are_shown_as_they_are(text, parsed):
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    shown = EVIL.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    names = [it for it in parsed.texts("a", class_="name") if "alert(2)" in it]
    assert names == [f"{MODULE}::{shown} (<img src=x onerror=alert(2)>)"]


EVERYWHERE = "<i>\x07&'\"\udc80"


def test_every_text_from_outside_is_escaped():
    """Source lines, modules, notes, the device, budgets and provenance are outside as well."""
    site = Site(EVERYWHERE, 3, EVERYWHERE, EVERYWHERE, EVERYWHERE, "other", 9, 1)
    found = Attribution(Breakdown({"other": 9}, 0, (site,)), None, noted(EVERYWHERE))
    plain = attribution(layers=1)
    taken = replace(
        measured(plain, notes=noted(EVERYWHERE)),
        device=replace(sample_report.T4, name=EVERYWHERE),
        provenance=replace(sample_report.NOW, driver=EVERYWHERE),
        attributions=(found,),
    )
    one = result("test_it", taken, Lookup(error=EVERYWHERE))
    one = replace(one, part=EVERYWHERE, budget=EVERYWHERE, location=(EVERYWHERE, 1))
    report = Report(
        (one,), device=EVERYWHERE, remarks=(EVERYWHERE,), options={EVERYWHERE: EVERYWHERE}
    )
    text = page(report, when=EVERYWHERE)
    text.encode()
    parsed = Page(text)
    assert parsed.all("i") == []
    assert "\x07" not in text
    assert text.count("&lt;i&gt;\\x07&amp;&#39;&#34;\\udc80") >= 15


def test_a_section_sets_categories_and_lines_beside_the_baseline(parsed):
    told = section(sample(), "test_gpt2_step_retains[8]", parsed)
    assert "peak allocated 6521.00 MiB 7368.73 MiB +847.73 MiB" in told
    assert "optimizer state 950.00 MiB 1073.50 MiB +123.50 MiB 15%" in told
    assert (
        "src/model.py:88 in Attention.forward GPT.transformer.h.*.attn "
        "att = (q @ k.transpose(-2, -1)) * self.scale "
        "activations 1801.38 MiB 2035.56 MiB +234.18 MiB 12" in told
    )
    assert "cuDNN's workspaces are taken as zero" in told
    assert "Next: if this is intended, run" in told
    assert "pytest 'tests/training/test_models.py::test_gpt2_step_retains[8]'" in told


def test_nothing_is_set_beside_a_baseline_that_was_not_compared_with(parsed):
    told = section(sample(), "test_with_more_data", parsed)
    assert "batch size changed from 4 to 8" in told
    assert "category now share" in told
    assert "baseline now difference" not in told


def test_out_of_memory_tells_what_was_held_and_what_is_needed(parsed):
    told = section(sample(), "test_gpt2_large", parsed)
    assert "512.00 MiB more when 3987.00 MiB were allocated, 4080.00 MiB reserved" in told
    assert f"memory refused at {MODULE}:31 in step" in told
    assert "budget baseline needed difference" in told


def test_each_of_several_devices_has_its_own(parsed):
    told = section(sample(), "test_data_parallel", parsed)
    assert "peak reserved, device 1" in told
    assert told.count("At the peak") == 2
    assert "Device 0" in told
    assert "Device 1" in told


def site(line, nbytes, **others):
    values = {"path": "a.py", "function": "f", "code": "x = y", "category": "other", **others}
    return Site(line=line, module="", nbytes=nbytes, blocks=1, **values)


def test_a_line_is_known_again_where_its_number_moved():
    before = Breakdown({"other": 10}, 0, (site(3, 10),))
    now = Breakdown({"other": 35}, 0, (site(4, 20), site(9, 10), site(5, 5, code="z")))
    rows = site_rows(now, before)
    assert [(it.site.line, it.baseline, it.nbytes, it.difference) for it in rows] == [
        (4, 10, 30, 20),
        (5, 0, 5, 5),
    ]


def test_a_line_is_not_called_new_where_the_baseline_keeps_the_largest_alone():
    before = Breakdown({"other": 100}, 0, (site(3, 90),))
    rows = site_rows(Breakdown({"other": 8}, 0, (site(5, 8, code="z"),)), before)
    assert [(it.baseline, it.nbytes, it.difference) for it in rows] == [
        (90, 0, -90),
        (None, 8, None),
    ]


def test_the_same_test_has_the_same_id_in_every_page_and_no_two_share_one():
    one, *others = many(3)
    twice = Page(page(Report((one, *others, one))))
    ids = [it.attributes["id"] for it in twice.all("section", class_="result")]
    assert len(set(ids)) == 4
    assert html.anchor(one) in Page(page(Report((others[1], one)))).ids


def test_a_page_without_results_says_so():
    assert "No test was measured." in Page(page(Report())).texts("main")[0]


def test_a_result_without_a_measurement_is_shown():
    one = replace(many(1)[0], measurement=None)
    assert Page(page(Report((one,)))).texts("td", class_="device") == ["no device"]


def test_a_page_of_many_results_shows_failures_then_what_moved():
    moved = [replace(it, nodeid=f"{it.nodeid}[moved]") for it in many(7, attributed=7, moved=True)]
    report = Report((*many(html.MAX_RESULTS), *moved))
    parsed = Page(page(report))
    names = parsed.texts("a", class_="name")
    assert len(names) == len(parsed.all("section", class_="result")) == html.MAX_RESULTS
    verdicts = parsed.texts("td", class_="verdict")
    assert verdicts == ["✕ regressed"] * 5 + ["✓ ok"] * (html.MAX_RESULTS - 5)
    assert ["[moved]" in name for name in names] == [False] * 5 + [True] * 7 + [False] * 488
    (head,) = parsed.texts("header", class_="page")
    assert "5 regressed 502 ok" in head
    assert "This page shows 500 of 507 results" in head
    assert "A JSON report has all results: --gpumem-json=gpumem.json." in head
    parsed = Page(page(report, json_name="all results.json"))
    assert parsed.texts("a", href="all%20results.json") == ["all results.json"]


def test_keys_sort_figures_as_numbers_and_what_is_missing_last():
    keys = {name: figures for name, *figures in keys_of(Page(page(sample())))}
    assert keys[f"{MODULE}::test_gpt2_large"][:7] == [
        "virtual-T4",
        8,
        7368.73,
        7400,
        None,
        847.73,
        181,
    ]
    assert keys[f"{MODULE}::test_on_another"][5:7] == [None, None]


# -- timelines --


def test_timelines_of_failures_are_drawn_first_and_the_others_say_so():
    parsed = Page(page(Report(tuple(many(109, attributed=109)))))
    assert len(parsed.all("svg", class_="timeline")) == html.MAX_DRAWN == 100
    assert parsed.texts("td", class_="verdict")[:3] == ["✕ regressed", "✕ regressed", "✓ ok"]
    told = parsed.texts("section", class_="result")
    assert ["run this test alone" in it for it in told] == [False] * 100 + [True] * 9


def test_a_timeline_is_drawn_once(monkeypatch):
    drawn = []
    draw = timeline_svg.draw

    def counted(held, limits, **options):
        drawn.append(held)
        return draw(held, limits, **options)

    monkeypatch.setattr(timeline_svg, "draw", counted)
    page(sample())
    assert len(drawn) == 12


def test_a_timelines_words_give_the_peak_its_categories_and_its_phase(parsed):
    labels = [it.attributes["aria-label"] for it in parsed.all("svg", role="img")]
    assert (
        "Peak allocated 7368.73 MiB in backward, with 7400.00 MiB reserved: parameters 536.75 MiB, "
        "buffers 13.56 MiB, optimizer state 1073.50 MiB" in labels[0]
    )


def drawn(timeline, *limits, **options):
    drawing = timeline_svg.draw(timeline, limits, **options)
    return Page(f"<svg>{drawing.svg}</svg>"), json.loads(drawing.data)


def test_a_drawing_has_phases_areas_reserved_and_the_peak():
    drawing = timeline_svg.draw(attribution().timeline)
    parsed = Page(f"<svg>{drawing.svg}</svg>")
    names = [it.attributes["class"] for it in parsed.all("g") if "class" in it.attributes]
    phases = [it for it in names if it.startswith("phase")]
    assert phases == ["phase forward", "phase backward", "phase optimizer"]
    areas = [it for it in names if it.startswith("area")]
    assert areas[0] == "area temporaries"  # the tallest is painted first
    assert areas[-1] == "area parameters"
    assert {"reserved", "peak", "pointer", "peak-label"} <= set(names)
    assert parsed.texts("g", class_="peak-label") == ["peak 6521.00 MiB"]
    texts = parsed.texts("text")
    assert {"forward", "backward", "optimizer", "MiB", "6000"} <= set(texts)
    assert parsed.ids == []
    assert not [it for it in parsed.elements if {"style", "stroke"} & set(it.attributes)]
    assert len(drawing.svg) < 20_000


def test_the_peak_is_drawn_at_its_height():
    """Of four points the third is the peak: half-way into the third quarter, at the top."""
    held = Timeline({"other": (0, 50 * MIB, 100 * MIB, 50 * MIB)}, (100 * MIB,) * 4, (), 2)
    parsed, _ = drawn(held)
    (plot,) = [it.attributes for it in parsed.all("svg") if it.attributes.get("class") == "plot"]
    left, top, width, height = (float(plot[name]) for name in ("x", "y", "width", "height"))
    (peak,) = [it.attributes for it in parsed.all("circle")]
    assert float(peak["cx"]) == pytest.approx(left + width * 2.5 / 4, abs=0.2)
    at = top + height * (1 - 1 / timeline_svg.HEADROOM)
    assert float(peak["cy"]) == pytest.approx(at, abs=0.2)
    (area,) = [it for it in parsed.elements if it.attributes.get("d", "").endswith("V1000H0z")]
    level = round(1000 * (1 - 1 / timeline_svg.HEADROOM))
    half = round(1000 * (1 - 0.5 / timeline_svg.HEADROOM))
    assert area.attributes["d"] == f"M0 1000H1V{half}H2V{level}H3V{half}H4V1000H0z"


@pytest.mark.parametrize(
    "held",
    [
        Timeline({}, (0,), (), 0),
        Timeline({"other": (5,)}, (5,), (Phase("forward", 0, 1),), 0),
        Timeline({"other": (1 << 40, 0)}, (1 << 41, 1 << 41), (Phase("optimizer", 1, 1),), 0),
    ],
)
def test_timelines_of_next_to_nothing_are_drawn(held):
    assert drawn(held)[0].all("g", class_="peak")


def names_of_phases(timeline):
    return [
        (it.attributes, "".join(it.text))
        for it in drawn(timeline)[0].all("text", class_="phase-name")
    ]


def test_narrow_phases_are_named_where_there_is_room():
    held = (Phase("forward", 0, 50), Phase("backward", 50, 95), Phase("optimizer", 95, 100))
    wide = Timeline({"other": (1,) * 100}, (1,) * 100, held, 0)
    assert [name for _, name in names_of_phases(wide)] == ["forward", "backward", "optimizer"]


@pytest.mark.parametrize("seed", range(20))
def test_names_of_phases_never_meet(seed):
    """Neither on a desktop nor, without those that are left out there, on a phone."""
    chooser = random.Random(seed)
    phases, start = [], 0
    while start < 100:
        end = start + chooser.choice([1, 2, 4, 9, 30])
        phases.append(Phase(chooser.choice(["forward", "backward", "optimizer"]), start, end))
        start = end + chooser.choice([0, 0, 1, 5])
    held = Timeline({"other": (1,) * start}, (1,) * start, tuple(phases), 0)
    names = names_of_phases(held)
    assert names
    for letter, out in ((timeline_svg.LETTER, ""), (timeline_svg.PHONE_LETTER, "wide")):
        places = [
            (float(it["x"]), len(name) * letter / 2)
            for it, name in names
            if not out or out not in it["class"]
        ]
        for (x, half), (next_x, next_half) in pairwise(sorted(places)):
            assert x + half < next_x - next_half


def test_limits_are_lines_and_those_far_above_stand_at_the_edge():
    held = Timeline({"other": (100 * MIB,)}, (100 * MIB,), (), 0)
    near = timeline_svg.LimitLine("budget", "budget reserved 120.00 MiB", 120 * MIB)
    far = timeline_svg.LimitLine("card", "T4 <14 GiB>", 14 << 30)
    parsed, _ = drawn(held, near, far)
    (line,) = parsed.all("g", class_="limit")
    assert line.attributes["class"] == "limit budget"
    assert parsed.texts("text", class_="limit-label") == [near.label, f"↑ {far.label}"]
    heights = [float(it.attributes["y"]) for it in parsed.all("text", class_="limit-label")]
    assert abs(heights[0] - heights[1]) >= timeline_svg.LINE_HEIGHT


def test_every_chart_has_the_cards_line_and_the_declared_budgets(parsed):
    labels = parsed.texts("text", class_="limit-label")
    charts = len(parsed.all("svg", class_="timeline"))
    assert sum(label.startswith(("↑ T4 ", "T4 ", "↑ H100 ")) for label in labels) == charts
    assert "budget reserved 4096.00 MiB" in labels
    assert "budget allocated 2560.00 MiB" in labels
    assert "baseline's peak 6521.00 MiB" in labels


def test_the_baselines_course_is_a_line_over_this_ones():
    levels = tuple(n * 10 * MIB for n in (1, 2, 3, 4))
    held = Timeline({"other": levels}, levels, (), 3)
    assert drawn(held)[0].all("g", class_="ghost") == []
    drawing, data = drawn(held, ghost=[20 * MIB, 10 * MIB])
    (group,) = re.findall('<g class="ghost">(.*?)</g>', drawing.source)
    top = timeline_svg.HEADROOM * 40
    low, high = (round(1000 * (1 - mib / top)) for mib in (20, 10))
    assert re.findall(' d="(.*?)"', group) == [f"M0 {low}H2V{high}H4"] * 2  # with its halo
    assert data["ghost"] == [20 * MIB, 10 * MIB]
    words = timeline_svg.draw(held, ghost=[10 * MIB, 20 * MIB]).label
    assert words.endswith(" The baseline had at most 20.00 MiB, after 50 %.")


def test_a_section_has_the_ghost_of_its_own_baseline_alone(parsed):
    for name, number in (
        ("test_gpt2_step_retains[8]", 1),
        ("test_gpt2_step", 0),
        ("test_on_another", 0),
    ):
        (one,) = [it for it in sample().results if it.name == f"{MODULE}::{name}"]
        (part,) = re.findall(
            rf'<section [^>]*id="{anchor(one)}".*?</section>', parsed.source, re.DOTALL
        )
        assert part.count('class="ghost"') == part.count('class="swatch ghost-line"') == number, (
            name
        )


def test_a_refused_request_is_drawn_where_the_limit_was_passed():
    levels = tuple(n * 10 * MIB for n in (1, 2, 3, 4, 5))
    held = Timeline({"other": levels}, levels, (), 4)
    refusal = timeline_svg.RefusedRequest(15 * MIB, 30 * MIB, 35 * MIB)
    (group,) = drawn(held, refusal=refusal)[0].all("g", class_="refused")
    assert (group.attributes["data-index"], "".join(group.text)) == ("3", "15.00 MiB refused here")
    (group,) = drawn(held, refusal=refusal._replace(cap=90 * MIB))[0].all("g", class_="refused")
    assert group.attributes["data-index"] == "4"


@pytest.mark.parametrize("early", [True, False])
def test_no_label_of_a_limit_meets_the_mark_of_a_refused_request(early):
    """They stand on the side without the peak: beyond a mark at this side's end."""
    levels = [index * MIB for index in range(1, 21)]
    levels = tuple(levels if early else levels[::-1])
    held = Timeline({"other": levels}, levels, (), levels.index(max(levels)))
    refusal = timeline_svg.RefusedRequest(MIB, 2 * MIB, 2 * MIB if early else 90 * MIB)
    limit = timeline_svg.LimitLine("budget", "budget reserved 2.00 MiB", 2 * MIB)
    with_mark = drawn(held, limit, refusal=refusal)[0]
    (label,), (without,) = (
        drawing.all("text", class_="budget") for drawing in (with_mark, drawn(held, limit)[0])
    )
    (path,) = (it.attributes["d"] for it in with_mark.all("path") if "m-4" in it.attributes["d"])
    x = float(re.search(r"M([\d.]+)", path)[1])
    places = [float(it.attributes["x"]) for it in (without, label)]
    anchor = label.attributes["text-anchor"]
    assert anchor == ("start" if early else "end")
    assert (places[0] < x < places[1]) if early else (places[1] < x < places[0])


def test_out_of_memory_has_its_refusal_in_its_section_alone(parsed):
    (group,) = parsed.texts("g", class_="refused")
    assert group == "512.00 MiB refused here"


def test_a_device_that_does_not_report_its_memory_has_no_line_of_it():
    """Nor is a refused request drawn at the step's beginning."""
    refused = (it for it in sample().results if it.measurement and it.measurement.out_of_memory)
    short = next(refused)
    device = replace(short.measurement.device, total_memory=0, context=0)
    rows = tuple(replace(row, budget=None) for row in short.verdict.comparisons)
    measurement = replace(short.measurement, device=device)
    verdict = replace(short.verdict, comparisons=rows)
    short = replace(short, measurement=measurement, verdict=verdict)
    assert [line for line in html.limits_of(short, 0) if line.kind == "card"] == []
    refusal = html.refusal_of(short, short.measurement.out_of_memory.device_index)
    assert refusal.cap == refusal.reserved > 0


def test_the_points_are_there_for_the_script():
    levels = (512, 1024, 1024, 0)
    lines = {"lines": ("a.py:1 in f", "b.py:2"), "line_of": (0, 0, 1, -1)}
    held = Timeline({"other": levels}, (2048,) * 4, (Phase("forward", 1, 3),), 1, **lines)
    assert drawn(held)[1] == {
        "points": 4,
        "unit": 512,
        "peak": 1,
        "columns": {"other": [0, 1, 1, 2, 3, 0], "reserved": [0, 4]},
        "phases": [["forward", 1, 3]],
        "lines": ["a.py:1 in f", "b.py:2"],
        "line": [0, 0, 2, 1, 3, -1],
        "ghost": [],
    }
    odd = replace(held, reserved=(2049,) * 4)
    assert drawn(odd)[1]["columns"]["other"] == [0, 512, 1, 1024, 3, 0]


def test_a_page_needs_neither_matplotlib_nor_torch():
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "import pytest_gpumem.session.outputs\n"
        "from helpers import sample_report\n"
        "from pytest_gpumem.report.page import html\n"
        "from pytest_gpumem.report.model import Report\n"
        "html.page(Report(tuple(sample_report.many(3, attributed=1))))\n"
        "assert not {'matplotlib', 'numpy', 'torch'} & set(sys.modules)\n"
    )
    folder = sample_report.__file__.rpartition("/tests/")[0]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_baseline_of_fewer_breakdowns_than_devices_is_no_obstacle():
    plain = attribution(layers=2)
    known = replace(entry(plain, plain), breakdowns=(plain.breakdown,))
    one = result("test_two", measured(plain, plain), Lookup(known), devices=2)
    told = section(Report((one,)), "test_two")
    assert told.count("category baseline now difference share") == 1
    assert told.count("category now share") == 1
