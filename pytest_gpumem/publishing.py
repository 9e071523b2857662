"""The page of a session: what it is about, and the file that it becomes."""

from __future__ import annotations

import os
import warnings
from datetime import datetime, timezone
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.baseline_disk import TEMPORARY, write_whole
from pytest_gpumem.options import OPTIONS
from pytest_gpumem.report import terminal
from pytest_gpumem.report.html import page
from pytest_gpumem.report.model import Report

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pytest_gpumem.baseline import UpdateSummary
    from pytest_gpumem.gathering import Gathering
    from pytest_gpumem.options import Settings

SHOWN = ("device", "card", "missing_baseline", "shrinkage", "tolerance", "update_baselines")
"""options that the page tells, where they were given"""


class Published(NamedTuple):
    """What became of the page."""

    line: str
    """what the terminal says"""
    failed: bool = False


def publish(
    path: Path, gather: Gathering, settings: Settings, header: str, updates: UpdateSummary | None
) -> Published:
    """Write the page; what goes wrong is said, for it changes nothing about the tests.

    Args:
        path: the file, whose folder is made where it is missing.
        gather: the results.
        settings: what the session was told.
        header: the lines that the session began with, "" where no test was marked.
        updates: what became of the baselines, in a run that updates them.
    """
    report = Report(
        tuple(gather.results()),
        updates,
        "; ".join(line.removeprefix("gpumem: ") for line in header.splitlines()),
        _given(settings),
        tuple(_remarks(gather, updates)),
    )
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # not the tests': a suite may make errors of warnings
            text = page(report, when=now)
        write_whole(path, text.encode(), f"{TEMPORARY}-{os.getpid()}")
    except OSError as error:
        return Published(
            f"gpumem: no page written to {path}: {error.strerror or error}", failed=True
        )
    except Exception as error:  # noqa: BLE001 - the results on the terminal matter more
        problem = f"{type(error).__name__}: {error}"
        return Published(f"gpumem: no page written to {path}: {problem}", failed=True)
    return Published(f"gpumem: page written to {path}")


def _given(settings: Settings) -> dict[str, str]:
    """Return the options that are not at their defaults, as on the command line."""
    values = {
        it.flag: (getattr(settings, it.name), it.default) for it in OPTIONS if it.name in SHOWN
    }
    return {
        flag: str(value)
        for flag, (value, default) in values.items()
        if value != default and value is not None
    }


def _remarks(gather: Gathering, updates: UpdateSummary | None) -> Iterator[str]:
    yield from gather.broken
    for reason in dict.fromkeys(gather.skipped):
        yield f"{gather.skipped.count(reason)} skipped: {reason}"
    if updates is not None:
        text = terminal.update_summary(updates, brief=True, width=10_000)
        yield from (line.removeprefix("gpumem: ") for line in text.splitlines())
