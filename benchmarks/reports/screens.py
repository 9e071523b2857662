"""Pictures of what users see, before and after: of an earlier commit, and of this one.

    python -m benchmarks.reports.screens a9ad581

They are the page of docs/images/suite at two widths, the README's failure in terminals of 80 and
160 columns, and the documentation's first screen. Both commits run the same tests, by the same
commands. The earlier one is checked out and built in a folder of its own, which is deleted. The
pictures are in results/screens; the later page and failures are those of docs/images. It takes
what docs/images/make.py takes, and the packages of the documentation.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import Browser, sync_playwright

from benchmarks.harness import RESULTS, ROOT, line, publish, table

if TYPE_CHECKING:
    from types import ModuleType

PICTURES = RESULTS / "screens"
DOCS = {"width": 1140, "height": 800}
"""pixels of the documentation's first screen"""


def load_make() -> ModuleType:
    """Return docs/images/make.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("make", ROOT / "docs/images/make.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw_docs(make: ModuleType, browser: Browser, folder: Path, name: str, checkout: Path) -> int:
    """Draw the first screen of a checkout's documentation; return the pixels to its first code."""
    sphinx = [sys.executable, "-m", "sphinx", "-q", str(checkout / "docs"), str(folder)]
    subprocess.run(sphinx, cwd=checkout, check=True)
    page = browser.new_page(viewport=DOCS)
    page.goto((folder / "index.html").as_uri())
    page.screenshot(path=PICTURES / f"{name}.png")
    make.shrink(PICTURES / f"{name}.png")
    code = page.locator("div.highlight").first
    return round(code.bounding_box()["y"]) if code.count() else -1


def place(failure: list[str]) -> int:
    """Return which line of a failure's text names line 7, which was edited, from 1."""
    rows = (number for number, row in enumerate(failure[1:], 1) if "test_step.py:7" in row)
    return next(rows)


def measure(make: ModuleType, browser: Browser, name: str, checkout: Path) -> dict[str, object]:
    """Draw all pictures of a checkout; return what can be counted in them."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        heights = make.draw_page(browser, folder / "suite", folder, checkout)
        failures = make.draw_failure(browser, folder / "readme", folder, checkout)
        if checkout != ROOT:
            for picture in (*heights, *failures):
                shutil.copy(folder / f"{picture}.png", PICTURES / f"{name}-{picture}.png")
        code = draw_docs(make, browser, folder / "docs", f"{name}-docs", checkout)
    words = len((checkout / "README.md").read_text(encoding="utf-8").split())
    return {
        **{f"height of the page, {make.WIDTHS[it]} pixels wide": heights[it] for it in heights},
        **{
            f"lines of the failure, {make.COLUMNS[it]} columns": len(failures[it])
            for it in failures
        },
        **{
            f"lines that are cut, {make.COLUMNS[it]} columns": sum(
                row.endswith("...") for row in failures[it]
            )
            for it in failures
        },
        "pixels from the documentation's top to its first code": code if code >= 0 else "no code",
        "place of the edited line in the failure": place(failures["failure"]),
        "words in README": words,
    }


def main() -> None:
    """Draw both commits' pictures, and publish what can be counted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("commit", help="the earlier commit")
    commit = parser.parse_args().commit
    PICTURES.mkdir(exist_ok=True)
    make = load_make()
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        before = Path(temporary, "before")
        worktree = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*worktree, "add", "--quiet", "--detach", str(before), commit], check=True)
        try:
            build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
            subprocess.run(build, cwd=before, check=True, stdout=subprocess.DEVNULL)
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            earlier = measure(make, browser, "before", before)
            later = measure(make, browser, "after", ROOT)
            browser.close()
        finally:
            subprocess.run([*worktree, "remove", "--force", str(before)], check=True)
    rows = [(name, earlier[name], later[name]) for name in later]
    publish(
        "screens",
        f"What users see, at commit {commit} and at this one\n{line('playwright')}\n\n"
        f"{table(rows, ('', 'before', 'after'), 'lrr')}\n\n"
        "Pictures: screens/before-*.png, screens/after-docs.png, and docs/images/page.png, "
        "page-phone.png,\nfailure.png and failure-160.png.",
    )


if __name__ == "__main__":
    main()
