"""How often is the line that was edited the first one that a report names?

    python -m benchmarks.reports.first_lines [--only PATTERN] [--show]

Each regression of ``catalogue.py``, and each of its twelve other edits, is made in a git repository
whose baselines are committed, together with edits that change no memory: comments, docstrings, a
function that nobody calls, a line of the forward in other words. A point is given where the first
``file:line`` of the failure is a line of the edit.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from difflib import SequenceMatcher
from pathlib import Path

from tabulate import tabulate

from benchmarks.harness import line, publish
from benchmarks.reports.catalogue import BASE, BESIDES, CATALOGUE, MODEL, OTHERS, PROGRAM
from benchmarks.reports.regressions import failures_of

GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")


def main() -> None:
    """Plant, run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="those whose name has this pattern")
    parser.add_argument("--show", action="store_true", help="print whole failures")
    options = parser.parse_args()
    names = [name for name in (*CATALOGUE, *OTHERS) if re.search(options.only, name)]
    tests = {name: f"test_{at:02}.py" for at, name in enumerate(names)}
    edited: dict[str, set[str]] = {}
    """by test, the places of the lines of its edit"""
    with tempfile.TemporaryDirectory() as folder:
        sources = {name: files_of(name, tests[name]) for name in names}
        for files in sources.values():
            for file, (before, _) in files.items():
                Path(folder, file).write_text(before, encoding="utf-8")
        failures_of(folder, "--gpumem-update-baselines")
        git(folder, "init", "-q")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "Baselines")
        for name, files in sources.items():
            edited[name] = set()
            for file, (before, after) in files.items():
                Path(folder, file).write_text(besides(after), encoding="utf-8")
                places = edited_lines(besides(before), besides(after))
                edited[name] |= {f"{file}:{number}" for number in places}
        failures = failures_of(folder)
    rows = []
    for name in names:
        failure = failures.get(tests[name], "")
        headline = " ".join(failure.split()).partition("; peak")[0]
        first = re.search(r"\w+\.py:\d+", headline)
        verdict = "not seen" if not failure else "no"
        if first is not None and first[0] in edited[name]:
            verdict = "yes"
        rows.append((name, verdict, headline[:100]))
        if options.show:
            print(f"--- {name}: {verdict}\n{failure}\n")
    number = sum(verdict == "yes" for _, verdict, _ in rows)
    lines = [
        line(),
        "",
        tabulate(rows, headers=("edit", "first", "the report's first sentence")),
        "",
        f"{number} of {len(rows)}: the first line that is named is the one that was edited",
    ]
    publish("first_lines", "\n".join(lines), keep=not options.only)


def files_of(name: str, test: str) -> dict[str, tuple[str, str]]:
    """Return the files of one edit: their texts before and after."""
    if name in CATALOGUE:
        planted = CATALOGUE[name]
        return {test: (BASE, BASE.replace(planted.old, planted.new))}
    old, new = OTHERS[name]
    assert (MODEL + PROGRAM).count(old) == 1, name
    module = f"model_{test.removeprefix('test_').removesuffix('.py')}"
    program = PROGRAM.replace("MODULE", module)
    return {
        f"{module}.py": (MODEL, MODEL.replace(old, new)),
        test: (program, program.replace(old, new)),
    }


def besides(text: str) -> str:
    """Return a program with the edits that change no memory."""
    for old, new in BESIDES:
        text = text.replace(old, new)
    return text


def edited_lines(before: str, after: str) -> set[int]:
    """Return the numbers of the lines of an edit; of lines that are gone, of the next one."""
    matcher = SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    return {
        number + 1
        for tag, _, _, first, last in matcher.get_opcodes()
        if tag != "equal"
        for number in range(first, max(last, first + 1))
    }


def git(folder: str, *arguments: str) -> None:
    """Run git."""
    subprocess.run([*GIT, *arguments], cwd=folder, check=True)


if __name__ == "__main__":
    main()
