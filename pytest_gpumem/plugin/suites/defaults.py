"""Arguments of the marker that hold for a folder: by a conftest file's hook, or by the ini file.

In the ini file, ``gpumem_defaults`` has a line for each pattern of node ids::

    tests/models/*: tolerance="2%", card="T4"
"""

from __future__ import annotations

import ast
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

import pytest

from pytest_gpumem.errors import SpecError
from pytest_gpumem.plugin.ini_file import as_text, read_ini
from pytest_gpumem.plugin.pytest_item import unique_nodeid

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

INI: Final = "gpumem_defaults"
HELP: Final = (
    "the marker's arguments by patterns of node ids, a line each, for tests that do not give them: "
    'tests/models/*: tolerance="2%", card="T4"'
)
RULES = pytest.StashKey["list[tuple[str, Mapping[str, object]]]"]()
_REMEDY: Final = 'write a pattern and arguments: tests/models/*: tolerance="2%", card="T4"'


def read_rules(lines: Iterable[str]) -> list[tuple[str, Mapping[str, object]]]:
    """Return each line's pattern and its arguments."""
    rules: list[tuple[str, Mapping[str, object]]] = []
    for line in lines:
        # Node ids have colons, two at a time: the pattern ends at the first that stands alone.
        pattern, colon, arguments = line.replace("::", "\0").partition(":")
        call = None
        try:
            tree = ast.parse(f"f({arguments.strip()})".replace("\0", "::"), mode="eval").body
            call = tree if isinstance(tree, ast.Call) and not tree.args else None
            values = {
                str(keyword.arg): ast.literal_eval(keyword.value)
                for keyword in (call.keywords if call else ())
                if keyword.arg
            }
        except (SyntaxError, ValueError):
            values = {}
        if not colon or not pattern.strip() or call is None or len(values) < len(call.keywords):
            raise SpecError(f"{INI}: {line}", "this line cannot be read", _REMEDY)
        if not values:
            raise SpecError(f"{INI}: {line}", "this line has no argument", _REMEDY)
        rules.append((pattern.strip().replace("\0", "::"), values))
    return rules


def defaults_of(item: pytest.Item) -> Iterator[Mapping[str, object]]:
    """Yield the arguments of the marker that hold for a test by its place, the nearest first."""
    for arguments in item.ihook.pytest_gpumem_defaults(item=item):
        yield arguments or {}
    if RULES not in item.config.stash:
        lines = read_ini(item.config, INI)
        lines = lines if isinstance(lines, list) else as_text(lines).splitlines()
        item.config.stash[RULES] = read_rules(str(line) for line in lines if str(line).strip())
    nodeid, rules = unique_nodeid(item), item.config.stash[RULES]
    for pattern, arguments in reversed(rules):  # of two lines the later wins
        if fnmatchcase(nodeid, pattern) or fnmatchcase(nodeid.partition("::")[0], pattern):
            yield arguments
