"""The function that ``MODULE:FUNCTION`` on the command line names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable


def find_function(text: str) -> Callable[..., object]:
    """Return the function that "train:step" or "src/train.py:step" names.

    Raises:
        SpecError: there is none; whatever the module raises when it is imported.
    """
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise SpecError(text, "this is no MODULE:FUNCTION", "write for example train.py:step")
    module = _from_file(text, Path(where)) if where.endswith(".py") else _from_name(text, where)
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise SpecError(text, f"there is no function {name} in it", "name a function of the module")
    return found  # type: ignore[no-any-return] # it is callable


def _from_file(text: str, path: Path) -> Any:  # noqa: ANN401 - a module
    if not path.is_file():
        raise SpecError(text, f"there is no file {path}", "name a Python file, or a module")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SpecError(text, f"{path} cannot be imported", "name a Python file")
    sys.path.insert(0, str(path.resolve().parent))
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _from_name(text: str, name: str) -> Any:  # noqa: ANN401 - a module
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise SpecError(
            text, f"there is no module {error.name}", "name one that lies here"
        ) from None


def takes_size(text: str, step: Callable[..., object]) -> bool:
    """Return whether a step is called with a size, and not with nothing.

    Raises:
        SpecError: it needs more, or nobody can tell what it takes.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # some of C's have none
        raise SpecError(
            text, "it does not tell what arguments it takes", "name a function written in Python"
        ) from None
    needed = [
        it
        for it in parameters
        if it.default is it.empty and it.kind not in {it.VAR_POSITIONAL, it.VAR_KEYWORD}
    ]
    if len(needed) > 1 or any(it.kind not in positional for it in needed):
        names = ", ".join(it.name for it in needed)
        raise SpecError(
            text,
            f"it needs the arguments {names}",
            "give a function of a size (a batch size, say), or of nothing",
        )
    return bool(needed)
