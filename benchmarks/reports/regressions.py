"""How many planted regressions does a report explain in its first lines?

    python -m benchmarks.reports.regressions [--only PATTERN] [--show]

Each regression of ``catalogue.py`` is planted into the same training program. The program's
baseline is recorded on the virtual H100, the planted program is held to it. A point is given where
the failure's first lines (the headline and the first cause) name the line that is the cause, or
what keeps the memory.
"""

from __future__ import annotations

import argparse
import itertools
import re
import tempfile
from pathlib import Path

from tabulate import tabulate

from benchmarks.harness import line, publish, session
from benchmarks.reports.catalogue import BASE, CATALOGUE, Planted


def main() -> None:
    """Plant, run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="those whose name has this pattern")
    parser.add_argument("--show", action="store_true", help="print whole failures")
    options = parser.parse_args()
    chosen = {name: it for name, it in CATALOGUE.items() if re.search(options.only, name)}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: f"test_{at:02}.py" for at, name in enumerate(chosen)}
        for file in files.values():
            Path(folder, file).write_text(BASE, encoding="utf-8")
        failures_of(folder, "--gpumem-update-baselines")
        for name, planted in chosen.items():
            assert BASE.count(planted.old) == 1, name
            text = BASE.replace(planted.old, planted.new)
            Path(folder, files[name]).write_text(text, encoding="utf-8")
        failures = failures_of(folder)
    rows = []
    for name, planted in chosen.items():
        failure = failures.get(files[name], "")
        lines_read = first_lines(failure)
        verdict = "not seen" if not failure else "yes" if is_named(planted, lines_read) else "no"
        rows.append((name, verdict, lines_read))
        if options.show:
            print(f"--- {name}: {verdict}\n{failure}\n")
    named = sum(verdict == "yes" for _, verdict, _ in rows)
    lines = [
        line(),
        "",
        tabulate(rows, headers=("regression", "named", "the report's first lines")),
        "",
        f"{named} of {len(rows)} are named in the first lines",
    ]
    publish("regressions", "\n".join(lines), keep=not options.only)


def failures_of(folder: str, *options: str) -> dict[str, str]:
    """Run the planted suite; return the lines that the terminal shows of each file's failure."""
    device = ("--gpumem-device=virtual", "--gpumem-card=H100")
    done = session(folder, "-p", "no:randomly", *options, *device)
    assert done.status < 2, done.output
    sections = re.split(r"^_+ test_train _+$", done.output, flags=re.MULTILINE)[1:]
    named = re.findall(r"^FAILED (\S+)::", done.output, flags=re.MULTILINE)
    return dict(zip(named, sections, strict=True))


def first_lines(failure: str) -> str:
    """Return what a reader sees first: the headline, the first cause and its reasons."""
    lines = [text for text in failure.splitlines() if text.strip()]
    causes = [at for at, text in enumerate(lines) if re.match(r" +[+>]?[\d.]+ [KMG]?i?B  ", text)]
    if not causes:
        return "\n".join(lines[:2])
    first = causes[0]
    reasons = itertools.takewhile(lambda text: text.startswith(" " * 12), lines[first + 1 :])
    return "\n".join([*lines[: first + 1], *reasons])


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
