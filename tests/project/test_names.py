"""Names of the package and of its tests: no two files, functions or classes of one name."""

import ast
import collections

from helpers.paths import ROOT, TESTS

PACKAGE = ROOT / "pytest_gpumem"


def test_no_two_files_of_tests_have_one_name():
    paths = [*TESTS.rglob("test_*.py")]
    names = collections.Counter(path.name for path in paths)
    assert [path for path in paths if names[path.name] > 1] == []


def test_no_two_modules_have_one_name():
    stems = collections.Counter(path.stem for path in PACKAGE.rglob("*.py"))
    entries = {"__init__", "__main__"}
    assert [stem for stem, count in stems.items() if count > 1 and stem not in entries] == []


OF_COMMANDS = {"add_arguments", "run", "main"}
"""functions that each command of gpumem has"""


def test_no_two_public_definitions_have_one_name():
    defined = collections.Counter(
        name
        for path in PACKAGE.rglob("*.py")
        for name in {  # a function with overloads is defined several times
            node.name
            for node in ast.parse(path.read_text("utf-8")).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        }
        if not name.startswith("_")
    )
    assert [name for name, count in defined.items() if count > 1 and name not in OF_COMMANDS] == []
