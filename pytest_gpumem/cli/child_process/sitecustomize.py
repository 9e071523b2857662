"""Runs at the start of each Python process that a marked test or ``gpumem run`` starts.

On a virtual GPU it adapts torch.distributed; below ``gpumem run`` the process leaves its peaks.

Python imports the first ``sitecustomize`` on its path. This one imports the user's own, if there is
one, and costs little more until torch is imported. See :mod:`pytest_gpumem.cli.children`.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from pathlib import Path

FOLDER = str(Path(__file__).parent)


def _import_next() -> None:
    """Import the ``sitecustomize`` that Python would have found without this one."""
    this = sys.modules.pop(__name__)
    path = list(sys.path)
    sys.path[:] = [folder for folder in path if folder != FOLDER]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        # the import machinery takes the module from here at the end of its import
        sys.modules.setdefault(__name__, this)


# An interpreter without this package, or with another version of it, works as if not watched.
with suppress(Exception):
    from pytest_gpumem.cli.children import watch_this_process

    watch_this_process()
if __name__ == "sitecustomize":
    _import_next()
