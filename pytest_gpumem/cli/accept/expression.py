"""Expressions that choose tests, as pytest's ``-k``: names, and, or, not, parentheses."""

from __future__ import annotations

import ast
import re
import warnings
from typing import TYPE_CHECKING, Final

from pytest_gpumem.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

_TOKEN: Final = re.compile(r"[()]|[^\s()]+")
_WORDS: Final = frozenset({"and", "or", "not", "(", ")"})


def chooser(expression: str) -> Callable[[str], bool]:
    """Return whether an expression is true of a test's nodeid.

    A name is true of each nodeid that has it in it, whatever the case of its letters.
    """
    tokens = _TOKEN.findall(expression)
    names = [token for token in tokens if token not in _WORDS]
    numbered = iter(range(len(names)))
    # Python reads the words and parentheses as pytest does; a number stands for a name.
    python = " ".join(token if token in _WORDS else str(next(numbered)) for token in tokens)

    def choose(node: ast.expr, nodeid: str) -> bool:
        match node:
            case ast.BoolOp(operation, values):
                every = all if isinstance(operation, ast.And) else any
                return every([choose(value, nodeid) for value in values])
            case ast.UnaryOp(ast.Not(), operand):
                return not choose(operand, nodeid)
            case ast.Constant(int() as number):
                return names[number].casefold() in nodeid.casefold()
        raise SyntaxError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a number is called: "1 (2)"
            tree = ast.parse(python, mode="eval").body
        choose(tree, "")
    except (SyntaxError, MemoryError, RecursionError) as error:
        problem = "this is no expression of names, and, or, not, and parentheses"
        remedy = "write an expression as for pytest: 'a and not b'"
        raise SpecError(f"-k {expression}", problem, remedy) from error
    return lambda nodeid: choose(tree, nodeid)
