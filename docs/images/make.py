"""Makes the pictures anew: page.png of the HTML page, failure.png of a failed test in the terminal.

    .venv/bin/python docs/images/make.py

They are screenshots of what the plugin writes here: of the page of suite/, and of the README's
test after the change that the README describes. They take the machine's Chromium, playwright and
rich.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TERMINAL = (
    '<pre style="margin: 0; padding: 12px 16px; background: {background}; color: {foreground}; '
    "font: 13px/1.35 'DejaVu Sans Mono', monospace\">{code}</pre>"
)
PLAIN = ("-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:asyncio")


def run_pytest(folder: Path, *options: str, **environment: str) -> str:
    """Return what a session of pytest on the virtual T4 prints, with colours."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--color=yes",
        "--gpumem-device=virtual",
        "--gpumem-card=T4",
    ]
    inherited = {name: value for name, value in os.environ.items() if name != "CI"}
    session = subprocess.run(
        [*command, *PLAIN, *options],
        cwd=folder,
        env={**inherited, "COLUMNS": "80", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return session.stdout


def draw_page(browser_page: Page, folder: Path) -> None:
    """Draw the top of the HTML page of a suite, of which one test regressed."""
    shutil.copytree(HERE / "suite", folder)
    run_pytest(folder, "--gpumem-update-baselines")
    run_pytest(folder, "--gpumem-html=page.html", GROWN="1")
    browser_page.set_viewport_size({"width": 1140, "height": 900})
    browser_page.goto((folder / "page.html").as_uri())
    timeline = browser_page.locator("section.result svg").first.bounding_box()
    clip = {"x": 0, "y": 0, "width": 1140, "height": timeline["y"] + timeline["height"] + 45}
    browser_page.screenshot(path=HERE / "page.png", full_page=True, clip=clip)


def draw_failure(browser_page: Page, folder: Path) -> None:
    """Draw what the README's test prints when its layer is made wider."""
    folder.mkdir()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    source = re.search(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)[1]
    test = folder / "test_step.py"
    test.write_text(source, encoding="utf-8")
    run_pytest(folder, "--gpumem-update-baselines")
    test.write_text(source.replace("4096", "16384"), encoding="utf-8")
    output = run_pytest(folder)
    report = output[output.index("=== FAILURES") :].partition("= GPU memory =")[0]
    lines = report.splitlines()[1:-1]
    console = Console(record=True, width=80, file=StringIO())
    console.print(Text.from_ansi("\n".join(lines)), highlight=False)
    html = console.export_html(theme=SVG_EXPORT_THEME, inline_styles=True, code_format=TERMINAL)
    browser_page.set_viewport_size({"width": 700, "height": 100})
    browser_page.set_content(html)
    browser_page.locator("pre").screenshot(path=HERE / "failure.png")


def main() -> None:
    """Draw both, and make the files small."""
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        browser_page = browser.new_page(device_scale_factor=1.5)
        draw_page(browser_page, Path(name, "suite"))
        # A tab of its own: in the page's tab its policy would go on, and stop all styles.
        failure_page = browser.new_page(device_scale_factor=1.5)
        draw_failure(failure_page, Path(name, "readme"))
        browser.close()
    for name in ("page.png", "failure.png"):
        picture = Image.open(HERE / name).convert("RGB").quantize(128, dither=Image.Dither.NONE)
        picture.save(HERE / name, optimize=True)
        print(name, (HERE / name).stat().st_size)  # noqa: T201


if __name__ == "__main__":
    main()
