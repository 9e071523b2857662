"""Describe the files of a session's report. A renderer is imported when its file is written."""

from __future__ import annotations

import re
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.errors import SpecError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from pytest_gpumem.report.model import Report

_READ: Final = 1 << 16
"""bytes of a file's beginning to match with ``Output.beginning``; a long test name must fit in"""


class Output(NamedTuple):
    """A report format, with its option in :class:`~pytest_gpumem.session.settings.Settings`."""

    name: str
    """the option's name: "json" for ``--gpumem-json`` and ``gpumem report --json``"""
    title: str
    """the file's name in messages"""
    example: str
    """a possible file name"""
    beginning: bytes
    """a pattern for the first bytes: only a file that matches is replaced"""
    renderer: str
    """the function that returns the text, or yields pieces of it: "report.markdown:markdown" """
    needs: tuple[str, str] | None = None
    """a module that the renderer imports, and the remedy if it is missing"""

    def require(self, given: str) -> None:
        """Refuse the option if the module that the renderer needs is not installed."""
        if self.needs and find_spec(self.needs[0]) is None:
            problem = f"the {self.title} needs {self.needs[0]}, which is not installed"
            raise SpecError(given, problem, self.needs[1])

    def pieces(self, report: Report, created: str, when: str, json_name: str) -> Iterable[str]:
        """Render a report, in pieces of text.

        The renderer gets only the arguments that it has parameters for: ``created`` is the report's
        time for programs, "2026-11-21T15:06:07Z"; ``when`` is the same time for readers;
        ``json_name`` is the JSON report's path, relative to the folder of the rendered file.
        """
        render = resolve_name(f"pytest_gpumem.{self.renderer}")
        options = {"created": created, "when": when, "json_name": json_name}
        taken = signature(render).parameters
        made = render(report, **{name: text for name, text in options.items() if name in taken})
        return [made] if isinstance(made, str) else made


def require_replaceable(path: str | os.PathLike[str], beginning: bytes, given: str) -> None:
    """Refuse to replace a file that is not empty and not an earlier output of this kind.

    If the path cannot be examined, the error of writing it is reported later. ``beginning`` is a
    pattern for the first bytes of such an output, ``given`` the option that names the file.

    Raises:
        SpecError: it is another file, is not readable, or is not a regular file.
    """
    path = Path(path)
    problem = "this file exists, and was not written by this option"
    try:
        if not path.exists() or path.is_dir():
            return
        if path.is_file():  # reading a named pipe would block
            with path.open("rb") as stream:
                start = stream.read(_READ)
            if not start or re.match(beginning, start):
                return
        else:
            problem = "this is not a regular file"
    except PermissionError:
        problem = "this file exists, and cannot be read"
    except (OSError, ValueError):
        return
    raise SpecError(given, problem, "name another file, or move this one away")
