"""Every form of a report has the same results with the same figures: one sample, all renderers."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

import pytest
from helpers.sample_report import sample
from helpers.styled_lines import plain_text
from markdown_it import MarkdownIt

from pytest_gpumem.report.item_properties import properties
from pytest_gpumem.report.json_report import dumps, loads
from pytest_gpumem.report.markdown import markdown
from pytest_gpumem.report.page.html import page
from pytest_gpumem.report.parts.cells import peak_cells
from pytest_gpumem.report.serialize import from_text, to_text
from pytest_gpumem.report.terminal.summary_table import summary_table
from pytest_gpumem.sizes import MIB

REPORT = sample()
EXPECTED = Counter(
    peak_cells(result.measurement) for result in REPORT.results if result.measurement
)
"""both peaks in MiB of every result, as often as they come"""


class Cells(HTMLParser):
    """The cells of a table's rows."""

    def __init__(self, html):
        super().__init__()
        self.rows, self._cell = [], None
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        elif tag in {"td", "th"}:
            self._cell = ""

    def handle_endtag(self, tag):
        if tag in {"td", "th"}:
            self.rows[-1].append(self._cell.strip())
            self._cell = None

    def handle_data(self, data):
        if self._cell is not None:
            self._cell += data


def of_terminal():
    lines = plain_text(summary_table(REPORT.results, 1, 1000)).splitlines()
    pattern = re.compile(r" (>?[0-9]+[.][0-9]{2})  +(>?[0-9]+[.][0-9]{2})  ")
    return [match.groups() for line in lines if (match := pattern.search(line))]


def of_page():
    body = page(REPORT).partition('id="rows">')[2].partition("</tbody>")[0]
    return [(row[3], row[4]) for row in Cells(body).rows]


def of_markdown():
    html = MarkdownIt("gfm-like").disable("linkify").render(markdown(REPORT))
    rows = [row for row in Cells(html.partition("<h3>virtual-T4</h3>")[2]).rows if len(row) > 5]
    return [(row[3], row[4]) for row in rows if row[0]]


def of_json():
    results = loads(dumps(REPORT, created="2026-11-21T15:06:07Z"), "a.json").results
    return [peak_cells(result.measurement) for result in results]


def of_workers():
    return [peak_cells(result.measurement) for result in from_text(to_text(REPORT.results))]


def of_junit():
    figures = []
    for result in REPORT.results:
        named = {name.partition("[")[0]: value for name, value in properties([result])}
        needs = "needed" if "gpumem_needed_allocated" in named else "peak"
        sizes = [named[f"gpumem_{needs}_{peak}"] for peak in ("allocated", "reserved")]
        figures.append(tuple(f"{size / MIB:.2f}" for size in sizes))
    return figures


@pytest.mark.parametrize(
    "rendered", [of_terminal, of_page, of_markdown, of_json, of_workers, of_junit]
)
def test_all_forms_have_the_same_results_and_figures(rendered):
    figures = [tuple(row) for row in rendered()]
    assert len(figures) == len(REPORT.results)
    assert Counter(figures) == EXPECTED
