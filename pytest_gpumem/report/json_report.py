"""The JSON report: written, and read again; :mod:`pytest_gpumem.report.json_schema` is its form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_gpumem.baselines.store import EntryUpdate, UpdateSummary
from pytest_gpumem.errors import BaselineError, ReportError
from pytest_gpumem.judge.result import Result
from pytest_gpumem.measurement import BaselineEntry
from pytest_gpumem.report import json_schema
from pytest_gpumem.report.json_schema import FORMAT, Document
from pytest_gpumem.report.model import Report
from pytest_gpumem.strict_json import JsonProblem, parse_json
from pytest_gpumem.version import __version__

if TYPE_CHECKING:
    import os

_AGAIN = "write it anew with pytest --gpumem-json=PATH"


@dataclass(frozen=True)
class SavedReport:
    """A report as a file has it."""

    report: Report
    """without timelines, which the file has not"""
    created: str
    """when it was written: "2026-11-21T15:06:07Z" """
    gpumem: str = __version__
    """the version of pytest-gpumem that wrote it"""

    @property
    def results(self) -> tuple[Result, ...]:
        """The results of the session."""
        return self.report.results


def dumps(report: Report, *, created: str, gpumem: str = __version__) -> str:
    """Return a report as JSON: every result is a line, for ``grep`` and for a diff.

    Timelines are left out: they are drawings' data, and megabytes.

    Args:
        report: the session's.
        created: date and time: "2026-11-21T15:06:07Z".
        gpumem: the version of pytest-gpumem that it is of.

    Raises:
        ReportError: a figure is no whole number of bytes, or a text is none.
    """
    parts = {
        "format": FORMAT,
        "gpumem": gpumem,
        "created": created,
        "device": report.device,
        "options": dict(report.options),
        "remarks": report.remarks,
        "updates": None if report.updates is None else _updates(report.updates),
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in parts.items()]
    results = ",\n".join(f"  {json.dumps(_plain(it))}" for it in report.results)
    lines.append(f' "results": [\n{results}\n ]' if results else ' "results": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def loads(text: str | bytes, given: str) -> SavedReport:
    """Return the report that :func:`dumps` made a text of.

    Args:
        text: the file's content.
        given: the file's name, for messages.

    Raises:
        ReportError: it is none, or of a format that this version cannot read.
    """
    try:
        plain = parse_json(text, "a report of pytest-gpumem")
    except JsonProblem as problem:
        raise ReportError(given, str(problem), _AGAIN) from None
    _check_format(plain, given)
    try:
        read = msgspec.convert(plain, Document)
        return SavedReport(_report(read), read.created, read.gpumem)
    except (msgspec.ValidationError, UnicodeError) as error:
        shown = json.dumps(str(error), ensure_ascii=False)[1:-1]  # names may have any character
        raise ReportError(given, f"is not a report of pytest-gpumem: {shown}", _AGAIN) from None


def read_report(path: str | os.PathLike[str]) -> SavedReport:
    """Return the report that a file has.

    Raises:
        ReportError: there is none that this version can read.
    """
    given = str(path)
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        remedy = "name a file that pytest --gpumem-json=PATH wrote"
        raise ReportError(given, f"cannot be read: {problem}", remedy) from error
    return loads(content, given)


def schema() -> dict[str, Any]:
    """Return the JSON schema of a report: docs/report-schema.json."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"pytest-gpumem report, format {FORMAT}",
        **msgspec.json.schema(Document),
    }


# -- writing --


def _plain(result: Result) -> object:
    """Return a result as plain data."""
    return _checked(result, json_schema.Result, f"the result of {result.name}")


def _updates(summary: UpdateSummary) -> object:
    groups = ("created", "changed", "unchanged", "removed", "errors")
    found = {name: getattr(summary, name) for name in groups}
    found["files"] = tuple(map(str, summary.files))
    return _checked(found, json_schema.Updates, "what became of the baselines")


def _checked(value: object, kind: type, given: str) -> object:
    try:
        return msgspec.to_builtins(msgspec.convert(value, kind, from_attributes=True))
    except (msgspec.ValidationError, UnicodeError) as error:
        remedy = "look at the hooks that change measurements"
        raise ReportError(given, f"cannot be written: {error}", remedy) from None


# -- reading --


def _check_format(plain: object, given: str) -> None:
    number = plain.get("format") if isinstance(plain, dict) else None
    known = isinstance(plain, dict) and "gpumem" in plain  # baselines have a format as well
    if type(number) is not int or number < 1 or not known:
        problem = 'is not a report of pytest-gpumem: it has no "format" and "gpumem"'
        raise ReportError(given, problem, _AGAIN)
    if number > FORMAT:
        raise ReportError(
            given,
            f"was written by a newer pytest-gpumem (format {number}; this one reads {FORMAT})",
            "upgrade pytest-gpumem",
        )


def _report(read: Document) -> Report:
    return Report(
        msgspec.convert(read.results, tuple[Result, ...], from_attributes=True),
        None if read.updates is None else _summary(read.updates),
        read.device,
        read.options,
        read.remarks,
    )


def _summary(read: json_schema.Updates) -> UpdateSummary:
    groups = ("created", "changed", "unchanged", "removed")
    return UpdateSummary(
        **{name: tuple(map(_entry_update, getattr(read, name))) for name in groups},
        errors=tuple(BaselineError(it.given, it.problem, it.remedy) for it in read.errors),
        files=tuple(map(Path, read.files)),
    )


def _entry_update(read: json_schema.EntryUpdate) -> EntryUpdate:
    return EntryUpdate(
        read.device_key, read.module, read.test, read.part, _entry(read.old), _entry(read.new)
    )


def _entry(read: json_schema.Figures | None) -> BaselineEntry | None:
    if read is None:
        return None
    return msgspec.convert(read, BaselineEntry, from_attributes=True)
