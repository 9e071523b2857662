"""The Pythons and versions of torch that the pages name are those of the recorded matrix."""

import re
from typing import NamedTuple

import pytest
from helpers.pages import flat, read
from helpers.paths import ROOT

TABLE = ROOT / "benchmarks/results/matrix.txt"
PAGE = "explanation/trust.md"
LINK = "([recorded](../../benchmarks/results/matrix.txt): each row with its date and commit)"


class Row(NamedTuple):
    """A row of the table that was run."""

    name: str
    """the Python ("3.10", "3.11.2"), "torch-2.6.0" or "lowest\""""
    torch: str
    """2.6"""
    passes: bool
    """whether no test and no example failed, and both came to an end"""


def rows_of(text):
    """The rows that were run, in the table's order."""
    rows = []
    parts = re.split(r"^(?=\S+ +(?:Python [\d.]+ +torch|not run))", text, flags=re.MULTILINE)[1:]
    for part in parts:
        head = re.match(r"(\S+) +Python [\d.]+ +torch (\d+\.\d+)", part)
        if head is not None:
            closings = re.findall(
                r"^ +(examples|tests|(?:devices )?beside a driver): (\d+ passed)?",
                part,
                re.MULTILINE,
            )
            complete = {"examples", "tests"} <= {name for name, _ in closings}
            rows.append(Row(head[1], head[2], complete and all(passed for _, passed in closings)))
    return rows


def listed(versions):
    """Versions as a page lists them: "2.6, 2.7 and 2.15"."""
    ordered = sorted(versions, key=lambda version: [*map(int, version.split("."))])
    return " and ".join(filter(None, [", ".join(ordered[:-1]), *ordered[-1:]]))


def kinds_named(rows):
    """The versions of rows, as a page names them: Pythons, torches, the lowest of all."""
    pythons = {".".join(row.name.split(".")[:2]) for row in rows if row.name[0].isdigit()}
    torches = {row.torch for row in rows if row.name.startswith("torch-")}
    kinds = [f"on Python {listed(pythons)}"] * bool(pythons)
    kinds += [f"with torch {listed(torches)}"] * bool(torches)
    kinds += ["with the lowest version of every dependency"] * any(
        row.name == "lowest" for row in rows
    )
    return kinds


def sentences_of(rows):
    """What the page says of the rows: those that pass, and those with failures."""
    failing = [row for row in rows if not row.passes]
    # A Python passes where each of its patch versions does.
    minors = {".".join(row.name.split(".")[:2]) for row in failing}
    passing = [
        row for row in rows if row.passes and ".".join(row.name.split(".")[:2]) not in minors
    ]
    sentences = []
    if passing:
        first, *others = kinds_named(passing)
        sentences.append(f"All tests and all examples pass {first} {LINK}.")
        sentences += [f"They also pass {', and '.join(others)}."] * bool(others)
    if failing:
        link = "" if passing else f" {LINK}"
        kinds = ", and ".join(kinds_named(failing))
        sentences.append(f"Not all pass {kinds}{link}; the table names those that fail.")
    return " ".join(sentences)


SAMPLE = """\
All tests and all examples by Python and torch: bash tests/matrix.sh
torch==2.6 pytest==8.1.

3.10          Python 3.10.13  torch 2.14.1+cu130  CUDA 13.0  2026-11-23 07:27 UTC, commit a700ae2
    examples: 33 passed, 2 xfailed
    tests: 4374 passed, 49 skipped, 1 xfailed
3.11.2        Python 3.11.2  torch 2.15.0+cu132  CUDA 13.2  2026-11-23 07:27 UTC, commit a700ae2
    examples: 33 passed, 2 xfailed
    tests: 4374 passed, 49 skipped, 1 xfailed
3.11.7        Python 3.11.7  torch 2.15.0+cu132  CUDA 13.2  2026-11-23 07:27 UTC, commit a700ae2
    examples: 33 passed, 2 xfailed
    tests: 1 failed, 4374 passed
        FAILED tests/test_it.py::test_it - the cause
3.14          not run: this machine has no such Python
torch-2.6.0   Python 3.11.7  torch 2.6.0+cu124  CUDA 12.4  2026-11-23 07:27 UTC, commit a700ae2
    examples: 33 passed, 2 xfailed
    tests: 4374 passed
torch-2.8.0   Python 3.11.7  torch 2.8.0+cu128  CUDA 12.8  2026-11-27 07:27 UTC, commit 82428e8
    examples: 33 passed, 2 xfailed
    tests: 4374 passed (2026-11-23 07:27 UTC, commit a700ae2)
    beside a driver: 1 failed, 800 passed
        FAILED tests/test_it.py::test_it - the cause
torch-2.9.1   Python 3.11.7  torch 2.9.1+cu128  CUDA 12.8  2026-11-27 07:27 UTC, commit 82428e8
    examples: 33 passed, 2 xfailed
    beside a driver: 800 passed
torch-2.13.0  Python 3.11.7  torch 2.13.0+cu130  CUDA 13.0  2026-11-23 07:27 UTC, commit a700ae2
    examples: did not come to an end (exit status 2)
    tests: 4374 passed
"""


def test_rows_pass_or_fail_as_a_whole():
    assert rows_of(SAMPLE) == [
        Row("3.10", "2.14", passes=True),
        Row("3.11.2", "2.15", passes=True),
        Row("3.11.7", "2.15", passes=False),
        Row("torch-2.6.0", "2.6", passes=True),
        Row("torch-2.8.0", "2.8", passes=False),
        Row("torch-2.9.1", "2.9", passes=False),
        Row("torch-2.13.0", "2.13", passes=False),
    ]


def test_a_python_passes_where_each_of_its_patch_versions_does():
    sentences = sentences_of(rows_of(SAMPLE))
    assert "pass on Python 3.10 ([recorded]" in sentences
    assert "commit). They also pass with torch 2.6. Not all" in sentences
    assert "Not all pass on Python 3.11, and with torch 2.8, 2.9 and 2.13; the table" in sentences


@pytest.mark.parametrize("names", [["3.9", "3.10", "3.13"], ["3.10"]])
def test_versions_are_listed_by_their_numbers(names):
    expected = {3: "3.9, 3.10 and 3.13", 1: "3.10"}[len(names)]
    rows = [Row(name, "2.15", passes=True) for name in names]
    assert kinds_named(rows[::-1]) == [f"on Python {expected}"]


def test_the_page_says_what_the_table_says():
    """After a run of tests/matrix.sh the page gets the sentences that this prints."""
    expected = sentences_of(rows_of(TABLE.read_text(encoding="utf-8")))
    assert expected in flat(read(PAGE)), f"write into docs/{PAGE}: {expected}"


def test_each_python_that_is_promised_has_a_row():
    declared = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    script = (ROOT / "tests/matrix.sh").read_text(encoding="utf-8")
    (rows,) = re.findall(r"^rows=\((.*)\)$", script, re.MULTILINE)
    assert {*declared} <= {".".join(name.split(".")[:2]) for name in rows.split()}
