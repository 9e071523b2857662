"""The pages that name a test in each row: the tests are there."""

from __future__ import annotations

import re

import pytest
from helpers.paths import ROOT

PAGES = ROOT / "tests" / "tables"


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
