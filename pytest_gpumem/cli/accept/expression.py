"""Expressions that choose tests, as pytest's ``-k``: names, and, or, not, parentheses."""

from __future__ import annotations

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

    Raises:
        SpecError: it is no expression.
    """
    tokens = _TOKEN.findall(expression)
    names = [token for token in tokens if token not in _WORDS]
    # Python's own and, or, not are those of pytest. Nothing else is evaluated.
    python = " ".join(token if token in _WORDS else f"x[{names.index(token)}]" for token in tokens)

    def choose(nodeid: str) -> bool:
        found = [name.casefold() in nodeid.casefold() for name in names]
        return bool(eval(code, {"x": found}))  # noqa: S307 - see above

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a name before a parenthesis is no call
            code = compile(python, "-k", "eval")
        choose("")
    except (SyntaxError, MemoryError, RecursionError, TypeError) as error:
        problem = "this is no expression of names, and, or, not, and parentheses"
        remedy = "write an expression as for pytest: 'a and not b'"
        raise SpecError(f"-k {expression}", problem, remedy) from error
    return choose
