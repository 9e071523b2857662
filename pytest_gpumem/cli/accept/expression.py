"""Select tests by expressions like pytest's ``-k``: names, and, or, not, parentheses."""

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
    """Return a function that evaluates an expression for a nodeid.

    A name is true if the nodeid contains it, ignoring case.
    """
    tokens = _TOKEN.findall(expression)
    names = [token for token in tokens if token not in _WORDS]
    numbered = iter(range(len(names)))
    # Python parses the operators as pytest does, with numbers in place of names.
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
            warnings.simplefilter("error")  # Python warns about a call of a number: "1 (2)"
            tree = ast.parse(python, mode="eval").body
        choose(tree, "")
    except (SyntaxError, MemoryError, RecursionError) as error:
        problem = "this is no expression of names, and, or, not, and parentheses"
        remedy = "write an expression as for pytest: 'a and not b'"
        raise SpecError(f"-k {expression}", problem, remedy) from error
    return lambda nodeid: choose(tree, nodeid)
