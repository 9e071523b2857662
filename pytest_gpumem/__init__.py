"""Memory regression tests for PyTorch models, on a real GPU or on a virtual one.

Everything that users import is here; all other modules are private. Importing this package imports
neither torch nor pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from pytest_gpumem.version import __version__

if TYPE_CHECKING:
    from pytest_gpumem.devices.cards import card_names
    from pytest_gpumem.errors import (
        BaselineError,
        DeviceError,
        GpuMemError,
        ReportError,
        SpecError,
        TooSmallError,
    )
    from pytest_gpumem.fit.scaling import Scaling
    from pytest_gpumem.fit.search import Largest
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.judge.verdict import Comparison, UpdateCommand, Verdict
    from pytest_gpumem.measurement import (
        Attribution,
        Breakdown,
        DeviceInfo,
        Measurement,
        OutOfMemory,
        Peak,
        Provenance,
        Site,
        Slope,
    )
    from pytest_gpumem.meter.block import Measuring, measure, use_virtual_gpu
    from pytest_gpumem.notes import Note, NoteKind, Severity
    from pytest_gpumem.report.json_report import SavedReport, read_report
    from pytest_gpumem.report.model import Report
    from pytest_gpumem.testrun.fixture import GpuMemory
    from pytest_gpumem.testrun.run import PartFigures
    from pytest_gpumem.typed_marker import gpu_memory

__all__ = [
    "Attribution",
    "BaselineError",
    "Breakdown",
    "Comparison",
    "DeviceError",
    "DeviceInfo",
    "GpuMemError",
    "GpuMemory",
    "Largest",
    "Measurement",
    "Measuring",
    "Note",
    "NoteKind",
    "OutOfMemory",
    "PartFigures",
    "Peak",
    "Provenance",
    "Report",
    "ReportError",
    "Result",
    "SavedReport",
    "Scaling",
    "Severity",
    "Site",
    "Slope",
    "SpecError",
    "TooSmallError",
    "UpdateCommand",
    "Verdict",
    "__version__",
    "card_names",
    "gpu_memory",
    "measure",
    "read_report",
    "use_virtual_gpu",
]

_MODULES: Final = {
    "devices.cards": ("card_names",),
    "errors": (
        *("BaselineError", "DeviceError", "GpuMemError"),
        *("ReportError", "SpecError", "TooSmallError"),
    ),
    "fit.scaling": ("Scaling",),
    "fit.search": ("Largest",),
    "judge.result": ("Result",),
    "judge.verdict": ("Comparison", "UpdateCommand", "Verdict"),
    "measurement": (
        *("Attribution", "Breakdown", "DeviceInfo", "Measurement", "OutOfMemory"),
        *("Peak", "Provenance", "Site", "Slope"),
    ),
    "meter.block": ("Measuring", "measure", "use_virtual_gpu"),
    "notes": ("Note", "NoteKind", "Severity"),
    "report.json_report": ("SavedReport", "read_report"),
    "report.model": ("Report",),
    "testrun.fixture": ("GpuMemory",),
    "testrun.run": ("PartFigures",),
    "typed_marker": ("gpu_memory",),
}


def __getattr__(name: str) -> object:
    """Import a public name on first use, because pytest imports this package in every session."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
