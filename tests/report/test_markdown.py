"""The report in Markdown: whole, as text in gold/, and that no name is markup in it."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
from helpers.paths import GOLD
from helpers.sample_report import (
    EVIL,
    H100,
    attribution,
    breakdown,
    entry,
    many,
    measured,
    result,
    sample,
    timeline,
    with_updates,
)
from markdown_it import MarkdownIt

from pytest_gpumem.judge.verdict import Kind, Lookup
from pytest_gpumem.measurement import Attribution, Peak, Site
from pytest_gpumem.report.markdown import markdown
from pytest_gpumem.report.markdown_syntax import MAX_NAME_LENGTH, code, prose
from pytest_gpumem.report.model import Report

WHEN = "2026-11-21 15:06 UTC"
NASTY = (
    EVIL,
    "a|b",
    "a\\|b",
    "`a`",
    "``a",
    "a`",
    " a ",
    "<b>a</b>",
    "<!-- a",
    "a\nb",
    "a\r\n\n# b",
    "**a**",
    "_a_ [b](http://c) ![d](e)",
    "https://a.b/c www.d.e",
    "&lt;a&gt;",
    "</code></details>",
    "$a$ @b #1 ~~c~~",
    "| --- |",
    "\x1b[31m\u202e\udc80",
    "x" * 5000,
    "",
)


def parsed(text):
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def inlines(text):
    """Every inline token, at any depth."""
    return [child for token in parsed(text) for child in token.children or ()]


def shown(text):
    """What a reader sees of inline Markdown."""
    kinds = {"text", "code_inline"}
    return "".join(it.content for it in inlines(text) if it.type in kinds)


def rows(text):
    """The cells of each row of every table."""
    found, row = [], []
    for token in parsed(text):
        if token.type == "tr_open":
            row = []
        if token.type == "inline":
            row.append(token)
        if token.type == "tr_close":
            found.append([shown(it.content) for it in row])
    return found


def test_the_whole_report_is_as_kept():
    report = replace(sample(), updates=with_updates(), options={"--gpumem-card": "T4"})
    text = markdown(report, when=WHEN)
    path = GOLD / "report.md"
    if os.environ.get("GPUMEM_REWRITE_GOLD") == "1":
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_a_report_of_nothing_says_so():
    assert markdown(Report(remarks=("2 skipped: no GPU",))) == (
        "## GPU memory: no test was measured\n\n- 2 skipped: no GPU\n"
    )


def test_failures_stand_first_and_expected_ones_are_none():
    text = markdown(sample())
    heads = re.findall(r"^### (.*)$", text, re.MULTILINE)
    failed = [it for it in sample().results if it.verdict.failed and not it.expected]
    assert len([it for it in heads if it.startswith("✕")]) == len(failed) > 2
    assert heads[len(failed) :] == ["virtual-T4", "virtual-H100"]
    assert "test_not_yet" not in "".join(heads)
    assert f"## GPU memory: {len(failed)} of {len(sample().results)} failed" in text
    assert "regressed (xfail)" in text


@pytest.mark.parametrize("name", NASTY)
def test_a_name_is_one_cell_of_one_row_and_no_markup(name):
    one = result(f"test_it[{name}]", measured(attribution(layers=1)), part=name or "p")
    table = rows(markdown(Report((one,))))
    assert [len(row) for row in table] == [len(table[0])] * 2
    seen = table[1][table[0].index("test")]
    assert seen.startswith(("tests/", "…"))


@pytest.mark.parametrize("name", NASTY)
def test_a_name_is_shown_as_it_is(name):
    made = code(name)
    table = f"| {made} | x |\n| --- | --- |\n"
    (cells,) = rows(table)
    expected = (
        name.replace("\r", "\\r").replace("\n", "\\n").replace("\x1b", "\\x1b")
        .replace("\u202e", "\\u202e").replace("\udc80", "\\udc80")
    )  # fmt: skip
    if len(name) > MAX_NAME_LENGTH:
        expected = f"…{name[1 - MAX_NAME_LENGTH :]}"
    if "<code>" in made:  # the tags are HTML of ours
        tags = [it.content for it in inlines(made) if it.type == "html_inline"]
        assert tags == ["<code>", "</code>"]
    assert cells == [expected, "x"]
    assert shown(made) == expected


@pytest.mark.parametrize("text", NASTY)
def test_a_sentence_has_no_markup(text):
    made = prose(text)
    kinds = {it.type for it in inlines(f"- note: {made}")}
    assert kinds <= {"text", "text_special"}
    assert "\n" not in made
    assert not re.search(r"(?<!\\)://|www\.", made)


def test_sites_of_odd_names_stay_in_their_table():
    grown, plain = attribution(scale=1.1), attribution()
    odd = Site("a|b`.py", 3, "<f>", "x = y | z  # `", "m|n", "activations", 10**9, 3)
    found = Attribution(replace(grown.breakdown, sites=(odd,)))
    one = result("t", replace(measured(grown), attributions=(found,)), Lookup(entry(plain)))
    assert one.verdict.failed
    table = rows(markdown(Report((one,))))
    (row,) = [it for it in table if it[0] == "a|b`.py:3 (<f>)"]
    head = next(it for it in table if it[0] == "allocated by")
    assert row[head.index("code")] == "x = y | z  # `"
    assert row[head.index("of")] == "activations"


def test_every_device_has_its_tables():
    grown = attribution(scale=1.1)
    one = result("t", measured(grown, grown, device=H100), Lookup(entry(attribution(), grown)))
    heads = [it[0] for it in rows(markdown(Report((one,))))]
    assert {"at the peak, device 0", "at the peak, device 1", "allocated by, device 1"} <= set(
        heads
    )


def test_source_lines_are_counted_where_they_are_too_many():
    line = timeline(scale=1.1)
    site = Site("a.py", 1, "f", "code", "", "activations", 1000, 1)
    broken = breakdown(line)
    sites = tuple(replace(site, line=n, code=f"line {n}") for n in range(30))
    found = Attribution(replace(broken, sites=sites))
    peak = Peak(sum(broken.categories.values()), max(line.reserved))
    one = replace(measured(attribution()), attributions=(found,), peaks=(peak,))
    text = markdown(Report((result("t", one, Lookup(entry(attribution()))),)))
    assert re.search(r"^And \d+ more source lines\.$", text, re.MULTILINE)


def test_a_fence_is_longer_than_any_in_what_it_holds():
    odd = with_updates()
    odd = replace(odd, created=(replace(odd.created[0], test="test_x[````]"),))
    text = markdown(Report(updates=odd))
    (block,) = [it for it in parsed(text) if it.type == "fence"]
    assert "test_x[````]" in block.content
    assert block.info == "text"
    assert len(block.markup) == 5


def test_what_is_too_long_is_shortened_and_says_so():
    report = Report(tuple(many(3000, attributed=1500)))
    whole = markdown(report)
    failed = sum(it.verdict.failed for it in report.results)
    for limit in (len(whole.encode()) - 1, 100_000, 60_000, 5_000, 1_000):
        text = markdown(report, limit=limit)
        assert 0 < len(text.encode()) <= limit
        assert "This report was shortened" in text
        assert f"{failed} of 3000 failed" in text
        assert re.search(r"^And \d+ more\.$", text, re.MULTILINE)
    assert "more failures." in markdown(report, limit=5_000)
    assert markdown(report, limit=len(whole.encode())) == whole
    assert markdown(report, limit=20) == ""


def test_what_wants_a_baseline_has_its_command():
    one = result("test_new", measured(attribution(layers=1)))
    assert one.verdict.kind is Kind.NO_BASELINE
    text = markdown(Report((one,)))
    (block,) = [it for it in parsed(text) if it.type == "fence"]
    assert block.content.startswith("pytest tests/training/test_models.py::test_new --gpumem-")


def test_causes_that_failures_share_come_first():
    document = markdown(Report(tuple(many(400, attributed=400))))
    sentence = "- 4 of 4 failures share "
    assert sentence in document
    assert document.index(sentence) < document.index("### ✕")


def test_tests_on_several_cards_have_a_table_of_them():
    plain = attribution(layers=4)
    results = [
        replace(result(f"test_x[{card}]", measured(plain)), card=card) for card in ("T4", "L4")
    ]
    document = markdown(Report(tuple(results)))
    row = next(line for line in document.splitlines() if line.startswith("| `tests/training"))
    assert "### GiB left on each card\n\n| test | T4 | L4 |" in document
    assert re.fullmatch(r"\| `\S+::test_x` \| \d+\.\d\d \| \d+\.\d\d \|", row)
    assert "GiB left" not in markdown(Report(tuple(results[:1])))
