"""The files of a session's report. A renderer is imported when its file is written."""

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
"""bytes of a file that are read; the longest beginning has a test's name"""


class Output(NamedTuple):
    """A form of report; an option of :class:`~pytest_gpumem.session.settings.Settings` has it."""

    name: str
    """of the option: "json" of ``--gpumem-json``, and of ``gpumem report --json``"""
    title: str
    """as messages name the file"""
    example: str
    """a name that the file may have"""
    beginning: bytes
    """a pattern of the first bytes: only such a file is replaced"""
    renderer: str
    """the function that returns the text, or yields pieces: "report.markdown:markdown" """
    needs: tuple[str, str] | None = None
    """a module that the renderer imports, and what to do without it"""

    def require(self, given: str) -> None:
        """Refuse the option without the module that the renderer needs."""
        if self.needs and find_spec(self.needs[0]) is None:
            problem = f"the {self.title} needs {self.needs[0]}, which is not installed"
            raise SpecError(given, problem, self.needs[1])

    def pieces(self, report: Report, created: str, when: str, json_name: str) -> Iterable[str]:
        """Return the text of a report, in pieces.

        Of these, the renderer gets those that it has arguments for. ``created`` is the time of the
        report for programs, "2026-11-21T15:06:07Z", ``when`` the same for a reader, and
        ``json_name`` the JSON report, as seen from this file's folder.
        """
        render = resolve_name(f"pytest_gpumem.{self.renderer}")
        told = {"created": created, "when": when, "json_name": json_name}
        taken = signature(render).parameters
        made = render(report, **{name: text for name, text in told.items() if name in taken})
        return [made] if isinstance(made, str) else made


def require_replaceable(path: str | os.PathLike[str], beginning: bytes, given: str) -> None:
    """Refuse a file that exists and is no earlier output of this kind; an empty file is replaced.

    A path that cannot be looked at is left to the error of its writing. ``beginning`` is a pattern
    of the first bytes of such an output, ``given`` the option that names the file.

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
            if not start or re.match(beginning, start):
                return
        else:
            problem = "this is not a regular file"
    except PermissionError:
        problem = "this file exists, and cannot be read"
    except (OSError, ValueError):
        return
    raise SpecError(given, problem, "name another file, or move this one away")
