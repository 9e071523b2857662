"""What a session ends with, of thousands of made-up results: tables, reports, baselines."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import ROOT, table
from benchmarks.reports.html_page import shown

sys.path.insert(0, str(ROOT / "tests"))
from helpers.sample_report import many

from pytest_gpumem.baselines.store import BaselineStore
from pytest_gpumem.measurement import Peak
from pytest_gpumem.plugin.results import SessionResults
from pytest_gpumem.report.json_report import dumps
from pytest_gpumem.report.markdown import markdown
from pytest_gpumem.report.model import Report
from pytest_gpumem.report.page.html import MAX_DRAWN, MAX_EXPLAINED, page
from pytest_gpumem.report.serialize import to_text
from pytest_gpumem.report.terminal.summary_table import summary_table
from pytest_gpumem.report.terminal.toolchain_lead import lead_lines

if TYPE_CHECKING:
    from collections.abc import Callable


def pages(number: int) -> list[str]:
    """Return the table of HTML pages."""
    page(Report(tuple(many(1, attributed=1))))  # imports, and the first drawing
    rows = []
    for attributed in (0, number):
        report = Report(tuple(many(number, attributed=attributed)))
        took = []
        for _ in range(2):
            began = time.process_time()
            text = page(report)
            took.append(time.process_time() - began)
        size = f"{len(text.encode()) / 1e6:.2f}"
        kind = "with attributions" if attributed else "without"
        rows.append([kind, f"{min(took):.2f}", size, *shown(text)])
    heads = ["page", "s to make", "MB", "s until ready", "elements"]
    return [
        table(rows, heads),
        f"{MAX_DRAWN} timelines are drawn, {MAX_EXPLAINED} breakdowns shown, failures first.",
    ]


def made_up(number: int) -> list[str]:
    """Return the table of what a session ends with, of results that are made up."""
    gather = SessionResults()
    for result in many(number, attributed=number):
        gather.add(result.nodeid, "setup", passed=True, data=None)
        gather.add(result.nodeid, "call", passed=True, data=to_text([result]))
        gather.add(result.nodeid, "teardown", passed=True, data=None)
    results = gather.results()
    changes = gather.changes()
    peak = Peak(1 << 40, 1 << 40)
    moved = [replace(it, parts={"": replace(it.parts[""], peaks=(peak,))}) for it in changes]
    report = Report(tuple(results))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work: dict[str, Callable[[], object]] = {
            "the table, as always": lambda: summary_table(results, 0, 80),
            "the table with -vv": lambda: summary_table(results, 2, 80),
            "what moved together": lambda: lead_lines(results, 80),
            "baselines, all new": lambda: BaselineStore(folder).update(changes),
            "baselines, unchanged": lambda: BaselineStore(folder).update(changes),
            "baselines, all changed": lambda: BaselineStore(folder).update(moved),
            "JSON report": lambda: dumps(report, created=""),
            "Markdown report": lambda: markdown(report),
        }
        rows = []
        for what, function in work.items():
            began = time.process_time()
            function()
            rows.append([what, f"{time.process_time() - began:.2f}"])
    heads = [f"{number} results with attributions", "s"]
    return [table(rows, heads)]
