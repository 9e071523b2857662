"""The reports of a session: what they are about, and the files that they become."""

from __future__ import annotations

import os
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.atomic_file import TEMPORARY, write_whole
from pytest_gpumem.plugin.settings import FILES, OPTIONS
from pytest_gpumem.report.github import SUMMARY_LIMIT, error_lines
from pytest_gpumem.report.markdown import markdown
from pytest_gpumem.report.model import Report
from pytest_gpumem.report.terminal.toolchain_lead import moved_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpumem.baselines.store import UpdateSummary
    from pytest_gpumem.plugin.results import SessionResults
    from pytest_gpumem.plugin.settings import Settings

SHOWN = (
    *("device", "card", "cards", "missing_baseline", "shrinkage", "provenance", "tolerance"),
    *("update_baselines", "against", "against_tolerance"),
)
"""options that the reports tell, where they were given"""
NAMES: Final = {"html": "page", "json": "JSON report", "markdown": "Markdown report"}
"""what the files of options are"""
SUMMARY: Final = "GITHUB_STEP_SUMMARY"


class Published(NamedTuple):
    """What became of a report."""

    line: str
    """what the terminal says"""
    failed: bool = False
    """whether that fails the session"""


def publish(
    session_results: SessionResults, settings: Settings, header: str, updates: UpdateSummary | None
) -> list[Published]:
    """Write the reports that are wanted; what goes wrong with one changes nothing about others.

    Args:
        session_results: the results.
        settings: what the session was told, files among it, whose folders are made where missing.
        header: the lines that the session began with, "" where no test was marked.
        updates: what became of the baselines, in a run that updates them.
    """
    report = Report(
        tuple(session_results.results()),
        updates,
        "; ".join(line.removeprefix("gpumem: ") for line in header.splitlines()),
        _given(settings),
        tuple(_remarks(session_results)),
    )
    now = datetime.now(timezone.utc)
    wanted = {name: getattr(settings, name) for name in FILES}
    found = [_written(name, path, report, now) for name, path in wanted.items() if path is not None]
    summary = os.environ.get(SUMMARY, "")
    if session_results and summary and settings.github == "auto":
        found += _summarised(Path(summary), report, now)
    return found


def github_lines(session_results: SessionResults, root: Path) -> Iterator[str]:
    """Yield the lines by which GitHub Actions annotates what failed; none elsewhere.

    Args:
        session_results: the results.
        root: pytest's root folder.
    """
    if os.environ.get("GITHUB_ACTIONS") == "true":
        workspace = Path(os.environ.get("GITHUB_WORKSPACE") or root)
        yield from error_lines(session_results.results(), root=root, workspace=workspace)


def _written(name: str, path: Path, report: Report, now: datetime) -> Published:
    """Write one file."""
    what = NAMES[name]

    def write() -> None:
        content = _rendered(name, report, now).encode("utf-8", "backslashreplace")
        write_whole(path, content, f"{TEMPORARY}-{os.getpid()}")

    problem = _problem(write)
    if problem:
        return Published(f"gpumem: no {what} written to {path}: {problem}", failed=True)
    return Published(f"gpumem: {what} written to {path}")


def _rendered(name: str, report: Report, now: datetime) -> str:
    when = now.strftime("%Y-%m-%d %H:%M UTC")
    if name == "json":
        from pytest_gpumem.report.json_report import dumps

        return dumps(report, created=now.strftime("%Y-%m-%dT%H:%M:%SZ"))
    if name == "markdown":
        return markdown(report, when=when)
    from pytest_gpumem.report.page.html import page

    return page(report, when=when)


def _summarised(path: Path, report: Report, now: datetime) -> Iterator[Published]:
    """Add the report to what GitHub shows of the step, shortened to what GitHub still takes.

    Nobody asked for it, so that what goes wrong is said and fails nothing.
    """
    skipped = False

    def write() -> None:
        nonlocal skipped
        room = SUMMARY_LIMIT - (path.stat().st_size if path.exists() else 0)
        text = markdown(report, when=now.strftime("%Y-%m-%d %H:%M UTC"), limit=room - 1)
        skipped = not text
        with path.open("ab") as stream:
            stream.write(f"\n{text}".encode("utf-8", "backslashreplace") if text else b"")

    problem = _problem(write)
    if skipped and not problem:
        problem = "GitHub takes 1 MiB of a step, and others have written almost that much"
    if problem:
        yield Published(f"gpumem: nothing added to {SUMMARY}: {problem}")


def _problem(write: Callable[[], None]) -> str:
    """Do it; return what went wrong, "" where nothing did."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # not the tests': a suite may make errors of warnings
            write()
    except OSError as error:
        return error.strerror or str(error)
    except Exception as error:  # noqa: BLE001 - the step's own, recorded
        return f"{type(error).__name__}: {error}"
    return ""


def _given(settings: Settings) -> dict[str, str]:
    """Return the options that are not at their defaults, as on the command line."""
    values = {
        it.flag: (getattr(settings, it.name), it.default) for it in OPTIONS if it.name in SHOWN
    }
    return {
        flag: ",".join(value) if isinstance(value, tuple) else str(value)
        for flag, (value, default) in values.items()
        if value not in {default, None, ()}
    }


def _remarks(session_results: SessionResults) -> Iterator[str]:
    yield from (it.sentence for it in moved_together(session_results.results()))
    yield from session_results.problems
    for reason in dict.fromkeys(session_results.skipped):
        yield f"{session_results.skipped.count(reason)} skipped: {reason}"
