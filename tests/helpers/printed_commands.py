"""Find texts in the package's sources that contain commands, for tests that run the commands."""

from __future__ import annotations

import ast
import functools
import re

from helpers.paths import ROOT

PACKAGE = ROOT / "pytest_gpumem"
COMMAND = re.compile(
    r"\b(?:pytest --?\w|gpumem (?:run|cards|compare|history|accept)\b"
    r"|git (?:checkout|fetch|log)\b|pip install|python \w+\.py|torchrun --?\w).*"
)


def source_trees():
    """Yield the name and syntax tree of each module of the package, and of setup.py."""
    for path in (*sorted(PACKAGE.rglob("*.py")), ROOT / "setup.py"):
        base = PACKAGE if path.is_relative_to(PACKAGE) else ROOT
        yield path.relative_to(base).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def texts_with_commands():
    """The texts from their first command on, by module; docstrings are left out."""
    texts = {}
    for name, tree in source_trees():
        prose = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in prose:
                match = COMMAND.search(str(node.value))
                if match:
                    texts.setdefault(name, []).append(match[0])
    return texts
