"""The results of searches with a baseline (``gpu_memory.largest``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pytest_gpumem.spec import MemorySpec

if TYPE_CHECKING:
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.testrun.run import Run

INHERITED: Final = ("card", "tolerance", "baseline", "devices", "world_size", "rank")
"""fields that a search inherits from the test's declaration"""


def search_measurements(run: Run) -> dict[str, tuple[MemorySpec, Measurement]]:
    """Return each search's spec and measurement by the name of its baseline.

    Of the test's limits a search has only the card: the test itself is judged by the others.
    """
    spec = MemorySpec(**{name: getattr(run.spec, name) for name in INHERITED})
    return {
        name: (
            spec,
            replace(run.meter.result(), peaks=(largest.peak,), notes=(), largest=largest.value),
        )
        for name, largest in run.searches.items()
    }
