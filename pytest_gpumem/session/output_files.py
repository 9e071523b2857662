"""The files of a session's report: each form has its option and its text.

The plugin's options are made of these classes in every session of pytest: a renderer is imported
when a file is written.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.errors import SpecError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from pytest_gpumem.report.model import Report

_READ: Final = 1 << 16
"""bytes of a file that are read; the longest beginning has a test's name"""


class Output(NamedTuple):
    """A form of report, with its option."""

    name: str
    """of the option: "json" of ``--gpumem-json``, and of ``gpumem report --json``"""
    help: str
    title: str
    """as messages name the file"""
    example: str
    """a name that the file may have"""
    beginning: bytes
    """a pattern of the first bytes: only such a file is replaced"""

    def require(self, given: str) -> None:
        """Refuse the option of the page without jinja2."""
        if self.name == "html" and find_spec("jinja2") is None:
            remedy = "run pip install 'pytest-gpumem[html]'"
            raise SpecError(given, "the page needs jinja2, which is not installed", remedy)

    def pieces(self, report: Report, created: str, when: str, json_name: str) -> Iterable[str]:
        """Return the text of a report, in pieces.

        ``created`` is the time of the report for programs, "2026-11-21T15:06:07Z", ``when`` the
        same for a reader, and ``json_name`` the JSON report, as seen from this file's folder.
        """
        if self.name == "html":
            from pytest_gpumem.report.page.html import page

            return [page(report, when=when, json_name=json_name)]
        if self.name == "json":
            from pytest_gpumem.report.json_report import json_lines

            return json_lines(report, created=created)
        from pytest_gpumem.report.markdown import markdown

        return [markdown(report, when=when)]


HTML: Final = Output(
    name="html",
    help="write an HTML page with every test's figures, timeline and breakdown to this file; the "
    "page needs no network",
    title="page",
    example="gpumem.html",
    beginning=rb'<!DOCTYPE html>(?s:.*)<meta name="generator" content="pytest-gpumem">\s*'
    rb"<title>GPU memory[,<]",
)
JSON: Final = Output(
    name="json",
    help="write every result to this file as JSON, for programs",
    title="JSON report",
    example="gpumem.json",
    beginning=rb'\{\s*"format": \d+,\s*"gpumem": ".*",\s*"created": ',
)
MARKDOWN: Final = Output(
    name="markdown",
    help="write the failures and every result to this file as Markdown",
    title="Markdown report",
    example="gpumem.md",
    beginning=rb"## GPU memory: ",
)
OUTPUTS: Final = (HTML, JSON, MARKDOWN)
"""in the order in which they are written"""


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
