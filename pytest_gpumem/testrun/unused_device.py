"""A test that took no memory of its device: told, with the cause where that can be known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices import virtual
from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.judge.result import describe_budget
from pytest_gpumem.notes import Note, NoteKind

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.testrun.run import Run


MEMORY_LIMITS: Final = (
    *("max_gib", "max_allocated_gib", "max_reserved_gib", "card"),
    *("max_mib_per_sample", "max_fixed_gib", "max_pinned_gib"),
)
"""the marker's arguments that a step without memory would always keep"""


REMEDY: Final = "create the model and its data on gpu_memory.device, or remove the marker"


def is_unused(run: Run) -> bool:
    """Whether a test took no memory: its own, its fixtures', its probes', or outside PyTorch's."""
    if run.meter.ran_apart or any(peak.reserved or peak.pinned for peak in run.meter.peaks()):
        return False
    return not any(use.outside > 0 for use in run.measurement().device_use)


def check_unused(run: Run, path: Path) -> None:
    """Add a note to a test that took no memory of its device; its processes have their own.

    Raises:
        GpuMemError: it declares a limit, which would hold whatever the step takes.
    """
    if any(child.peaks for child in run.children):
        return
    problem, cause = f"the test allocated no memory on {run.info.name}", ""
    if not run.device.values.all_computed:  # the step may have run on the CPU
        cause = virtual.unused_cause(path, run.root)
    if any(getattr(run.spec, name) is not None for name in MEMORY_LIMITS):
        raise GpuMemError(
            f"@pytest.mark.gpu_memory({describe_budget(run.spec)})", problem + cause, REMEDY
        )
    sentence = f"{problem}, and no baseline is recorded{cause}"
    run.notes.append(Note(NoteKind.UNRECORDED, sentence))


def unrecorded(result: Result) -> Result:
    """Return a result of such a test: it makes no baseline, so that no command records one."""
    notes = tuple(note for note in result.verdict.notes if note.kind is not NoteKind.RECORDED)
    verdict = replace(result.verdict, notes=notes, advice=REMEDY, command=None)
    return replace(result, baseline=False, verdict=verdict)
