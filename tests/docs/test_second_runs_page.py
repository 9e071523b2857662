"""The page of second runs: each test that it names is there."""

from __future__ import annotations

import re

from helpers.paths import ROOT

PAGE = ROOT / "docs" / "explanation" / "second-runs.md"


def test_each_test_that_the_page_names_is_there():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "tests/" in line]
    assert len(rows) > 15
    for row in rows:
        path = ""
        for cited in re.findall(r"`((?:tests/[\w/.]+)?(?:::\w+)?)`", row):
            file, _, name = cited.partition("::")
            path = file or path
            source = (ROOT / path).read_text(encoding="utf-8")
            assert f"def {name}(" in source or not name, cited
