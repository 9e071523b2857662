"""Represent a test's child processes as parts: one per rank, and one for all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.children import ChildPart
from pytest_gpumem.measurement import Measurement, Peak
from pytest_gpumem.meter.allocator import provenance
from pytest_gpumem.spec import MemorySpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.devices.children import Child
    from pytest_gpumem.measurement import Attribution
    from pytest_gpumem.testrun.judging import EndedTest
    from pytest_gpumem.testrun.run import Run

_LIMITS_OF_CHILDREN: Final = ("max_gib", "max_allocated_gib", "max_reserved_gib", "card")


class ChildProcessesStage:
    """Adds the parts of a test's child processes."""

    def applies(self, test: EndedTest) -> bool:
        """See :class:`Stage`."""
        return bool(test.children)

    def __call__(self, test: EndedTest) -> EndedTest:
        """See :class:`Stage`."""
        parts = child_measurements(test.run, test.children)
        return test._replace(measured={**test.measured, **parts})


def child_measurements(
    run: Run, children: Sequence[Child]
) -> dict[str, tuple[MemorySpec, Measurement]]:
    """Return the spec and the measurement of the test's child processes, by part.

    Each rank is a part, and all other processes together are one; a process may have further parts
    of its own. A part has the devices that its processes used, each with the highest peak of one
    process. Of the test's limits, those of ``_LIMITS_OF_CHILDREN`` apply to each part.
    """
    parts: dict[str, dict[int, tuple[Peak, Attribution | None]]] = {}
    for child in children:
        whole = ChildPart(child.peaks, child.attributions)
        for name, measured_part in {child.part: whole, **child.parts}.items():
            fullest = parts.setdefault(name, {})
            for index, peak in measured_part.peaks.items():
                known, attribution = fullest.get(index, (Peak(0, 0), None))
                if peak.allocated > known.allocated:  # else keep the higher peak's attribution
                    attribution = measured_part.attributions.get(index)
                allocated = max(known.allocated, peak.allocated)
                fullest[index] = Peak(allocated, max(known.reserved, peak.reserved)), attribution
    measured = {}
    for part, fullest in parts.items():
        if not fullest or part in run.parts:
            continue
        peaks, attributions = zip(*(fullest[index] for index in sorted(fullest)), strict=True)
        known_all = all(child.ended for child in children if part in {child.part, *child.parts})
        spec = MemorySpec(
            **{name: getattr(run.spec, name) for name in _LIMITS_OF_CHILDREN},
            tolerance=run.spec.tolerance,
            baseline=run.spec.baseline and known_all,  # a killed process reports no peaks
        )
        none = (Peak(0, 0),) * len(peaks)
        measured[part] = (
            spec,
            Measurement(
                run.info,
                provenance(run.info),
                *(peaks, none, none),
                attributions=attributions if None not in attributions else (),
            ),
        )
    return measured
