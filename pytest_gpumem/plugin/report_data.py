"""Attach this package's data to a test's report, in the process that ran the test.

pytest-xdist sends a report's attributes to the controller, and other plugins write them as JSON, so
the data must be plain.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypedDict

from pytest_gpumem.session.hidden_skip import HiddenSkip

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from pytest_gpumem.report.model import OwnOutcome

ATTRIBUTE: Final = "gpumem"
"""the name of the attribute on pytest's reports"""
OWN_CLASS: Final = re.compile(r"^(?:Failed|pytest_gpumem\.errors\.\w+): ")
"""the class name before the message of pytest.fail or of this package's errors; it adds nothing"""
MAX_TEXT: Final = 4000
"""characters of a traceback to keep, from its end"""
ABOUT_GPUS: Final = re.compile(r"cuda|gpu|device|accelerator|hardware", re.IGNORECASE)
"""words in a skip's reason that point to a missing GPU"""


class ReportData(TypedDict, total=False):
    """The data of one report; fields that do not apply are absent."""

    nodeid: str
    """the test's node ID with its path from the root folder; absent if pytest's own is the same"""
    marked: bool
    """True if the test is marked and the report did not pass"""
    results: str
    """the results, serialized by report/serialize.py"""
    own_error: bool
    """True if the report has results but failed by the test's own error"""
    hidden_skip: list[object]
    """the fields of a :class:`~pytest_gpumem.session.hidden_skip.HiddenSkip`"""


def data_of(report: pytest.TestReport | pytest.CollectReport) -> ReportData:
    """Return a report's data; empty if it has none."""
    data: ReportData = getattr(report, ATTRIBUTE, ReportData())
    return data


def has_verdict(report: pytest.TestReport) -> bool:
    """Return whether a report has results, and the test had no error of its own."""
    data = data_of(report)
    return "results" in data and "own_error" not in data


def own_outcome(report: pytest.TestReport) -> OwnOutcome | None:
    """Return how a test's own code ended a phase; None if the phase will be rerun."""
    from pytest_gpumem.report.model import OwnOutcome

    nodeid = data_of(report).get("nodeid", report.nodeid)
    if report.skipped:
        if hasattr(report, "wasxfail"):
            return OwnOutcome(nodeid, "xfailed", report.wasxfail)
        return OwnOutcome(nodeid, "skipped", skip_reason(report.longrepr))
    if not report.failed:  # pytest-rerunfailures runs it again
        return None
    longrepr = report.longreprtext
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else longrepr
    lines = [line for line in message.splitlines() if line.strip()]
    word = "failed" if report.when == "call" else "error"
    first = OWN_CLASS.sub("", lines[0].strip()) if lines else ""
    return OwnOutcome(nodeid, word, first, longrepr[-MAX_TEXT:])


def hidden_skip(
    config: pytest.Config, path: Path, reason: str, *, whole_file: bool = False
) -> HiddenSkip | None:
    """Return a record of a skip that the hidden GPU explains; None for any other skip.

    The virtual GPU is hidden outside of marked tests, unless ``--gpumem-visible=session``: a
    condition like ``skipif(not torch.cuda.is_available())`` is evaluated once, at import.

    ``reason`` is without pytest's prefix "Skipped: "; with ``whole_file`` the file was skipped
    during collection.
    """
    from pytest_gpumem.devices import virtual

    device = virtual.loaded()
    question = device.lookup_of(path, config.rootpath) if device else None
    if question is None or not (question.direct or ABOUT_GPUS.search(reason)):
        return None
    return HiddenSkip(whole_file, reason, question.place(config.rootpath))


def skip_reason(longrepr: object) -> str:
    """Return a skipped report's reason; pytest stores file, line and "Skipped: reason"."""
    message = longrepr[2] if isinstance(longrepr, tuple) else longrepr
    return str(message).removeprefix("Skipped: ")


def skip_decorated(item: pytest.Item) -> bool:
    """Return whether unittest's decorators skip a test, which they do only when it is called."""
    owners = (getattr(item, "obj", None), getattr(item, "cls", None))
    return any(getattr(owner, "__unittest_skip__", False) for owner in owners)
