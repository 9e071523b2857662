"""The results of searches with a baseline (``gpu_memory.largest``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.run import Run


def search_measurements(run: Run) -> dict[str, tuple[MemorySpec, Measurement]]:
    """Return each search's spec and measurement by the name of its baseline."""
    return {
        name: (
            replace(run.spec, batch_size=None),
            replace(run.meter.result(), peaks=(largest.peak,), notes=(), largest=largest.value),
        )
        for name, largest in run.searches.items()
    }
