"""The use that code makes of numbers: whether it decides by them, or only shows and keeps them.

Numbers are named by their sources: ``loss`` of a variable, ``.loss`` of an attribute, ``['loss']``
of an item by a constant key, ``item()`` of a call.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.virtual.running_call import NUMERIC_MODULES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

SHOWING_WORDS: Final = {
    *("add", "append", "debug", "display", "dump", "extend", "format", "info", "insert", "log"),
    *("logger", "logs", "meter", "metric", "metrics", "plot", "postfix", "print", "record"),
    *("report", "save", "scalar", "scalars", "show", "step", "track", "update", "warn", "warning"),
    "write",
}
"""words in the names of functions that show or keep a number"""
NUMERIC: Final = {
    *("abs", "all", "any", "bool", "complex", "dict", "enumerate", "float", "int", "isinstance"),
    *("len", "list", "max", "min", "repr", "round", "set", "sorted", "str", "sum", "tensor"),
    *("tuple", "type", "zip"),
}
"""functions that return the same sizes for all numbers"""
SCALING: Final = {
    *("add", "addcdiv", "addcmul", "clamp", "clip", "div", "eq", "fill", "ge", "gt", "le"),
    *("lerp", "lt", "masked_fill", "mul", "ne", "pow", "sub"),
}
"""functions of PyTorch's that take a number for the elements, and the same in place"""
_NAMED: Final = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)
TESTS: Final = (ast.If, ast.While, ast.Assert, ast.Match)
"""statements that choose"""
CHOICES: Final = (ast.Compare, ast.BoolOp, ast.IfExp, ast.Not, ast.Slice, ast.comprehension)
"""expressions that choose, or that make a size"""


def names_of(target: ast.expr) -> Iterator[str]:
    """Yield the names of the numbers of an expression."""
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Attribute):
        yield f".{target.attr}"
    elif isinstance(target, ast.Call):
        yield f"{called(target.func)}()"
    elif isinstance(target, ast.Subscript):
        is_key = isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str)
        if is_key:
            yield f"[{ast.unparse(target.slice)}]"
        else:
            yield from names_of(target.value)
    elif isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from names_of(element)


def called(function: ast.expr) -> str:
    """Return the last name of a function that is called."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def derived(nodes: Sequence[ast.AST], names: Iterable[str]) -> set[str]:
    """Return the names of numbers, and of all numbers computed from them."""
    numbers, count = set(names), -1
    while count != len(numbers):
        count = len(numbers)
        for node in nodes:
            if isinstance(node, (ast.For, ast.comprehension)):
                source: ast.expr | None = node.iter
                targets = [node.target]
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                source = node.value
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            else:
                continue
            if source is not None and mentions(source, numbers):
                numbers.update(name for target in targets for name in names_of(target))
    return numbers


def make_sizes(nodes: Iterable[ast.AST], names: set[str]) -> bool:
    """Return whether numbers are handed to a function that may make a size of them, or an index."""
    for node in nodes:
        if isinstance(node, ast.Call) and not _shows(node.func):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(mentions(argument, names) for argument in arguments):
                return True
        elif isinstance(node, ast.Subscript) and mentions(node.slice, names):
            return True
    return False


def are_tested(nodes: Iterable[ast.AST], names: set[str]) -> bool:
    """Return whether numbers are tested or compared."""
    for node in nodes:
        if isinstance(node, (ast.If, ast.While, ast.Assert)):
            if mentions(node.test, names):
                return True
        elif isinstance(node, CHOICES) and mentions(node, names):
            return True
    return False


def mentions(expression: ast.AST, names: set[str]) -> bool:
    """Return whether an expression takes numbers of these names, other than to make text."""
    if isinstance(expression, ast.JoinedStr):
        return False
    if isinstance(expression, _NAMED) and not names.isdisjoint(names_of(expression)):
        return True
    return any(mentions(child, names) for child in ast.iter_child_nodes(expression))


def _shows(function: ast.expr) -> bool:
    """Return whether a function shows numbers, or keeps them, or computes with them."""
    name = called(function)
    owner = function.value if isinstance(function, ast.Attribute) else None
    is_numeric = isinstance(owner, ast.Name) and owner.id in NUMERIC_MODULES
    if is_numeric or name in NUMERIC or name.rstrip("_") in SCALING:
        return True
    return not SHOWING_WORDS.isdisjoint(name.lower().split("_"))
