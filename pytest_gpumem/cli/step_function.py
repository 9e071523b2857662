"""The function that ``MODULE:FUNCTION`` on the command line names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_NAMES: Final = 6
"""functions and classes that an error names"""


def find_function(target: str) -> Callable[..., object]:
    """Return the function that "train:step" or "src/train.py:step" names.

    Errors of the module's own, while it is imported, pass.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise SpecError(target, "this is not MODULE:FUNCTION", "write for example train.py:step")
    module = function = _imported(target, place)
    for attribute in name.split("."):
        function = getattr(function, attribute, None)
    if not callable(function):
        own = [
            name
            for name, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        ending = f" and {len(own) - MAX_NAMES} more" if own[MAX_NAMES:] else ""
        remedy = "name a module that defines a step function"
        remedy = f"name one of these: {', '.join(own[:MAX_NAMES])}{ending}" if own else remedy
        raise SpecError(target, f"this module has no function or class {name}", remedy)
    return function  # type: ignore[no-any-return] # it is callable


def _imported(target: str, place: str) -> Any:  # noqa: ANN401 - a module
    """Return the module of a file, or of a name in the current folder."""
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            # A module that ours imports in turn and that is missing is the module's own error.
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
            remedy = "name a module in the current folder"
            raise SpecError(target, f"there is no module {error.name}", remedy) from None
    path = Path(place)
    if not path.is_file():
        raise SpecError(target, f"there is no file {path}", "name a Python file, or a module")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SpecError(target, f"{path} cannot be imported", "name a Python file")
    sys.path.insert(0, str(path.resolve().parent))
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def takes_size(target: str, step: Callable[..., object]) -> bool:
    """Return whether a step is called with a size, and not without arguments."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # some of C's have none
        remedy = "name a function written in Python"
        raise SpecError(target, "the arguments of this function are unknown", remedy) from None
    needed = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    ]
    if len(needed) > 1 or any(parameter.kind not in positional for parameter in needed):
        names = ", ".join(parameter.name for parameter in needed)
        remedy = "name a function that takes one size (a batch size, for example), or no argument"
        raise SpecError(target, f"this function needs the arguments {names}", remedy)
    return bool(needed)
