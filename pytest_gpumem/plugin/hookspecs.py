"""Hooks that conftest files and other plugins can implement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.report.model import Report


@pytest.hookspec
def pytest_gpumem_defaults(item: pytest.Item) -> Mapping[str, object] | None:
    """Return arguments of the marker for a marked test that does not give them itself.

    The nearest conftest file wins, argument by argument.
    """


@pytest.hookspec(firstresult=True)
def pytest_gpumem_measured(
    item: pytest.Item, part: str, measurement: Measurement
) -> Measurement | None:
    """Inspect a measurement before it is judged, or return another one to be judged instead.

    ``part`` is the name given to ``gpu_memory.measure``, "" for the whole test. The first result
    that is not None is used; to change one field use ``dataclasses.replace``.
    """


@pytest.hookspec
def pytest_gpumem_judged(item: pytest.Item, result: Result) -> None:
    """Inspect the verdict on a measurement, before the test's report is created."""


@pytest.hookspec
def pytest_gpumem_report(config: pytest.Config, report: Report) -> None:
    """Inspect the record of a session at its end, for example to write another report format."""
