"""Many tests: what is done of each does not grow with their number.

Calls are counted, of Python's functions and of C's, not time: whoever else uses the machine does
not matter.
"""

from __future__ import annotations

import cProfile
import sys

import pytest
from helpers.sample_report import many

from pytest_gpumem.baselines.store import BaselineStore, NewBaseline
from pytest_gpumem.judge.result import entry_of
from pytest_gpumem.nodeids import split_nodeid
from pytest_gpumem.report.json_report import dumps
from pytest_gpumem.report.markdown import markdown
from pytest_gpumem.report.model import Report
from pytest_gpumem.report.page import html, timeline_svg
from pytest_gpumem.report.page.html import page
from pytest_gpumem.report.parts import breakdown_rows
from pytest_gpumem.report.serialize import to_text
from pytest_gpumem.report.terminal.summary_table import summary_table
from pytest_gpumem.report.terminal.toolchain_lead import lead_lines
from pytest_gpumem.session.results import SessionResults

FEW, MANY = 300, 3000


def calls(function, *args):
    """Return how many calls a function makes."""
    profile = cProfile.Profile()
    profile.runcall(function, *args)
    return sum(entry.callcount for entry in profile.getstats())


def gathered(results):
    """Gather results as the reports of their tests bring them."""
    gather = SessionResults()
    for result in results:
        data = to_text([result])
        gather.add(result.nodeid, "setup", passed=True, data=None)
        gather.add(result.nodeid, "call", passed=True, data=data)
        gather.add(result.nodeid, "teardown", passed=True, data=None)
    return gather


def changes(results):
    """Return what the baselines of results would be."""
    return [
        NewBaseline(it.measurement.device, *split_nodeid(it.nodeid), {it.part: entry_of(it)})
        for it in results
    ]


WORK = {
    "gathering": lambda results, _: gathered(results).changes(),
    "table": lambda results, _: summary_table(results, 0, 80),
    "lead": lambda results, _: lead_lines(results, 80),
    "page": lambda results, _: page(Report(tuple(results))),
    "JSON": lambda results, _: dumps(Report(tuple(results)), created=""),
    "Markdown": lambda results, _: markdown(Report(tuple(results))),
    "update": lambda results, folder: BaselineStore(folder).update(changes(results)),
}


@pytest.mark.parametrize("name", WORK)
def test_ten_times_the_tests_take_no_more_than_ten_times_the_calls(name, tmp_path):
    WORK[name](many(10), tmp_path / "first")  # imports, templates, caches
    few = calls(WORK[name], many(FEW), tmp_path / "few")
    lots = calls(WORK[name], many(MANY), tmp_path / "many")
    assert lots < 1.2 * few * MANY / FEW


def test_an_update_reads_and_writes_each_module_once(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(sys.modules["os"], "replace", spied(sys.modules["os"].replace, opened))
    results = many(2000)
    summary = BaselineStore(tmp_path).update(changes(results))
    files = list(tmp_path.rglob("*.json"))
    assert len(files) == 2000 // 50
    assert len(opened) <= len(files)
    assert not summary.errors


def spied(function, seen):
    def called(*args, **more):
        seen.append(args)
        return function(*args, **more)

    return called


def test_a_page_of_ten_thousand_attributions_draws_and_explains_few(monkeypatch):
    drawn, explained = [], []
    monkeypatch.setattr(timeline_svg, "draw", spied(lambda *_, **__: None, drawn))
    monkeypatch.setattr(html, "device_rows", spied(breakdown_rows.device_rows, explained))
    text = page(Report(tuple(many(10_000, attributed=10_000))))
    assert len(drawn) == html.MAX_DRAWN
    assert len(explained) == html.MAX_RESULTS
    assert len(text.encode()) < 8_000_000
