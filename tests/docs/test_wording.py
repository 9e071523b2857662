"""The words of messages: the sentences of today are in the code, those of before are not."""

import ast
import re

import pytest
from helpers.native_sources import NATIVE
from helpers.pages import read
from helpers.paths import ROOT

ROWS = re.findall(r"^\| (.+) \| (.+) \|$", read("tests/tables/wording.md"), re.MULTILINE)
ROWS = [row for row in ROWS if row != ("before", "today") and set(row[0]) != {"-"}]


def texts(tree):
    """The texts of a module; what an f-string puts in is an ellipsis."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (it.value if isinstance(it, ast.Constant) else "\u2026" for it in node.values)
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def code():
    """All texts of the package, and the notes of the native library."""
    modules = (ROOT / "pytest_gpumem").rglob("*.py")
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in modules]
    notes = (NATIVE / "base" / "estimated_libraries.h").read_text(encoding="utf-8")
    return "\n".join([notes, *(text for tree in trees for text in texts(tree))])


def test_there_are_rows_enough():
    assert len(ROWS) >= 40


@pytest.mark.parametrize(("before", "today"), ROWS)
def test_the_sentence_of_today_is_in_the_code_and_that_of_before_is_not(code, before, today):
    assert today in code
    assert before not in code
