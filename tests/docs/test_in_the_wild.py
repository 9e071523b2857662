"""The page of regressions that shipped has the figures that were recorded, and those alone."""

import json
import re
import sys

import pytest
from helpers.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

PAGE = (ROOT / "benchmarks/wild/README.md").read_text(encoding="utf-8")
DOCS_PAGE = (ROOT / "docs/explanation/in-the-wild.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECORDED = json.loads((ROOT / "benchmarks/results/wild.json").read_text(encoding="utf-8"))
WILD = ROOT / "benchmarks/wild"
REGRESSIONS = tomllib.loads((WILD / "regressions.toml").read_text(encoding="utf-8"))
RESULTS = {name: it for name, it in RECORDED.items() if not it.get("tried")}
TRIED = {name: it for name, it in RECORDED.items() if it.get("tried")}
ROWS, SHOWN = (
    [line for line in page.splitlines() if re.match(r"\| [\w-]+ \S+ \(of \d", line)]
    for page in (PAGE, DOCS_PAGE)
)


def test_every_regression_of_the_folder_has_a_result_and_a_row():
    shown = {name for name, facts in REGRESSIONS.items() if "release" in facts}
    assert set(RESULTS) == shown
    assert len(ROWS) == len(shown)


def test_the_page_shows_rows_of_the_whole_table():
    assert SHOWN
    assert {*SHOWN} <= {*ROWS}
    assert f"for each of {sum(it['found'] for it in RESULTS.values())} regressions" in DOCS_PAGE


def test_the_tests_of_every_regression_are_there():
    named = {test for facts in REGRESSIONS.values() for test in facts["tests"]}
    written = {
        f"{path.name}::{name}"
        for path in WILD.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert named == written


def test_what_was_tried_in_vain_is_told_with_what_its_search_said():
    assert set(TRIED) == {name for name, facts in REGRESSIONS.items() if "release" not in facts}
    for result in TRIED.values():
        package, good, _, bad = result["asked"].split()
        assert result["said"].splitlines()[0] == f"nothing grew between {package} {good} and {bad}"
        (link,) = result["links"]
        (row,) = [it for it in PAGE.splitlines() if f"{link.replace('#', '/issues/')})" in it]
        assert f"run from {package} {good} to {bad}: nothing grew" in row


def test_the_readme_s_two_rows_are_recorded():
    rows = re.findall(r"^  - (\S+) (\S+): [^,]+, (\d+) → (\d+) MiB\.$", README, re.MULTILINE)
    found = {(it["package"], it["release"]): it for it in RESULTS.values() if it["found"]}
    assert rows
    for package, release, *sizes in rows:
        recorded = [found[package, release][name] for name in ("before", "after")]
        assert [f"{float(it.removesuffix(' MiB')):.0f}" for it in recorded] == sizes
    number = sum(it["found"] for it in RESULTS.values())
    assert re.search(rf"\bfound {number}\b", README)


@pytest.mark.parametrize("name", RESULTS)
def test_a_row_has_the_recorded_release_figures_and_line(name):
    result = RESULTS[name]
    package, good, _, bad = result["asked"].split()
    (row,) = [row for row in ROWS if row.startswith(f"| {package}") and f"{good} to {bad}" in row]
    for link in result["links"]:
        assert re.search(rf"{link.partition('#')[0]}/\w+/{link.partition('#')[2]}\b", row), link
    if not result["found"]:
        assert "not found" in row
        return
    assert row.startswith(f"| {package} {result['release']} (")
    assert f"{result['before']} → {result['after']}" in row
    if not result["cause"]:
        assert "| none: " in row
        return
    place = re.search(r"(?: at |: )(\S+:\d+) (?:\((\S+)\)$|changed: )", result["cause"])
    if not place[1].startswith("benchmarks/"):  # the test's own line
        assert place[1].endswith(re.search(r"`([^`]+)`", row)[1])
        assert (f"`{place[2]}`" if place[2] else "which changed") in row
