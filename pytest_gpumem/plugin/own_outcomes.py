"""Outcomes of marked tests that a test's own code decided: failures, errors and skips."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pytest_gpumem.plugin.report_data import data_of
from pytest_gpumem.plugin.suites.hidden_skips import skip_reason
from pytest_gpumem.report.model import OwnOutcome

if TYPE_CHECKING:
    import pytest

OWN_CLASS: Final = re.compile(r"^(?:Failed|pytest_gpumem\.errors\.\w+): ")
"""the class before the words of pytest.fail(), or of an error of this package: it says no more"""
MAX_TEXT: Final = 4000
"""characters of a traceback that are kept, its last"""


def own_outcome(report: pytest.TestReport) -> OwnOutcome | None:
    """Return the outcome of a phase that the test's own code decided; None of a rerun.

    Args:
        report: pytest's, of a phase that did not pass.
    """
    nodeid = data_of(report).get("nodeid", report.nodeid)
    if report.skipped:
        if hasattr(report, "wasxfail"):
            return OwnOutcome(nodeid, "xfailed", report.wasxfail)
        return OwnOutcome(nodeid, "skipped", skip_reason(report.longrepr))
    if not report.failed:  # pytest-rerunfailures tries it once more
        return None
    longrepr = report.longreprtext
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else longrepr
    lines = [line for line in message.splitlines() if line.strip()]
    word = "failed" if report.when == "call" else "error"
    first = OWN_CLASS.sub("", lines[0].strip()) if lines else ""
    return OwnOutcome(nodeid, word, first, longrepr[-MAX_TEXT:])
