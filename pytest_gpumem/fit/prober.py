"""Trying a step with many values: the largest that fits, and how its memory grows with them."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pytest_gpumem.attribution.attributor import Attributor, Subject
from pytest_gpumem.errors import GpuMemError, SpecError
from pytest_gpumem.fit.rehearsal import Rehearsal, script_of
from pytest_gpumem.fit.scaling import Prediction, Scaling, grows_evenly, uneven
from pytest_gpumem.fit.search import Largest, Probe, Search
from pytest_gpumem.meter.out_of_memory import WATCH, find_out_of_memory
from pytest_gpumem.meter.peaks import fullest
from pytest_gpumem.sizes import format_size, shown
from pytest_gpumem.tracebacks import clear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pytest_gpumem.measurement import Breakdown
    from pytest_gpumem.meter.meter import Meter
    from pytest_gpumem.meter.peaks import Apart

    Step = Callable[[int], object]

PATIENCE_S: Final = 3.0
"""seconds without a word; a search that takes longer tells of every probe"""
MOST: Final = 10**9


@dataclass
class Prober:
    """Runs a step with one value after another, each on a clean allocator.

    What the step finds there when it is called counts for every probe: all that lives on in the
    test. What the probes take counts for nothing but themselves.
    """

    meter: Meter
    root: Path
    """the project's folder, for the names of files"""
    tell: Callable[[str], None]
    """shows a line to who waits"""
    patience: float = PATIENCE_S
    """seconds before anything is told"""

    def largest(
        self, step: Step, start: int = 1, limit: int | None = None, *, multiple: int = 1
    ) -> Largest:
        """Find the largest value for which ``step(value)`` fits; see ``gpu_memory.largest``."""
        call = "gpu_memory.largest"
        _check_step(call, step)
        for name, value in (("start", start), ("limit", limit), ("multiple", multiple)):
            if not (name == "limit" and value is None):
                _check_number(call, name, value)
        if limit is not None and limit < multiple:
            raise SpecError(
                f"{call}(limit={limit}, multiple={multiple})",
                "no multiple is within the limit",
                f"write limit={multiple} or more",
            )
        rehearsal = Rehearsal(self.meter.apart, first=self.meter.devices[0])
        search = Search(
            self.meter.capacity,
            start=start,
            limit=limit,
            multiple=multiple,
            oracle=rehearsal.largest,
        )
        began = time.monotonic()
        try:
            while (value := search.next()) is not None:
                probe, tally = self._run(step, value, script=True)
                search.add(probe)
                if probe.fits:
                    rehearsal.learn(value, [script_of(it) for it in tally.events])
                if time.monotonic() - began > self.patience:
                    self.tell(f"probe {len(search.probes)}: {said(probe, search.capacity)}")
        except KeyboardInterrupt:
            self.tell(str(search.result(interrupted=True)))
            raise
        return search.result()

    def scaling(self, step: Step, sizes: Iterable[int], predict: int | None = None) -> Scaling:
        """Find how the memory of ``step(size)`` grows; see ``gpu_memory.scaling``."""
        call = "gpu_memory.scaling"
        _check_step(call, step)
        wanted = _sizes(call, sizes)
        if predict is not None:
            _check_number(call, "predict", predict)
        began = time.monotonic()
        probes = []
        for size in wanted:
            probes.append(self.probe(step, size))
            if time.monotonic() - began > self.patience:
                self.tell(said(probes[-1], self.meter.capacity))
        fitting = {it.value: it.peak for it in probes if it.fits}
        if len(fitting) < 2:  # noqa: PLR2004 - a line has two points
            largest = max(it.value for it in probes if not it.fits)
            raise GpuMemError(
                f"{call}(sizes={wanted})",
                f"{len(fitting)} of them fits in {format_size(self.meter.capacity)}",
                f"give smaller sizes than {largest}",
            )
        scaling = Scaling.of(fitting)
        if not grows_evenly(scaling):
            found = {size: self.breakdown(step, size) for size in fitting}
            known = {size: it for size, it in found.items() if it is not None}
            scaling = scaling.named(uneven(known))
        if predict is not None:
            probe = self.probe(step, predict)
            taken = probe.peak.allocated if probe.fits else None
            scaling = scaling.predicted(Prediction(predict, scaling.at(predict), taken))
        return scaling

    def probe(self, step: Step, value: int) -> Probe:
        """Run a step once.

        Raises:
            whatever the step raises, but for out-of-memory errors.
        """
        return self._run(step, value)[0]

    def breakdown(self, step: Step, value: int) -> Breakdown | None:
        """Return what a step's peak consists of; None where that cannot be told."""
        probe, tally = self._run(step, value, record=True)
        recording = tally.recording
        if recording is None or recording.overflowed or not probe.fits:
            return None
        index = tally.peaks.index(max(tally.peaks, key=lambda peak: peak.allocated))
        device, others = self.meter.devices[index], self.meter.foreign[index]
        subject = Subject(device, tally.peaks[index], others, tally.windows)
        found = Attributor(recording, self.root).attribution(subject, timeline=False)
        return found.breakdown if found else None

    def _run(
        self, step: Step, value: int, *, record: bool = False, script: bool = False
    ) -> tuple[Probe, Apart]:
        shortage = None
        with self.meter.apart(record=record, script=script) as tally:
            try:
                step(value)
            except BaseException as error:
                cause = find_out_of_memory(error)
                if cause is None:
                    raise
                asked = WATCH.last(cause).requested
                shortage = "" if asked is None else f"{format_size(asked)} more asked for"
                clear(error)
        peak, passes = fullest(tally.peaks), fullest(tally.passes)
        return Probe(value, shortage is None, peak, passes, shortage or ""), tally


def said(probe: Probe, capacity: int) -> str:
    """Return one line about a probe."""
    if probe.fits:
        taken = f"{format_size(probe.peak.reserved)} of {format_size(capacity)} reserved"
        return f"{probe.value} fits, {taken}"
    return ": ".join(filter(None, [f"{probe.value} does not fit", probe.shortage]))


def _check_step(call: str, step: object) -> None:
    if not callable(step):
        raise SpecError(
            f"{call}({shown(step)})", "the step cannot be called", "give a function of one number"
        )


def _check_number(call: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise SpecError(
            f"{call}({name}={shown(value)})",
            f"{name} must be a whole number from 1 to {MOST:,}",
            f"write for example {name}=8",
        )


def _sizes(call: str, sizes: object) -> list[int]:
    found: list[int] = []
    with suppress(TypeError):
        found = list(sizes)  # type: ignore[call-overload] # that is what is tried
    for size in found:
        _check_number(call, "sizes", size)
    if len(set(found)) < 2:  # noqa: PLR2004 - a line has two points
        raise SpecError(
            f"{call}(sizes={shown(sizes)})",
            "a line takes two different sizes",
            "write for example sizes=[8, 16, 32]",
        )
    return sorted(set(found))
