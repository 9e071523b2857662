"""Memory regression tests for PyTorch models, on a real GPU or on a virtual one.

Importing this package imports neither torch nor pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pytest_gpumem.version import __version__

if TYPE_CHECKING:
    from pytest_gpumem.errors import BaselineError, DeviceError, GpuMemError, SpecError
    from pytest_gpumem.measurement import DeviceInfo, Measurement, Peak, Provenance
    from pytest_gpumem.meter.block import Measuring, measure, use_virtual_gpu

__all__ = [
    "BaselineError",
    "DeviceError",
    "DeviceInfo",
    "GpuMemError",
    "Measurement",
    "Measuring",
    "Peak",
    "Provenance",
    "SpecError",
    "__version__",
    "measure",
    "use_virtual_gpu",
]


_HOMES = {
    "meter.block": ("Measuring", "measure", "use_virtual_gpu"),
    "errors": ("BaselineError", "DeviceError", "GpuMemError", "SpecError"),
    "measurement": ("DeviceInfo", "Measurement", "Peak", "Provenance"),
}


def __getattr__(name: str) -> object:
    """Import what is asked for when it is: pytest imports this package in every session."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
