"""Makes the pictures anew: the HTML page at two widths, and a failed test in two terminals.

    .venv/bin/python docs/images/make.py [FOLDER]

They are screenshots of what the plugin writes here: of the page of suite/, and of the README's
test after the change that the README describes, by the README's commands. The text of a picture of
the terminal is kept in its file, under TEXT: tests/docs/test_readme.py compares it with what the
commands print. They take the machine's Chromium, playwright and rich, and a machine without a GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from io import StringIO
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TERMINAL = (
    '<pre style="margin: 0; padding: 12px 16px; background: {background}; color: {foreground}; '
    "font: 13px/1.35 'DejaVu Sans Mono', monospace\">{code}</pre>"
)
PLAIN = ("--color=yes", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:asyncio")
TEXT = "Text"
"""the name under which a picture of a terminal keeps its text"""
WIDTHS = {"page": 1140, "page-phone": 390}
"""pixels of the pictures of the page"""
COLUMNS = {"failure": 80, "failure-160": 160}
"""columns of the terminals"""
CODES = re.compile(r"\x1b\[[0-9;]*m")


def run_pytest(folder: Path, *options: str, checkout: Path = ROOT, **environment: str) -> str:
    """Return what a session of pytest prints in a terminal, on the virtual GPU, with colours.

    The pytest of this environment runs, started as a user types it: reports repeat that word. It
    loads the plugin of ``checkout``, a folder with a built repository.
    """
    environment = {"PYTHONPATH": str(checkout), **environment}
    inherited = {name: value for name, value in os.environ.items() if name != "CI"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own, terminal = os.openpty()
    session = subprocess.Popen(
        ["pytest", *PLAIN, *options],  # noqa: S607 - by its name, as users start it
        cwd=folder,
        env={**inherited, "PATH": path, "COLUMNS": "80", **environment},
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    parts = []
    with suppress(OSError):  # the terminal is gone when the session has ended
        while part := os.read(own, 65536):
            parts.append(part)
    session.wait()
    os.close(own)
    return b"".join(parts).decode().replace("\r\n", "\n")


def draw_page(
    browser: Browser, folder: Path, pictures: Path, checkout: Path = ROOT
) -> dict[str, int]:
    """Draw the top of the HTML page of a suite, of which one test regressed.

    Returns:
        The height of the whole page in pixels, for each picture.
    """
    heights = {}
    shutil.copytree(HERE / "suite", folder)
    run_pytest(folder, "--gpumem-card=T4", "--gpumem-update-baselines", checkout=checkout)
    page = ("--gpumem-card=T4", "--gpumem-html=page.html")
    run_pytest(folder, *page, checkout=checkout, GROWN="1")
    for name, width in WIDTHS.items():
        size = {"width": width, "height": 900}
        browser_page = browser.new_page(device_scale_factor=1.5, viewport=size)
        browser_page.goto((folder / "page.html").as_uri())
        browser_page.wait_for_selector("html[data-ready]")
        timeline = browser_page.locator("section.result svg.timeline").first.bounding_box()
        end = timeline["y"] + timeline["height"] + 45
        clip = {"x": 0, "y": 0, "width": width, "height": end}
        browser_page.screenshot(path=pictures / f"{name}.png", full_page=True, clip=clip)
        shrink(pictures / f"{name}.png")
        heights[name] = browser_page.evaluate("document.documentElement.scrollHeight")
    return heights


def draw_failure(
    browser: Browser, folder: Path, pictures: Path, checkout: Path = ROOT
) -> dict[str, list[str]]:
    """Draw what the README's commands print of its test when its layer is made wider.

    Returns:
        The lines of each picture.
    """
    drawn = {}
    folder.mkdir()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    source = re.search(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)[1]
    test = folder / "test_step.py"
    test.write_text(source, encoding="utf-8")
    run_pytest(folder, "--gpumem-update-baselines", checkout=checkout)
    test.write_text(source.replace("4096", "16384"), encoding="utf-8")
    for name, width in COLUMNS.items():
        lines = failure_lines(run_pytest(folder, checkout=checkout, COLUMNS=str(width)))
        console = Console(record=True, width=width, file=StringIO())
        console.print(Text.from_ansi("\n".join(lines)), highlight=False)
        html = console.export_html(theme=SVG_EXPORT_THEME, inline_styles=True, code_format=TERMINAL)
        size = {"width": 60 + 8 * width, "height": 100}
        # A tab of its own: in the page's tab its policy would go on, and stop all styles.
        browser_page = browser.new_page(device_scale_factor=1.5, viewport=size)
        browser_page.set_content(html)
        browser_page.locator("pre").screenshot(path=pictures / f"{name}.png")
        drawn[name] = [CODES.sub("", line) for line in lines]
        shrink(pictures / f"{name}.png", "\n".join(drawn[name]))
    return drawn


def failure_lines(output: str) -> list[str]:
    """Return the lines of a failed test's report in what pytest prints."""
    report = output[output.index("=== FAILURES") :].partition("= GPU memory =")[0]
    return report.splitlines()[1:-1]


def shrink(path: Path, text: str = "") -> None:
    """Make a picture's file small, and keep its text in it."""
    picture = Image.open(path).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    info = PngInfo()
    if text:
        info.add_itxt(TEXT, text)
    picture.save(path, optimize=True, pnginfo=info)
    print(path.name, path.stat().st_size)  # noqa: T201


def main() -> None:
    """Draw all of them."""
    pictures = Path(sys.argv[1]) if sys.argv[1:] else HERE
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        draw_page(browser, Path(name, "suite"), pictures)
        draw_failure(browser, Path(name, "readme"), pictures)
        browser.close()


if __name__ == "__main__":
    main()
