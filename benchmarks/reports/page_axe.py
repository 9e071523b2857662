"""What axe-core finds on the HTML pages: of a session, of a thousand tests, of a history.

    npm pack axe-core && tar xzf axe-core-*.tgz
    python -m benchmarks.reports.page_axe package/axe.min.js

Each page is opened in Chromium on a desktop and on a phone, in light and in dark, with all that is
folded opened. A violation is what axe-core is sure of; "undecided" are elements that it cannot
judge, such as the contrast of words in a drawing: tests/report/page/test_html_browser.py computes
that of the page's own.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from itertools import product
from pathlib import Path

from tabulate import tabulate

from benchmarks.harness import ROOT, line, publish

sys.path.insert(0, str(ROOT / "tests"))
from helpers.command_line import write
from helpers.git import commit, git
from helpers.page_browser import ARGUMENTS, CHROMIUM, DESKTOP, PHONE
from helpers.sample_report import many, sample

from pytest_gpumem.cli.main import main as gpumem
from pytest_gpumem.report.model import Report
from pytest_gpumem.report.page.html import page

STEPS = ((100, 120), (140, 160), (120, 140))
"""MiB allocated and reserved in the commits of a history"""
WINDOWS = {"desktop": DESKTOP, "phone": PHONE}
RUN = "axe.run(document, {resultTypes: ['violations', 'incomplete']})"


def write_pages(folder: Path) -> list[Path]:
    """Write the pages to a folder; return their files."""
    files = [folder / name for name in ("session.html", "thousand.html", "history.html")]
    files[0].write_text(page(sample(), when="2026-11-22 14:00"), encoding="utf-8")
    thousand = Report(tuple(many(1000, attributed=1000, moved=True)))
    files[1].write_text(page(thousand), encoding="utf-8")
    os.chdir(folder)
    git("init", "-q")
    for peaks in STEPS:
        write(folder / "baselines", {"test_a[x]": peaks, "test_b": (50, 60)})
        commit("a step")
    gpumem(["history", f"--html={files[2]}"])
    return files


def main() -> None:
    """Run axe-core and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("axe", type=Path, help="axe.min.js of the package axe-core")
    axe = parser.parse_args().axe.read_text(encoding="utf-8")
    from playwright.sync_api import sync_playwright

    table, faults, version = [], [], ""
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        for file, window, scheme in product(write_pages(Path(name)), WINDOWS, ("light", "dark")):
            # The page's policy lets no script run but its own.
            tab = browser.new_page(viewport=WINDOWS[window], color_scheme=scheme, bypass_csp=True)
            tab.goto(file.as_uri())
            tab.wait_for_selector("html[data-ready], body:not(:has(#table))")
            tab.eval_on_selector_all("details", "them => them.forEach(it => it.open = true)")
            tab.evaluate(axe)
            answer = tab.evaluate(RUN)
            tab.close()
            version = f"axe-core {answer['testEngine']['version']}, Chromium {browser.version}"
            violations, incomplete = answer["violations"], answer["incomplete"]
            undecided = ", ".join(f"{rule['id']} {len(rule['nodes'])}" for rule in incomplete)
            passed = len(answer["passes"])
            table.append([file.stem, window, scheme, len(violations), passed, undecided])
            faults += [
                f"{file.stem}, {window}, {scheme}: {rule['id']}: {node['html'][:200]}"
                for rule in violations
                for node in rule["nodes"]
            ]
        browser.close()
    heads = ["page", "window", "scheme", "violations", "rules passed", "undecided elements"]
    text = ["axe-core on the HTML pages", line("jinja2"), version, "", tabulate(table, heads)]
    publish("page_axe", "\n".join([*text, *faults]))


if __name__ == "__main__":
    main()
