"""What the pages on second runs say is in the code, and each test that they name is there."""

from __future__ import annotations

import re

import pytest
from helpers.paths import ROOT

from pytest_gpumem.testrun.second_runs import ALL

PAGES = ROOT / "tests" / "tables"


def test_the_page_lists_each_declared_second_run():
    page = (ROOT / "docs/explanation/second-runs.md").read_text(encoding="utf-8")
    rows = [f"| {run.cause} | {run.does} | {run.devices} |" for run in ALL]
    table = page.partition("| the test failed because |")[2].partition("\n\n")[0]
    assert table.splitlines()[2:] == rows


@pytest.mark.parametrize("page", ["second-runs.md", "hard-places.md"])
def test_each_test_that_the_page_names_is_there(page):
    lines = (PAGES / page).read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if "tests/" in line]
    assert len(rows) > 10
    for row in rows:
        path = ""
        for cited in re.findall(r"`((?:tests/[\w/.]+)?(?:::\w+)?)`", row):
            file, _, name = cited.partition("::")
            path = file or path
            source = (ROOT / path).read_text(encoding="utf-8")
            assert f"def {name}(" in source or not name, cited
