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
    problem = f"the test took no memory on {run.info.name}"
    if not run.device.computes:  # the step may have run on the CPU
        loaded = getattr(sys.modules.get("bitsandbytes.cextension"), "lib", None)
        # A library of CPU code that was chosen at its import stays for the whole process.
        if "bitsandbytes" in sys.modules and not getattr(loaded, "compiled_with_cuda", True):
            problem += (
                "; bitsandbytes was imported outside of the test, where no GPU is seen, and has "
                "loaded its CPU library for good: import it in the test or in a fixture"
            )
        else:
            problem += (
                "; outside of marked tests no virtual GPU is seen, so that "
                "torch.cuda.is_available() at the top of a file is False"
            )
    if any(getattr(run.spec, name) is not None for name in MEMORY_LIMITS):
        raise UnusedDeviceError(
            f"@pytest.mark.gpu_memory({describe_budget(run.spec)})",
            problem,
            "make the model and its data on gpu_memory.device, or leave out the marker",
        )
    run.notes.append(f"{problem}: no baseline is made of it")
