"""Sets environment variables that child processes inherit, each until a stack closes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from contextlib import ExitStack

CHILDREN: Final = "GPUMEM_CHILDREN"
"""variable that lists the folders to which child processes write their figures: that of the running
test, that of ``gpumem run``, or both"""
SERVER_ARGUMENTS: Final = "GPUMEM_SERVER_ARGUMENTS"
"""variable with arguments, as JSON, that replace an inference server's own"""
UNTIL_STARTED: Final = "GPUMEM_UNTIL_STARTED"
"""variable that is set if an inference server is to end once it has started"""
PYTHON_PATH: Final = "PYTHONPATH"
HOOK: Final = str(Path(__file__).parent / "child_process")
"""the folder with the sitecustomize.py that Python runs first in child processes"""


def prepend(stack: ExitStack, name: str, folder: str) -> None:
    """Prepend a folder to an environment variable until the stack closes."""
    folders = os.environ.get(name)
    set_variable(stack, name, f"{folder}{os.pathsep}{folders}" if folders else folder)


def set_variable(stack: ExitStack, name: str, value: str) -> None:
    """Set an environment variable until the stack closes."""
    old_value = os.environ.get(name)
    os.environ[name] = value
    if old_value is None:
        stack.callback(os.environ.pop, name, None)
    else:
        stack.callback(os.environ.__setitem__, name, old_value)
