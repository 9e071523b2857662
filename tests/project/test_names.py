"""Names of the package and of its tests: one word for one thing, no two files of one name."""

import ast
import collections
import functools
import re

import pytest
from helpers.paths import ROOT, TESTS

PACKAGE, BENCHMARKS = ROOT / "pytest_gpumem", ROOT / "benchmarks"
LIMIT = re.compile(r"_?(MOST|LEAST|FEWEST|LONGEST|SHORTEST|LARGEST|SMALLEST|DEEPEST|HIGHEST)(_|$)")
"""words of constants in whose place stand MAX and MIN, as in torch and pytest"""


@functools.cache
def trees(folder):
    """The syntax trees of a folder's modules, by their paths from the project's folder."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text("utf-8"))
        for path in folder.rglob("*.py")
    }


def nodes(node_type, *folders):
    """Yield the path of each node of a type, and the node."""
    for folder in folders:
        for path, tree in trees(folder).items():
            yield from ((path, node) for node in ast.walk(tree) if isinstance(node, node_type))


@pytest.mark.parametrize("word", ["MOST", "_LONGEST_NAME", "LEAST_ADDRESS"])
def test_the_check_knows_a_limit(word):
    assert LIMIT.match(word)


def test_limits_are_named_max_and_min():
    named = [
        f"{path}: {node.id}"
        for path, node in nodes(ast.Name, PACKAGE, BENCHMARKS)
        if isinstance(node.ctx, ast.Store) and LIMIT.match(node.id)
    ]
    assert named == []


def test_no_name_stands_for_anything():
    """A loop variable is a row, a peak, a result (CONTRIBUTING.md)."""
    stored = [(path, node.arg) for path, node in nodes(ast.arg, PACKAGE)]
    stored += [
        (path, node.id)
        for path, node in nodes(ast.Name, PACKAGE)
        if isinstance(node.ctx, ast.Store)
    ]
    assert [row for row in stored if row[1] in {"it", "one", "said", "now", "wanted"}] == []


def test_no_two_files_of_tests_have_one_name():
    names = collections.Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_modules_have_one_name():
    stems = collections.Counter(path.stem for path in PACKAGE.rglob("*.py"))
    entries = {"__init__", "__main__"}
    assert [stem for stem, count in stems.items() if count > 1 and stem not in entries] == []


OF_COMMANDS = {"add_arguments", "run", "main"}
"""functions that each command of gpumem has"""


def test_no_two_public_definitions_have_one_name():
    defined = collections.Counter(
        name
        for tree in trees(PACKAGE).values()
        for name in {  # a function with overloads is defined several times
            node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        }
        if not name.startswith("_")
    )
    assert [name for name, count in defined.items() if count > 1 and name not in OF_COMMANDS] == []


def words(text):
    return {word.rstrip("s") for word in re.findall(r"[a-z]+", text.lower())}


SMALL_WORDS = words(
    "return yield the a an of in to for as is are it that each by what from with on"
)


def says_its_name(function):
    """Whether a docstring of one line has no word that is not in the function's own head."""
    text = ast.get_docstring(function)
    if not text or "\n" in text:
        return False
    returned = re.sub(r"([A-Z])", r" \1", ast.unparse(function.returns or ast.Constant("")))
    head = f"{function.name} {ast.unparse(function.args)} {returned}".replace("_", " ")
    return words(text) <= words(head) | SMALL_WORDS


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('def _tables(devices) -> str:\n    """Return the tables of the devices."""', True),
        ('def _tables(devices) -> str:\n    """Return the tables, the largest first."""', False),
        ("def _tables(devices) -> str:\n    pass", False),
    ],
)
def test_the_check_knows_a_docstring_that_says_its_name(source, says):
    (function,) = ast.parse(source).body
    assert says_its_name(function) is says


def test_docstrings_of_private_functions_say_more_than_the_name():
    found = [
        f"{path}: {node.name}"
        for path, node in nodes(ast.FunctionDef, PACKAGE, BENCHMARKS)
        if re.match("_[^_]", node.name) and says_its_name(node)
    ]
    assert found == []
