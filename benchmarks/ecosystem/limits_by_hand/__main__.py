"""Limits that libraries' suites write by hand, beside the same limits written with this plugin.

    python -m benchmarks.ecosystem.limits_by_hand run [LIBRARY ...]
    python -m benchmarks.ecosystem.limits_by_hand table > benchmarks/results/limits_by_hand.md

``run`` runs the tests of this folder on the virtual GPU, each library in a session of its own, and
once more with wrong limits planted, which must fail. The outcomes are stored in
benchmarks/results/limits_by_hand.json. limits.toml describes the libraries' own tests, which are
not run. Only installed libraries are tested; Megatron-LM is a checkout on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import OFFLINE, RESULTS, read_toml, where

FOLDER = Path(__file__).parent
OUTCOMES = RESULTS / "limits_by_hand.json"
HANGS_S = 3600
WORDS = {"passed": "hold", "xfail": "fail as expected", "limit": "fail"}
HEAD = """# Limits that suites write by hand, and the same limits with this plugin

The facts on the libraries' tests are in `benchmarks/ecosystem/limits_by_hand/limits.toml`, our
tests are beside it. Lines are those on memory alone: of theirs those that limits.toml lists, of
ours the marker, parts, orders and statements that compute limits. Some of our tests ran once more
with a wrong limit, and then failed: the last column but one has it.
"""
COLUMNS = ("library, their test", "what it asserts", "our test", "lines: theirs, ours", "here")
COLUMNS += ("planted", "what differs, or why there is none")
Row = dict[str, Any]


def run(path: Path, names: list[str]) -> dict[str, list[str]]:
    """Return how the cases of each test ended: passed, xfail, limit, failed, error or skip.

    Args:
        path: a test file.
        names: the tests to run.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"),
            *("-c", os.devnull, f"--rootdir={path.parent}", f"--junitxml={report}"),
            *("--gpumem-device=virtual", "--gpumem-visible=session"),
            *("--gpumem-missing-baseline=note", *(f"{path}::{name}" for name in names)),
        ]
        environment = {**os.environ, **OFFLINE}
        subprocess.run(command, env=environment, capture_output=True, timeout=HANGS_S, check=False)
        outcomes = defaultdict(list)
        cases = ET.parse(report).getroot().iter("testcase") if report.exists() else ()  # noqa: S314 - pytest's own
        for case in cases:
            text = ET.tostring(case, encoding="unicode")
            end = next((child.tag for child in case if child.tag in {"failure", "error"}), "passed")
            skipped = case.find("skipped")
            if skipped is not None:
                end = skipped.get("type", "").removeprefix("pytest.")
            elif end == "failure":
                end = "limit" if re.search(r"(over budget|under limit):", text) else "failed"
            outcomes[case.get("name", "").partition("[")[0]].append(end)
    return outcomes


def planted(source: str, rows: list[Row]) -> str:
    """Return a test file's source with the right limit of each row replaced by the wrong one."""
    for row in rows:
        right, wrong = row["planted"]
        # From the decorators to the next definition.
        start = source.rindex("\n\n\n", 0, source.index(f"def {row['ours']}("))
        end = source.find("\n\n\n", start + 3) % (len(source) + 1)
        if right not in source[start:end]:
            raise ValueError(f"{row['ours']}: not there: {right!r}")
        source = source[:start] + source[start:end].replace(right, wrong) + source[end:]
    return source


def run_library(library: str, rows: list[Row]) -> None:
    """Run a library's tests, and store the outcomes."""
    path = FOLDER / f"test_{library}.py"
    held = run(path, list(dict.fromkeys(row["ours"] for row in rows)))
    with_wrong = [row for row in rows if "planted" in row]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        copy.write_text(planted(path.read_text(encoding="utf-8"), with_wrong), encoding="utf-8")
        failed = run(copy, [row["ours"] for row in with_wrong])
    outcomes = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    made = "checkout on PYTHONPATH" if library == "megatron" else version(library)
    made_with = f"{library} {made}, torch {version('torch')}"
    outcomes[library] = {**where(), "with": made_with, "held": held, "planted": failed}
    text = json.dumps(dict(sorted(outcomes.items())), indent=1)
    OUTCOMES.write_text(f"{text}\n", encoding="utf-8")


def own_lines(source: str, test: str) -> int:
    """Count the lines of a test that measure memory or compute its limits."""
    function = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == test
    )
    markers = [each for each in function.decorator_list if "gpu_memory" in ast.unparse(each)]
    counted: list[tuple[Any, Any]] = [(marker, marker) for marker in markers]
    names: set[str] = set()
    assignments = []
    for node in ast.walk(function):
        if isinstance(node, ast.With) and "gpu_memory" in ast.unparse(node.items[0]):
            counted.append((node, node.items[-1].context_expr))
            names |= named(*node.items)
        elif isinstance(node, (ast.Expr, ast.Assert, ast.Assign)):
            if re.search(r"gpu_memory\.|gc\.collect", ast.unparse(node)):
                counted.append((node, node))
            elif isinstance(node, ast.Assign):
                assignments.append(node)
    counted += [(node, node) for node in assignments if named(*node.targets) & names]
    lines = (range(first.lineno, last.end_lineno + 1) for first, last in counted)
    return len({line for span in lines for line in span})


def named(*nodes: ast.AST) -> set[str]:
    """Return the names in pieces of code."""
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def words(ends: list[str]) -> str:
    """Return how a test's cases ended: "4 hold", "2 fail as expected"."""
    counts = Counter(WORDS.get(end, end) for end in ends)
    return ", ".join(f"{number} {end}" for end, number in counts.items()) or "not run"


def table(facts: Row) -> tuple[list[str], bool]:
    """Return the page's lines, and whether a test had an unexpected outcome."""
    outcomes = json.loads(OUTCOMES.read_text())
    cells, theirs, ours, number, wrong = [], 0, 0, 0, []
    for row in facts["limits"]:
        library = row["library"]
        repository, commit = facts["repositories"][library]
        commit = row.get("commit", commit)
        ranges = row.get("memory", ())
        place = row["file"] + (f":{ranges[0][0]}" if ranges else "")
        tail = f"#L{ranges[0][0]}" if ranges else ""
        url = f"https://github.com/{repository}/blob/{commit}/{row['file'].partition(',')[0]}{tail}"
        lines = sum(last - first + 1 for first, last in ranges)
        cell = [f"{library}, [{place}]({url}), {row['test']}", row["what"]]
        test = row.get("ours", "")
        if test:
            number += 1
            own = own_lines((FOLDER / f"test_{library}.py").read_text(), test)
            theirs, ours = theirs + lines, ours + own * bool(lines)
            ran = outcomes.get(library, {"held": {}, "planted": {}})
            held, failed = (ran[name].get(test, []) for name in ("held", "planted"))
            cell += [f"`{test}`", f"{lines or '?'}, {own}", words(held)]
            if not held or set(held) - {"passed", "xfail"}:
                wrong.append(f"{library}, {test}: {words(held)}")
            if "planted" in row and "limit" not in failed:
                wrong.append(f"{library}, {test} with a wrong limit: {words(failed)}")
            limit = " ".join(row["planted"][1].split()) if "planted" in row else ""
            cell.append(
                f"{f'`{limit}`' if limit else 'a line less'}: {words(failed)}" * ("planted" in row)
            )
        else:
            cell += ["none", f"{lines or '?'}, none", "", ""]
        cell.append(row.get("differs", row.get("cannot", "")))
        cells.append(" | ".join(" ".join(each.split()) for each in cell))
    made = [
        f"- {each['with']}: {each['date']}, commit {each['commit']}" for each in outcomes.values()
    ]
    count = (
        f"{len(cells)} rows, {number} with a test of ours. Counted on both sides: {theirs} lines"
    )
    page = [HEAD, f"{count} of theirs, {ours} of ours.", ""]
    page += [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    page += [f"| {cell} |" for cell in cells]
    page += [
        "",
        "Recorded on the virtual GPU, by `python -m benchmarks.ecosystem.limits_by_hand run`:",
    ]
    return [*page, "", *made, *(f"- not as it should be: {each}" for each in wrong)], bool(wrong)


def main() -> int:
    """Run libraries, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("libraries", nargs="*", help="by default all")
    arguments = parser.parse_args()
    facts = read_toml(FOLDER / "limits.toml")
    if arguments.action == "table":
        lines, is_wrong = table(facts)
        print(*lines, sep="\n")
        return int(is_wrong)
    for library in arguments.libraries or facts["repositories"]:
        run_library(
            library, [r for r in facts["limits"] if r["library"] == library and "ours" in r]
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
