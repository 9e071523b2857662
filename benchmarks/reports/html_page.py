"""The HTML page of many results: seconds to write it, its size, and how soon a browser shows it.

    python -m benchmarks.reports.html_page [--counts 1000 10000]

The results are those that tests/sample_report.py makes up: one in a hundred failed. They are
written without attributions, with a breakdown, lines and a timeline of each, and so where all lines
moved against the baseline. The browser is Chromium, where it and playwright are there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import ROOT, line, publish, table

sys.path.insert(0, str(ROOT / "tests"))
from helpers.page_browser import ARGUMENTS, CHROMIUM, Shown
from helpers.sample_report import many

from pytest_gpumem.report.model import Report
from pytest_gpumem.report.page.html import MAX_DRAWN, MAX_EXPLAINED, MAX_ICICLES, page


def shown(text: str) -> tuple[str, str, str]:
    """Return the seconds until Chromium has the page ready, those of its thread, and elements."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return "no browser", "", ""
    if CHROMIUM is None:
        return "no browser", "", ""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = Path(folder) / "page.html"
        path.write_text(text, encoding="utf-8")
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page_shown = Shown(browser.new_page(), path.as_uri())
        ready = page_shown.ask("performance.now()") / 1000

        def reload() -> None:
            page_shown.tab.reload()
            page_shown.tab.wait_for_selector("html[data-ready]")

        worked = page_shown.cpu_seconds(reload)
        elements = page_shown.ask("document.querySelectorAll('*').length")
        browser.close()
    return f"{ready:.2f}", f"{worked:.2f}", f"{elements}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 10_000])
    counts = parser.parse_args().counts
    page(Report(tuple(many(1, attributed=1))))  # imports, and the first drawing
    rows = []
    for number in counts:
        for with_them in ("without", "with", "with, all lines moved"):
            attributed = 0 if with_them == "without" else number
            moved = with_them.endswith("moved")
            report = Report(tuple(many(number, attributed=attributed, moved=moved)))
            started = time.process_time()  # of this process alone, however busy the machine is
            text = page(report)
            took = time.process_time() - started
            ready, worked, elements = shown(text)
            size = f"{len(text.encode()) / 1e6:.2f}"
            rows.append([f"{number}", with_them, f"{took:.2f}", size, ready, worked, elements])
    load = os.getloadavg()[0]
    heads = ["results", "attributions", "s of CPU to make", "MB", "s until ready"]
    heads += ["s of its thread", "elements"]
    text = [
        "The HTML page of many results, one in a hundred of them failed",
        line("jinja2"),
        "",
        table(rows, heads, "r"),
        "",
        (
            f"{MAX_DRAWN} timelines are drawn, failures first; {MAX_EXPLAINED} breakdowns"
            f" have their\ntables, and {MAX_ICICLES} tests whose lines moved have them by module. "
            f"One run of each; other programs were running: load {load:.0f}."
        ),
        "Aims for 10,000 with attributions: made in 3 s, ready in 2 s.",
    ]
    publish("html_page", "\n".join(text))


if __name__ == "__main__":
    main()
