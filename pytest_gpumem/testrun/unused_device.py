"""A test that took no memory of its device: told, with the cause where that can be known."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.judge.result import describe_budget

if TYPE_CHECKING:
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.testrun.run import Run


MEMORY_LIMITS: Final = (
    *("max_gib", "max_allocated_gib", "max_reserved_gib", "card"),
    *("max_mib_per_sample", "max_fixed_gib"),
)
"""the marker's arguments that a step without memory would always keep"""


class UnusedDeviceError(GpuMemError):
    """A test with a limit that took no memory of its device."""


def is_unused(run: Run, measurement: Measurement) -> bool:
    """Whether a test took no memory: its own, its fixtures', its probes', or beside PyTorch's."""
    outside = any(use.outside > 0 for use in measurement.device_use)
    return not (run.meter.ran_apart or outside or any(peak.reserved for peak in measurement.peaks))


def check_unused(run: Run) -> None:
    """Add a note to a test that took no memory of its device.

    Raises:
        UnusedDeviceError: it declares a limit, which would hold whatever the step takes.
    """
    problem = f"the test took no memory on {run.info.name}{_cause(run)}"
    if any(getattr(run.spec, name) is not None for name in MEMORY_LIMITS):
        raise UnusedDeviceError(
            f"@pytest.mark.gpu_memory({describe_budget(run.spec)})",
            problem,
            "make the model and its data on gpu_memory.device, or leave out the marker",
        )
    run.notes.append(f"{problem}: no baseline is made of it")


def _cause(run: Run) -> str:
    """Return why a step may have run on the CPU, as the end of a sentence; "" if unknown."""
    if run.device.computes:
        return ""
    # A library of CPU code that was chosen at its import stays for the whole process.
    if "bitsandbytes" in sys.modules and not _has_cuda_library("bitsandbytes.cextension"):
        return (
            "; bitsandbytes was imported outside of the test, where no GPU is seen, and has loaded "
            "its CPU library for good: import it in the test or in a fixture"
        )
    return (
        "; outside of marked tests no virtual GPU is seen, so that torch.cuda.is_available() at "
        "the top of a file is False"
    )


def _has_cuda_library(name: str) -> bool:
    library = getattr(sys.modules.get(name), "lib", None)
    return bool(getattr(library, "compiled_with_cuda", True))
