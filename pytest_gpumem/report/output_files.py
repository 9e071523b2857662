"""Which existing files an output may replace: earlier outputs of its kind, and empty files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.errors import SpecError

if TYPE_CHECKING:
    import os

_BEGINNINGS: Final = {
    "json": rb'\{\s*"format": \d+,\s*"gpumem": ".*",\s*"created": ',
    "markdown": rb"## GPU memory: ",
    "html": (
        rb'<!DOCTYPE html>(?s:.*)<meta name="generator" content="pytest-gpumem">\s*'
        rb"<title>GPU memory[,<]"
    ),
    "bisect": rb'\{\s*"package": ".*",\s*"good": ',
    "verify": rb'\{\s*"format": \d+,\s*"gpumem": ".*",\s*"card": ',
}
"""by the kind of output: how its files begin"""
_READ: Final = 1 << 16
"""bytes of a file that are read; the longest beginning has a test's name"""


def require_replaceable(path: str | os.PathLike[str], kind: str, given: str) -> None:
    """Refuse a file that exists and was not written as this kind of output.

    A path that cannot be looked at is left to the error of its writing.

    ``kind`` is of ``_BEGINNINGS``; ``given`` is the option that names the file, for the error.

    Raises:
        SpecError: it is another file, cannot be read, or is no regular file.
    """
    path = Path(path)
    problem = "this file exists, and was not written by this option"
    try:
        if not path.exists() or path.is_dir():
            return
        if path.is_file():  # reading a named pipe would wait for ever
            with path.open("rb") as stream:
                start = stream.read(_READ)
            if not start or re.match(_BEGINNINGS[kind], start):
                return
        else:
            problem = "this is not a regular file"
    except PermissionError:
        problem = "this file exists, and cannot be read"
    except (OSError, ValueError):
        return
    raise SpecError(given, problem, "name another file, or move this one away")
