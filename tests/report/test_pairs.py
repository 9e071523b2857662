"""Each pair of figures that any text shows can be true: no more is allocated than is reserved."""

import re

import pytest
from helpers.paths import ROOT

from pytest_gpumem.sizes import parse_size

PAIR = re.compile(r"([0-9.,]+\s[KMGT]?i?B) (?:were )?allocated, ([0-9.,]+\s[KMGT]?i?B) reserved")
TEXTS = [
    path
    for folder in ("tests/gold", "docs", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".txt", ".md", ".json"}
]


@pytest.mark.parametrize("path", [*TEXTS, ROOT / "README.md"], ids=lambda path: path.name)
def test_no_text_shows_more_allocated_than_reserved(path):
    pairs = PAIR.findall(path.read_text(encoding="utf-8"))
    assert [pair for pair in pairs if parse_size(pair[0]) > parse_size(pair[1])] == []


def test_the_pairs_of_verdicts_are_found():
    """Among them the held and the needed memory of a test that ran out of it."""
    texts = [path.read_text(encoding="utf-8") for path in TEXTS]
    assert sum(len(PAIR.findall(text)) for text in texts) > 10
