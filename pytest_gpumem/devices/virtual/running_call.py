"""The call that a frame of Python is in: its function's name, by the instruction that runs."""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import itertools
import linecache
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from types import CodeType, FrameType

SUBSCRIPT: Final = "[]"
"""the name of the function that an index runs"""
NUMERIC_MODULES: Final = {"math", "np", "numpy", "cmath"}
_SUBSCRIPTS: Final = {"BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR"}
_ARGUMENTS: Final = {"CALL_FUNCTION": 0, "CALL_METHOD": 0, "CALL_FUNCTION_KW": 1}
"""instructions of Python 3.10 that call, and the items that they take beside the arguments"""


class RunningCall(NamedTuple):
    """A call that runs now."""

    name: str
    """the function's, without its owner; or SUBSCRIPT"""
    owner: str = ""
    """the variable that it is an attribute of; "-": another expression"""

    @property
    def makes_a_number(self) -> bool:
        """Whether it is a function of Python's own, or of mathematics, that takes numbers."""
        return self.owner in NUMERIC_MODULES or (not self.owner and hasattr(builtins, self.name))


def running_call(frame: FrameType) -> RunningCall | None:
    """Return the call, or the index, that a frame runs now; None: it runs neither."""
    return _call_at(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=1024)
def _call_at(code: CodeType, instruction: int) -> RunningCall | None:
    if sys.version_info < (3, 11):  # instructions have lines and no columns
        return _by_stack(code, instruction)
    place = next(itertools.islice(code.co_positions(), instruction // 2, None))
    module = syntax_tree(code.co_filename)
    if module is None or None in place:
        return None
    line, end_line, column, end_column = place
    call: RunningCall | None = None
    for node in ast.walk(module):
        if not isinstance(node, ast.expr) or (node.end_lineno, node.end_col_offset) != (
            end_line,
            end_column,
        ):
            continue
        if isinstance(node, ast.Call):  # of a method on a line of its own, the place is the name's
            function = node.func
            owner = getattr(function, "value", None)
            function_name = str(getattr(function, "attr", getattr(function, "id", "")))
            call = call or RunningCall(function_name, getattr(owner, "id", "-") if owner else "")
        elif isinstance(node, ast.Subscript):
            call = call or RunningCall(SUBSCRIPT)
        elif (node.lineno, node.col_offset) == (line, column):
            return None  # an operator, whose last operand ends here as well
    return call


def _by_stack(code: CodeType, instruction: int) -> RunningCall | None:
    """Return the call that runs, by the instructions of Python 3.10.

    Args:
        code: the frame's.
        instruction: the offset of the one that runs.
    """
    instructions = [each for each in dis.get_instructions(code) if each.offset <= instruction]
    running = instructions.pop()
    if running.opname in _SUBSCRIPTS:
        return RunningCall(SUBSCRIPT)
    if running.opname not in _ARGUMENTS and running.opname != "CALL_FUNCTION_EX":
        return None
    # The arguments were put on the stack last, and before them the function.
    if running.opname == "CALL_FUNCTION_EX":
        missing = 1 + ((running.arg or 0) & 1)
    else:
        missing = (running.arg or 0) + _ARGUMENTS[running.opname]
    while missing > 0 and instructions:
        loading = instructions.pop()
        missing -= dis.stack_effect(loading.opcode, loading.arg, jump=False)
    if not instructions:
        return RunningCall("", "-")
    function = instructions.pop()
    if function.opname not in {"LOAD_METHOD", "LOAD_ATTR"}:
        return RunningCall(str(function.argval))
    owner = instructions[-1] if instructions else None
    is_named = owner is not None and owner.opname in {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST"}
    return RunningCall(str(function.argval), str(owner.argval) if owner and is_named else "-")


@functools.lru_cache(maxsize=256)
def syntax_tree(filename: str) -> ast.Module | None:
    """Return a file's syntax tree; None without a source."""
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError):
        return None
