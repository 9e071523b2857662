"""Write a session's reports: JSON, Markdown, the page, and GitHub's job summary."""

from __future__ import annotations

import os
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.errors import SpecError
from pytest_gpumem.files.atomic_file import TEMPORARY, write_whole
from pytest_gpumem.report.github import SUMMARY_LIMIT, cause_warnings, error_lines
from pytest_gpumem.report.markdown import markdown
from pytest_gpumem.report.model import Report
from pytest_gpumem.report.parts.session_words import moved_together
from pytest_gpumem.session.hidden_skip import hidden_skip_lines
from pytest_gpumem.session.output_files import require_replaceable
from pytest_gpumem.session.settings import OPTIONS, OUTPUTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.baselines.store import UpdateSummary
    from pytest_gpumem.report.model import Origin
    from pytest_gpumem.session.output_files import Output
    from pytest_gpumem.session.results import SessionResults
    from pytest_gpumem.session.settings import Settings

SUMMARY: Final = "GITHUB_STEP_SUMMARY"


class Published(NamedTuple):
    """The result of writing one report."""

    line: str
    """shown on the terminal"""
    failed: bool = False
    """whether the session fails because this report could not be written"""


def session_report(
    session_results: SessionResults,
    settings: Settings,
    header: Sequence[str],
    *,
    updates: UpdateSummary | None,
    origin: Origin | None,
) -> Report:
    """Return the record of a session, which every renderer starts from."""
    results = session_results.results_with_outcomes()
    options = {}
    for option in OPTIONS:
        value = getattr(settings, option.name)
        if option.shown and value not in {option.default, None, ()}:
            # as written on the command line
            options[option.flag] = ",".join(value) if isinstance(value, tuple) else str(value)
    remarks = [change.sentence for change in moved_together(results)]
    remarks += session_results.problems
    remarks += [
        f"{nodeid}: its worker crashed, so this report does not have the test"
        for nodeid in session_results.lost
    ]
    remarks += session_results.skip_sentences
    remarks += hidden_skip_lines(session_results.hidden_skips.values())
    return Report(
        tuple(results),
        updates,
        "; ".join(header),
        options,
        tuple(remarks),
        settings.arguments,
        () if origin is None else (origin,),
        tuple(session_results.own_outcomes),
    )


def publish(  # noqa: PLR0913 - a session, and all that its record has
    session_results: SessionResults,
    settings: Settings,
    header: Sequence[str],
    *,
    updates: UpdateSummary | None,
    origin: Origin | None,
    write_more: Callable[[Report], object] | None = None,
) -> list[Published]:
    """Write the requested files; an error with one of them does not affect the others.

    ``write_more``, if given, is called with the record, so that hooks can write other formats.
    """
    report = session_report(session_results, settings, header, updates=updates, origin=origin)
    created = datetime.now(timezone.utc)
    published = [
        _write_report(output, path, report, created, settings)
        for output in OUTPUTS
        if (path := getattr(settings, output.name)) is not None
    ]
    summary = os.environ.get(SUMMARY, "")
    if session_results and summary and settings.github == "auto":
        published += _add_to_summary(Path(summary), report, created)
    if write_more is not None:
        write_more(report)
    return published


def github_lines(session_results: SessionResults, root: Path) -> Iterator[str]:
    """Yield the lines with which GitHub Actions annotates failures; none without it."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        workspace = Path(os.environ.get("GITHUB_WORKSPACE") or root)
        results = session_results.results()
        yield from error_lines(results, root=root, workspace=workspace)
        yield from cause_warnings(results, root=root, workspace=workspace)


def _minute(created: datetime) -> str:
    return created.strftime("%Y-%m-%d %H:%M UTC")


def _write_report(
    output: Output, path: Path, report: Report, created: datetime, settings: Settings
) -> Published:
    def write() -> str:
        # A test may have written this file since the session started.
        require_replaceable(path, output.beginning, str(path))
        json_name = ""
        if settings.json is not None:
            json_name = Path(os.path.relpath(settings.json, path.parent)).as_posix()
        made = created.strftime("%Y-%m-%dT%H:%M:%SZ")
        pieces = output.pieces(report, made, _minute(created), json_name)
        encoded = "".join(pieces).encode("utf-8", "backslashreplace")
        write_whole(path, encoded, f"{TEMPORARY}-{os.getpid()}")
        return ""

    if problem := _problem(write):
        return Published(f"gpumem: no {output.title} written to {path}: {problem}", failed=True)
    return Published(f"gpumem: {output.title} written to {path}")


def _add_to_summary(path: Path, report: Report, created: datetime) -> Iterator[Published]:
    """Append the report to GitHub's step summary, shortened to the size that GitHub accepts.

    No option requests it, so an error is shown but fails nothing.
    """

    def write() -> str:
        room = SUMMARY_LIMIT - (path.stat().st_size if path.exists() else 0)
        rendered = markdown(report, when=_minute(created), limit=room - 1)
        if not rendered:
            return (
                "GitHub accepts 1 MiB from one step, and the earlier output of this step is almost "
                "that long"
            )
        with path.open("ab") as stream:
            stream.write(f"\n{rendered}".encode("utf-8", "backslashreplace"))
        return ""

    if problem := _problem(write):
        yield Published(f"gpumem: nothing added to {SUMMARY}: {problem}")


def _problem(write: Callable[[], str]) -> str:
    """Run a function that writes a file; return its problem or its error in words, else ""."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the suite may turn warnings into errors
            return write()
    except OSError as error:
        return error.strerror or str(error)
    except SpecError as error:
        return f"{error.problem}; {error.remedy}"
    except Exception as error:  # noqa: BLE001 - a renderer's bug must not hide the tests' results
        return f"{type(error).__name__}: {error}"
