"""Names of the package: one word for one thing, and no two modules of one name."""

import ast
import collections
import re

import pytest
from helpers.paths import ROOT

PACKAGE = ROOT / "pytest_gpumem"
LIMIT = re.compile(r"_?(MOST|LEAST|FEWEST|LONGEST|SHORTEST|LARGEST|SMALLEST|DEEPEST|HIGHEST)(_|$)")
"""words of constants in whose place stand MAX and MIN, as in torch and pytest"""


def modules():
    return [path for folder in (PACKAGE, ROOT / "benchmarks") for path in folder.rglob("*.py")]


@pytest.mark.parametrize("word", ["MOST", "_LONGEST_NAME", "LEAST_ADDRESS"])
def test_the_check_knows_a_limit(word):
    assert LIMIT.match(word)


def test_limits_are_named_max_and_min():
    named = [
        f"{path.relative_to(ROOT)}: {node.id}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and LIMIT.match(node.id)
    ]
    assert named == []


def test_no_two_modules_have_one_name():
    names = collections.Counter(path.stem for path in PACKAGE.rglob("*.py"))
    entries = {"__init__", "__main__"}
    assert [name for name, count in names.items() if count > 1 and name not in entries] == []
