"""How often is the line that was edited the first one that a report names, and that is blamed?

    python -m benchmarks.reports.first_lines [--only PATTERN] [--show]

Each edit of data/planted.toml is made in a git repository whose baselines are committed, together
with edits that change no memory: comments, docstrings, a function that is never called, a line of
the forward pass that is rewritten. An edit scores a point if the first ``file:line`` of the failure
is one of its lines, and another point if ``gpumem blame`` names only this edit.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from difflib import SequenceMatcher
from pathlib import Path

from tabulate import tabulate

from benchmarks.harness import DATA, line, publish, read_toml, session

GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
PLANTED = read_toml(DATA / "planted.toml")


def main() -> None:
    """Plant the edits, run the suite, and print the points."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="those whose name has this pattern")
    parser.add_argument("--show", action="store_true", help="print whole failures")
    options = parser.parse_args()
    edits = {edit["name"]: edit for edit in PLANTED["edits"]}
    names = [name for name in edits if re.search(options.only, name)]
    tests = {name: f"test_{at:02}.py" for at, name in enumerate(names)}
    edited: dict[str, set[str]] = {}
    """by test: the edit's lines, as "file:line" """
    with tempfile.TemporaryDirectory() as folder:
        sources = {name: files_of(edits[name], tests[name]) for name in names}
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
        grown = [name for name in names if tests[name] in failures]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = pool.map(lambda name: blamed(folder, tests[name]), grown)
            blames = dict(zip(grown, found, strict=True))
    rows = []
    for name in names:
        failure = failures.get(tests[name], "")
        headline = " ".join(failure.split()).partition("; peak")[0]
        first = re.search(r"\w+\.py:\d+", headline)
        verdict = "not seen" if not failure else "no"
        if first is not None and first[0] in edited[name]:
            verdict = "yes"
        blame = blames.get(name, [])
        is_blamed = len(blame) == 1 and bool(blame[0] & edited[name])
        rows.append((name, verdict, "yes" if is_blamed else "no", headline[:100]))
        if options.show:
            print(f"--- {name}: {verdict}\n{failure}\n")
    number, number_blamed = (sum(row[column] == "yes" for row in rows) for column in (1, 2))
    lines = [
        line(),
        "",
        tabulate(rows, headers=("edit", "first", "blamed", "the report's first sentence")),
        "",
        f"{number} of {len(rows)}: the first line that is named is the one that was edited",
        f"{number_blamed} of {len(failures)} growths: gpumem blame names the edit, and no other",
    ]
    publish("first_lines", "\n".join(lines), keep=not options.only)


def files_of(edit: dict[str, str], test: str) -> dict[str, tuple[str, str]]:
    """Return the files of one edit, with their texts before and after."""
    old, new = edit["old"], edit["new"]
    if edit["of"] == "base":
        files = {test: PLANTED["base"]}
    else:
        module = f"model_{test.removeprefix('test_').removesuffix('.py')}"
        program = PLANTED["program"].replace("MODULE", module)
        files = {f"{module}.py": PLANTED["model"], test: program}
    assert sum(text.count(old) for text in files.values()) == 1, edit["name"]
    return {file: (text, text.replace(old, new)) for file, text in files.items()}


def failures_of(folder: str, *options: str) -> dict[str, str]:
    """Run the planted suite; return the terminal's lines on each file's failure."""
    device = ("--gpumem-device=virtual", "--gpumem-card=H100")
    done = session(folder, "-p", "no:randomly", *options, *device)
    assert done.status < 2, done.output
    sections = re.split(r"^_+ test_train _+$", done.output, flags=re.MULTILINE)[1:]
    named = re.findall(r"^FAILED (\S+)::", done.output, flags=re.MULTILINE)
    return dict(zip(named, sections, strict=True))


def blamed(folder: str, test: str) -> list[set[str]]:
    """Return the edits that ``gpumem blame`` names, each as the places of its lines."""
    command = [sys.executable, "-m", "pytest_gpumem", "blame", "HEAD", test]
    options = ["--", "--gpumem-device=virtual", "--gpumem-card=H100"]
    done = subprocess.run(
        [*command, *options], cwd=folder, capture_output=True, text=True, check=False
    )
    places = []
    for block in done.stdout.split("\n\n+")[1:]:
        first, *lines = block.splitlines()
        file, _, number = first.rpartition(" by ")[2].rpartition(":")
        length = max(sum(line.startswith("  +") for line in lines), 1)
        places.append({f"{file}:{int(number) + at}" for at in range(length)})
    return places


def besides(text: str) -> str:
    """Apply the edits that change no memory to a program."""
    for edit in PLANTED["besides"]:
        text = text.replace(edit["old"], edit["new"])
    return text


def edited_lines(before: str, after: str) -> set[int]:
    """Return the line numbers of an edit; for deleted lines, the number of the next line."""
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
