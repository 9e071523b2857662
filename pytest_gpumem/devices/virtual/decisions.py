"""Whether a program decides by a value that it reads back, or only prints and logs it.

The statement that reads says it: a test, a comparison, an index decide; a call of ``print`` or
``append`` does not, nor does adding to a running total.
"""

from __future__ import annotations

import ast
import functools
import linecache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.source_lines import is_users

if TYPE_CHECKING:
    from types import CodeType, FrameType

PACKAGE: Final = f"{Path(__file__).parents[2]}/"
FLOAT_SIZES: Final = {2, 4}
"""bytes of a number that is a float nearly always: whole numbers and masks have 8 or 1"""
SHOWING: Final = {"__format__", "__repr__", "__str__", "_str_intern", "_tensor_str"}
"""functions of PyTorch's that make text of a tensor"""
RECORDING: Final = (
    *("print", "append", "extend", "write", "update", "add_scalar", "add_scalars", "log_dict"),
    *("log", "debug", "info", "warning", "set_postfix", "set_description", "format"),
)
"""functions to which a value is handed to be shown or kept"""
READING: Final = {"item", "tolist", "cpu", "numpy", "float", "to"}
"""functions that bring a number to the host; other statements read by an operator in them, which
asks the device for a size: ``rows = mask.nonzero()``"""
_TESTS: Final = (ast.If, ast.While, ast.Assert, ast.Match)
_CHOICES: Final = (ast.Compare, ast.BoolOp, ast.IfExp, ast.Not, ast.Slice, ast.comprehension)


def decides(frame: FrameType | None, size: int) -> bool:
    """Return whether the code of a stack of frames decides by a value that it reads now.

    Args:
        frame: the innermost frame of Python's.
        size: bytes of the value.
    """
    is_float = is_innermost = size in FLOAT_SIZES
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):  # the values' own code
            frame = frame.f_back
            continue
        if frame.f_code.co_name in SHOWING:
            return False
        if is_innermost:
            is_float = _reads_a_number(frame.f_code.co_filename, frame.f_lineno)
            if is_float and _drops_the_number(frame.f_code.co_filename, frame.f_lineno):
                return False
            is_innermost = False
        verdict = _of_line(frame.f_code, frame.f_lineno, is_float=is_float)
        if verdict is not None and (verdict or is_users(frame.f_code.co_filename)):
            return verdict
        frame = frame.f_back
    return True


@functools.lru_cache(maxsize=1024)
def _of_line(code: CodeType, line: int, *, is_float: bool) -> bool | None:
    """Return whether the statement of a line decides; None: its function returns the value."""
    function, statement = _statement(code.co_filename, line)
    if statement is None:
        return True if is_users(code.co_filename) else None
    verdict: bool | None = not is_float
    if isinstance(statement, _TESTS) or any(
        isinstance(node, _CHOICES) for node in _own_nodes(statement)
    ):
        verdict = True
    elif isinstance(statement, (ast.Return, ast.With)):
        verdict = None
    elif isinstance(statement, ast.AugAssign):
        verdict = False
    elif isinstance(statement, ast.Expr):
        call = statement.value
        shown = isinstance(call, ast.Call) and _called(call.func) in RECORDING
        verdict = False if shown else (not is_float or None)
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and is_float:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        nodes = [node for target in targets for node in ast.walk(target)]
        verdict = _chosen_by(function, {node.id for node in nodes if isinstance(node, ast.Name)})
    return verdict


@functools.lru_cache(maxsize=1024)
def _reads_a_number(filename: str, line: int) -> bool:
    """Return whether a statement brings a number to the host itself; True without its source."""
    statement = _statement(filename, line)[1]
    if statement is None:
        return True
    nodes = _own_nodes(statement)
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return not READING.isdisjoint(names)


@functools.lru_cache(maxsize=1024)
def _drops_the_number(filename: str, line: int) -> bool:
    """Return whether a statement only reads, as ``loss.item()`` does that waits for the device."""
    statement = _statement(filename, line)[1]
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    calls = [node for node in _own_nodes(statement) if isinstance(node, ast.Call)]
    readers = [call for call in calls if _called(call.func) in READING]
    return readers == [statement.value]


@functools.lru_cache(maxsize=1024)
def is_test_of_while(filename: str, line: int) -> bool:
    """Return whether a line is in the test of a ``while``."""
    return isinstance(_statement(filename, line)[1], ast.While)


def _own_nodes(statement: ast.stmt) -> list[ast.AST]:
    """Return the nodes of a statement, without the statements within it."""
    nodes: list[ast.AST] = [statement]
    for node in nodes:
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
    return nodes


def _called(function: ast.expr) -> str:
    """Return the last name of a function that is called."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _chosen_by(function: ast.AST, names: set[str]) -> bool:
    """Return whether any of these variables is tested or compared in a function."""
    for node in ast.walk(function):
        test = getattr(node, "test", None) if isinstance(node, _TESTS) else None
        if test is None and isinstance(node, _CHOICES):
            test = node
        if test is not None and any(
            isinstance(part, ast.Name) and part.id in names for part in ast.walk(test)
        ):
            return True
    return False


@functools.lru_cache(maxsize=256)
def _syntax_tree(filename: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _statement(filename: str, line: int) -> tuple[ast.AST, ast.stmt | None]:
    """Return the innermost function and statement at a line of a file."""
    module = _syntax_tree(filename)
    function: ast.AST = module or ast.Module([], [])
    statement: ast.stmt | None = None
    for node in ast.walk(function):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or 0):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node  # ast.walk comes to what is within later
        test = getattr(statement, "test", None)
        if test is None or not test.lineno <= line <= test.end_lineno:
            statement = node
    return function, statement
