"""Memory regression tests for PyTorch models, on a real GPU or on a virtual one.

Importing this package imports neither torch nor pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.errors import BaselineError, DeviceError, GpuMemError, SpecError
from pytest_gpumem.records import DeviceInfo, Measurement, Peak, Provenance

if TYPE_CHECKING:
    from pytest_gpumem.context import Measuring, measure, use_virtual_gpu

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

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> object:
    if name in {"Measuring", "measure", "use_virtual_gpu"}:
        from pytest_gpumem import context

        return getattr(context, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
