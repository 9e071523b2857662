"""How many planted regressions does a report explain in its first lines?

    python benchmarks/regressions.py [--only WORD] [--show]

Each regression of ``catalogue.py`` is planted into the same training program. The program's
baseline is recorded on the virtual H100, the planted program is held to it. A point is given where
the failure's first lines (the headline and the first cause) name the line that is the cause, or
what keeps the memory.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from catalogue import BASE, CATALOGUE, Planted  # noqa: E402 - found by the path above
from provenance import line, publish  # noqa: E402
from tabulate import tabulate  # noqa: E402

FIRST_LINES = 3
"""the headline, the first cause and what keeps it"""


def main() -> None:
    """Plant, run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="those with this word in their name")
    parser.add_argument("--show", action="store_true", help="print whole failures")
    options = parser.parse_args()
    chosen = {name: it for name, it in CATALOGUE.items() if options.only in name}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: f"test_{at:02}.py" for at, name in enumerate(chosen)}
        for file in files.values():
            Path(folder, file).write_text(BASE, encoding="utf-8")
        session(folder, "--gpumem-update-baselines")
        for name, planted in chosen.items():
            assert BASE.count(planted.old) == 1, name
            text = BASE.replace(planted.old, planted.new)
            Path(folder, files[name]).write_text(text, encoding="utf-8")
        messages = session(folder, "--junitxml=report.xml")
    rows = []
    for name, planted in chosen.items():
        message = messages.get(files[name].removesuffix(".py"), "")
        said = first_lines(message)
        verdict = "not seen" if not message else "yes" if is_named(planted, said) else "no"
        rows.append((name, verdict, said))
        if options.show:
            print(f"--- {name}: {verdict}\n{message}\n")
    named = sum(verdict == "yes" for _, verdict, _ in rows)
    lines = [
        line(),
        "",
        tabulate(rows, headers=("regression", "named", "the report's first lines")),
        "",
        f"{named} of {len(rows)} are named in the first lines",
    ]
    if options.only:
        print("\n".join(lines))
    else:
        publish("regressions", "\n".join(lines))


def session(folder: str, *options: str) -> dict[str, str]:
    """Run the planted suite; return the failure of each file's test."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += [*options, "--gpumem-device=virtual", "--gpumem-card=H100"]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    report = Path(folder, "report.xml")
    if not report.exists():
        assert done.returncode == 0, done.stdout
        return {}
    cases = ET.parse(report).getroot().iter("testcase")  # noqa: S314 - the session wrote it
    return {
        str(case.get("classname")): problem.text or problem.get("message") or ""
        for case in cases
        for problem in [*case.iter("failure"), *case.iter("error")]
    }


def first_lines(message: str) -> str:
    """Return what a reader sees first."""
    lines = [text for text in message.splitlines() if text.strip()]
    return "\n".join(lines[:FIRST_LINES])


def is_named(planted: Planted, said: str) -> bool:
    """Return whether the first lines name the cause: a line by its number, or by its code."""
    source = BASE.replace(planted.old, planted.new).splitlines()
    if planted.line:
        for number, text in enumerate(source, 1):
            if planted.line in text and re.search(rf"\.py:{number}\b", said):
                return True
    return bool(planted.keeper and re.search(planted.keeper, said))


if __name__ == "__main__":
    main()
