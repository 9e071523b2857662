"""Write and read the JSON report; :mod:`pytest_gpumem.report.json_schema` defines its format."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pytest_gpumem.baselines.store import EntryUpdate, UpdateSummary
from pytest_gpumem.errors import BaselineError, ReportError
from pytest_gpumem.files.json_forms import JsonProblem, parse_json
from pytest_gpumem.judge.result import Result
from pytest_gpumem.report import json_schema
from pytest_gpumem.report.json_schema import FORMAT, Document
from pytest_gpumem.report.model import Origin, OwnOutcome, Report
from pytest_gpumem.version import __version__

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    Record = TypeVar("Record")

_GROUPS = ("created", "changed", "unchanged", "removed")
"""lists of entries in an update of baselines, by their kind of change"""
_OTHER = "name a file that pytest --gpumem-json=PATH wrote"
"""the remedy if a file is not a report"""


@dataclass(frozen=True)
class SavedReport:
    """A report read from a file."""

    report: Report
    """the report, without timelines and the baselines' ``Breakdown.course``, which are not saved"""
    created: str
    """when it was written: "2026-11-21T15:06:07Z" """
    gpumem: str = __version__
    """the version of pytest-gpumem that wrote it"""

    @property
    def results(self) -> tuple[Result, ...]:
        """The results in the report."""
        return self.report.results


def dumps(report: Report, *, created: str, gpumem: str = __version__) -> str:
    """Serialize a report to JSON; arguments and errors are those of :func:`json_lines`."""
    return "".join(json_lines(report, created=created, gpumem=gpumem))


def json_lines(report: Report, *, created: str, gpumem: str = __version__) -> Iterator[str]:
    """Yield a report as lines of JSON, one per result, so that ``grep`` and diffs work on it.

    Timelines and the baselines' ``Breakdown.course`` are left out: they only serve drawings, and
    take megabytes. ``created`` is date and time: "2026-11-21T15:06:07Z".

    Raises:
        ReportError: a figure is not a whole number of bytes, or a name is not text.
    """
    updates = None
    if report.updates is not None:
        fields = {name: getattr(report.updates, name) for name in (*_GROUPS, "errors")}
        fields["files"] = tuple(map(str, report.updates.files))
        updates = _checked(fields, json_schema.UpdatesJson, "the update of the baselines")
    head = {
        "format": FORMAT,
        "gpumem": gpumem,
        "created": created,
        "device": report.device,
        "options": dict(report.options),
        "remarks": report.remarks,
        "updates": updates,
        "origins": [
            _checked(origin, json_schema.ORIGIN, "the session's origin")
            for origin in report.origins
        ],
        "own_outcomes": [
            _checked(outcome, json_schema.OwnOutcomeJson, f"the outcome of {outcome.nodeid}")
            for outcome in report.own_outcomes
        ],
    }
    yield "{\n"
    yield from (f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    # Convert one result at a time: the plain data of 100,000 results would take gigabytes.
    yield ' "results": ['
    separator = "\n"
    for row in report.results:
        plain = _checked(row, json_schema.ResultJson, f"the result of {row.name}")
        yield f"{separator}  {json.dumps(plain)}"
        separator = ",\n"
    yield "\n ]\n}\n" if report.results else "]\n}\n"


def loads(content: str | bytes, name: str) -> SavedReport:
    """Parse the report that :func:`dumps` wrote.

    Raises:
        ReportError: it is not a report, or has a format that this version cannot read.
    """
    command = shlex.join(["pytest", f"--gpumem-json={name}"])
    # Do not suggest overwriting a page or a log that was named by mistake.
    again = f"write the report again with {command}" if name.endswith(".json") else _OTHER
    try:
        data = parse_json(content, "a report of pytest-gpumem")
    except JsonProblem as error:
        raise ReportError(name, str(error), again) from None
    number = data.get("format") if isinstance(data, dict) else None
    # A baseline file has a "format", too.
    if type(number) is not int or number < 1 or not isinstance(data, dict) or "gpumem" not in data:
        problem = 'is not a report of pytest-gpumem: it has no "format" and "gpumem"'
        raise ReportError(name, problem, _OTHER)
    if number > FORMAT:
        problem = f"was written by a newer pytest-gpumem (format {number}; this one reads {FORMAT})"
        raise ReportError(name, problem, "upgrade pytest-gpumem")

    def records(forms: object, kind: type[Record]) -> tuple[Record, ...]:
        return msgspec.convert(forms, tuple[kind, ...], from_attributes=True)  # type: ignore[valid-type] # at run time

    try:
        document, summary = msgspec.convert(data, Document), None
        if (updates := document.updates) is not None:
            summary = UpdateSummary(
                **{fate: records(getattr(updates, fate), EntryUpdate) for fate in _GROUPS},
                errors=tuple(
                    BaselineError(*msgspec.structs.astuple(each)) for each in updates.errors
                ),
                files=tuple(map(Path, updates.files)),
            )
        report = Report(
            records(document.results, Result),
            summary,
            document.device,
            document.options,
            document.remarks,
            origins=records(document.origins, Origin),
            own_outcomes=records(document.own_outcomes, OwnOutcome),
        )
        return SavedReport(report, document.created, document.gpumem)
    except (msgspec.ValidationError, UnicodeError) as error:
        shown = json.dumps(str(error), ensure_ascii=False)[1:-1]  # names may have any character
        raise ReportError(name, f"is not a report of pytest-gpumem: {shown}", again) from None


def read_report(path: str | os.PathLike[str]) -> SavedReport:
    """Read the report in a file.

    Raises:
        ReportError: the file cannot be read, or is not a report that this version can read.
    """
    name = str(path)
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise ReportError(name, f"cannot be read: {problem}", _OTHER) from error
    return loads(content, name)


def is_report(path: Path) -> bool:
    """Return whether to read a file as a report: False only for valid JSON of another kind."""
    try:
        data = parse_json(path.read_bytes(), "a report of pytest-gpumem")
    except (JsonProblem, OSError):
        return True  # reading it as a report then gives the error
    return isinstance(data, dict) and "gpumem" in data


def schema() -> dict[str, Any]:
    """Return the JSON schema of a report: docs/reference/report-schema.json."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"pytest-gpumem report, format {FORMAT}",
        **msgspec.json.schema(Document),
    }


def _checked(record: object, kind: type, name: str) -> object:
    try:
        return msgspec.to_builtins(msgspec.convert(record, kind, from_attributes=True))
    except (msgspec.ValidationError, UnicodeError) as error:
        remedy = "check the hooks that change measurements"
        raise ReportError(name, f"cannot be written: {error}", remedy) from None
