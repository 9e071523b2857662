"""Whether a program decides by a value that it reads back, or only prints and logs it.

The statement that reads says it: a test, a comparison, an index decide; a call of ``print`` or
``append`` does not, nor does adding to a running total.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.devices.virtual.number_uses import (
    CHOICES,
    TESTS,
    are_tested,
    called,
    derived,
    make_sizes,
    mentions,
    names_of,
)
from pytest_gpumem.devices.virtual.running_call import running_call, syntax_tree
from pytest_gpumem.source_lines import is_users

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
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
"""functions that bring a number to the host"""
ANSWERING: Final = READING | {"equal", "allclose", "is_nonzero", "copy_", "tensor"}
"""functions that bring values to the host and ask for no size; any other, and an index, asks the
device for one: ``rows = mask.nonzero()``"""
KEEPING: Final = {"append", "extend"}
"""methods that put a value into a list"""
TENSORS: Final = {"cpu", "to", "numpy", "copy_", "tensor"}
"""functions with tensors or arrays of the host as results"""
DISPATCHING: Final = {
    "__torch_function__",
    "__torch_dispatch__",
    "_call_overload_packet_from_python",
}
"""functions of PyTorch's that hand a call on: the call is their caller's"""
OPERATORS: Final = "torch/_ops.py"
"""PyTorch's file of functions that hand calls of ``torch.ops`` on"""


class _Verdict(NamedTuple):
    """The use that a statement makes of a value."""

    decides: bool | None
    """None: its function returns the value"""
    is_kept: bool = False
    """whether the value was put into a list or a sum, which decides where it makes a size"""


def decides(frame: FrameType | None, size: int, *, sized: bool = False) -> bool:
    """Return whether the code of a stack of frames decides by a value that it reads now.

    Args:
        frame: the innermost frame of Python's.
        size: bytes of the value.
        sized: whether an operator is known to read it for a size.
    """
    if sized:
        return not _makes_text(frame)
    is_float, is_innermost, is_kept = size in FLOAT_SIZES, True, False
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename.startswith(PACKAGE):  # the values' own code
            frame = frame.f_back
            continue
        if frame.f_code.co_name in SHOWING:
            return False
        hands_on = frame.f_code.co_name in DISPATCHING or filename.endswith(OPERATORS)
        if is_innermost and hands_on and not is_users(filename):
            frame = frame.f_back
            continue
        call = running_call(frame)
        if is_innermost:
            if call and not (call.makes_a_number or call.name in ANSWERING):
                return True  # it asks the device for a size
            is_float = is_float and _reads_a_number(filename, frame.f_lineno)
            if is_float and _drops_the_number(filename, frame.f_lineno):
                return False
            is_innermost = False
        name = call.name if call and call.name not in TENSORS else ""
        verdict = _of_line(frame.f_code, frame.f_lineno, name, is_float=is_float, is_kept=is_kept)
        is_kept = verdict.is_kept
        if verdict.decides is not None and (verdict.decides or is_users(filename)):
            return verdict.decides
        frame = frame.f_back
    return not is_kept


def _makes_text(frame: FrameType | None) -> bool:
    """Return whether code makes text of a tensor, for which PyTorch selects some of its values."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_name in SHOWING:
            return True
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in SHOWING


@functools.lru_cache(maxsize=1024)
def _of_line(code: CodeType, line: int, call: str, *, is_float: bool, is_kept: bool) -> _Verdict:
    """Return the use that the statement of a line makes of a value.

    Args:
        code: of the line's function.
        line: its number.
        call: the name of the function, called in the statement, that returns a number.
        is_float: whether the value is a float, as it seems.
        is_kept: whether it was put into a list or a sum.
    """
    function, statement = _statement(code.co_filename, line)
    if statement is None:
        return _Verdict(True if is_users(code.co_filename) else None, is_kept)
    nodes = _own_nodes(statement)
    choices = [node for node in nodes if isinstance(node, CHOICES)]
    if call:  # of `(guess == label).sum().item()` the comparison is of tensors
        choices = [node for node in choices if mentions(node, {f"{call}()"})]
    chooses = isinstance(statement, TESTS) or bool(choices)
    if (chooses and not is_kept) or _make_sizes(code, nodes, {f"{call}()"}):
        return _Verdict(decides=True)
    if isinstance(statement, (ast.Return, ast.With)):
        return _Verdict(None, is_kept)
    receivers, is_added = _receivers(statement)
    if receivers and (is_float or is_kept or is_added):
        return _of_receivers(code, function, receivers, is_kept=is_kept or is_added)
    if isinstance(statement, ast.Expr) and not is_kept:
        expression = statement.value
        shows = isinstance(expression, ast.Call) and called(expression.func) in RECORDING
        return _Verdict(False if shows else (not is_float or None))
    return _Verdict(not is_float and not is_kept)


def _make_sizes(code: CodeType, nodes: Iterable[ast.AST], names: set[str]) -> bool:
    """Return whether the user's code makes sizes of numbers; PyTorch's own makes none of floats."""
    return is_users(code.co_filename) and make_sizes(nodes, names)


def _receivers(statement: ast.stmt) -> tuple[list[ast.expr], bool]:
    """Return the variables that a statement puts a value into, and whether it adds to them."""
    if isinstance(statement, ast.Assign):
        return statement.targets, False
    if isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        return [statement.target], isinstance(statement, ast.AugAssign)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        return ([call.func.value], True) if call.func.attr in KEEPING else ([], False)
    return [], False


def _of_receivers(
    code: CodeType, function: ast.AST, receivers: Sequence[ast.expr], *, is_kept: bool
) -> _Verdict:
    """Return the use that code makes of variables: of those that are local, in their function."""
    names = {name for target in receivers for name in names_of(target)}
    is_local = all(name.isidentifier() for name in names)
    nodes = list(ast.walk(function if is_local else syntax_tree(code.co_filename) or function))
    names = derived(nodes, names)
    if _make_sizes(code, nodes, names) or (not is_kept and are_tested(nodes, names)):
        return _Verdict(decides=True)
    values = [node.value for node in nodes if isinstance(node, ast.Return)]
    is_returned = any(value is not None and mentions(value, names) for value in values)
    return _Verdict(None if is_returned else False, is_kept)


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
    readers = [call for call in calls if called(call.func) in READING]
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


def _statement(filename: str, line: int) -> tuple[ast.AST, ast.stmt | None]:
    """Return the innermost function and statement at a line of a file."""
    module = syntax_tree(filename)
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
