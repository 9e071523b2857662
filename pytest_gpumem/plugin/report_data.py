"""The data of this package on a test's report, from the process that ran the test.

pytest-xdist sends a report's attributes to the controller, and other plugins write them as JSON: so
the data is plain.
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
"""the attribute of pytest's reports"""
OWN_CLASS: Final = re.compile(r"^(?:Failed|pytest_gpumem\.errors\.\w+): ")
"""class of pytest.fail's exception or of this package's errors, which says nothing more"""
MAX_TEXT: Final = 4000
"""characters of a traceback that are kept, its last"""
ABOUT_GPUS: Final = re.compile(r"cuda|gpu|device|accelerator|hardware", re.IGNORECASE)
"""words of a reason that tell of a missing GPU"""


class ReportData(TypedDict, total=False):
    """The data of one report; a field is absent if it does not apply."""

    nodeid: str
    """the test's unique name, if pytest's own is not unique"""
    marked: bool
    """True if the test is a marked one, and the report did not pass"""
    results: str
    """the results, as report/serialize.py writes them"""
    own_error: bool
    """True if the report has results, but failed by an error of the test's own"""
    hidden_skip: list[object]
    """the fields of a :class:`~pytest_gpumem.session.hidden_skip.HiddenSkip`"""


def data_of(report: pytest.TestReport | pytest.CollectReport) -> ReportData:
    """Return the data of a report; it is empty for a report without any."""
    data: ReportData = getattr(report, ATTRIBUTE, ReportData())
    return data


def has_verdict(report: pytest.TestReport) -> bool:
    """Return whether a report has results, and no error of the test's own beside them."""
    data = data_of(report)
    return "results" in data and "own_error" not in data


def own_outcome(report: pytest.TestReport) -> OwnOutcome | None:
    """Return the outcome of a phase that the test's own code decided; None of a rerun."""
    from pytest_gpumem.report.model import OwnOutcome

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


def hidden_skip(
    config: pytest.Config, path: Path, reason: str, *, whole_file: bool = False
) -> HiddenSkip | None:
    """Return the record of a skip that the hidden GPU explains; None of any other.

    The virtual GPU is hidden outside of marked tests, unless ``--gpumem-visible=session``: a
    condition like ``skipif(not torch.cuda.is_available())`` is evaluated at the import, and holds
    for good.

    ``reason`` has no "Skipped: "; with ``whole_file`` the file was skipped as it was collected.
    """
    from pytest_gpumem.devices import virtual

    device = virtual.loaded()
    question = device.question_of(path, config.rootpath) if device else None
    if question is None or not (question.direct or ABOUT_GPUS.search(reason)):
        return None
    return HiddenSkip(whole_file, reason, question.place(config.rootpath))


def skip_reason(longrepr: object) -> str:
    """Return the reason of a skipped report: pytest keeps file, line and "Skipped: reason"."""
    message = longrepr[2] if isinstance(longrepr, tuple) else longrepr
    return str(message).removeprefix("Skipped: ")


def skip_decorated(item: pytest.Item) -> bool:
    """Return whether unittest's decorators skip a test: it does so itself, in the call."""
    owners = (getattr(item, "obj", None), getattr(item, "cls", None))
    return any(getattr(owner, "__unittest_skip__", False) for owner in owners)
