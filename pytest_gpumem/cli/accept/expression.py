"""Expressions that choose tests, as pytest's ``-k``: names, and, or, not, parentheses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pytest_gpumem.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

_TOKEN: Final = re.compile(r"\s*(?:([()])|([^\s()]+))")
_WORDS: Final = frozenset({"and", "or", "not"})
MAX_DEPTH: Final = 100
"""parentheses inside of each other, and "not" before each other"""


def chooser(expression: str) -> Callable[[str], bool]:
    """Return whether an expression is true of a test's nodeid.

    A name is true of each nodeid that has it in it, whatever the case of its letters.

    Raises:
        SpecError: it is no expression.
    """
    reader = _Reader(expression)
    choose = reader.alternative(0)
    if reader.next is not None:
        raise reader.error(f"{reader.next!r} is not expected there")
    return choose


class _Reader:
    def __init__(self, expression: str) -> None:
        self.expression = expression
        tokens = [match[1] or match[2] for match in _TOKEN.finditer(expression)]
        self._tokens = iter(tokens)
        self.next: str | None = next(self._tokens, None)

    def error(self, problem: str) -> SpecError:
        return SpecError(
            f"-k {self.expression}", problem, "write an expression as for pytest: 'a and not b'"
        )

    def alternative(self, depth: int) -> Callable[[str], bool]:
        choices = [self._conjunction(depth)]
        while self._take("or"):
            choices.append(self._conjunction(depth))
        return lambda nodeid: any(choose(nodeid) for choose in choices)

    def _conjunction(self, depth: int) -> Callable[[str], bool]:
        choices = [self._term(depth)]
        while self._take("and"):
            choices.append(self._term(depth))
        return lambda nodeid: all(choose(nodeid) for choose in choices)

    def _term(self, depth: int) -> Callable[[str], bool]:
        if depth > MAX_DEPTH:
            raise self.error("the expression is nested too deeply")
        if self._take("not"):
            refused = self._term(depth + 1)
            return lambda nodeid: not refused(nodeid)
        if self._take("("):
            inner = self.alternative(depth + 1)
            if not self._take(")"):
                raise self.error("a parenthesis is not closed")
            return inner
        name = self.next
        if name is None or name == ")" or name in _WORDS:
            raise self.error("a name is missing" if name is None else f"{name!r} is not a name")
        self.next = next(self._tokens, None)
        folded = name.casefold()
        return lambda nodeid: folded in nodeid.casefold()

    def _take(self, word: str) -> bool:
        if self.next != word:
            return False
        self.next = next(self._tokens, None)
        return True
