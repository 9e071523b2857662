"""The data of this package on a test's report, from the process that ran the test.

pytest-xdist sends a report's attributes to the controller, and other plugins write them as JSON: so
the data is plain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypedDict

if TYPE_CHECKING:
    import pytest

ATTRIBUTE: Final = "gpumem"
"""the attribute of pytest's reports"""


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
    """the fields of a :class:`~pytest_gpumem.plugin.suites.hidden_skips.HiddenSkip`"""


def data_of(report: pytest.TestReport | pytest.CollectReport) -> ReportData:
    """Return the data of a report; it is empty for a report without any."""
    data: ReportData = getattr(report, ATTRIBUTE, ReportData())
    return data


def has_verdict(report: pytest.TestReport) -> bool:
    """Return whether a report has results, and no error of the test's own beside them."""
    data = data_of(report)
    return "results" in data and "own_error" not in data
