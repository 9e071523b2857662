"""Run a step with many values to find the largest that fits, or how memory grows."""

from __future__ import annotations

import gc
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pytest_gpumem.errors import GpuMemError, SpecError, is_own_error
from pytest_gpumem.fit.scaling import Prediction, Scaling, grows_evenly, uneven
from pytest_gpumem.fit.search import Largest, Probe, Search
from pytest_gpumem.meter.out_of_memory import WATCH, find_out_of_memory
from pytest_gpumem.meter.peaks import fullest, reported
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.recording.recording import Recorded
from pytest_gpumem.sizes import duration, format_size, shown
from pytest_gpumem.spec_fields import MAX_BATCH
from pytest_gpumem.tracebacks import clear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_gpumem.measurement import Breakdown
    from pytest_gpumem.meter.meter import Meter
    from pytest_gpumem.meter.peaks import Tally

    Step = Callable[[int], object]
    Explain = Callable[[Recorded], Breakdown | None]

__tracebackhide__ = is_own_error

PATIENCE_S: Final = 3.0
"""seconds after which a search shows a line for every probe"""


@dataclass
class Prober:
    """Runs a step with one value after another, each on a clean allocator.

    The test's live memory counts in every probe; what a probe frees counts in no other probe.
    """

    meter: Meter
    show: Callable[[str], None]
    """shows a line to the waiting user"""
    explain: Explain | None = None
    """returns the breakdown of a recorded run's peak on its first device; None if disabled"""
    patience: float = PATIENCE_S
    """seconds before the first line is shown"""

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
            problem = "the limit is smaller than the smallest multiple"
            remedy = f"write limit={multiple} or more"
            raise SpecError(f"{call}(limit={limit}, multiple={multiple})", problem, remedy)
        search = Search(self.meter.room.capacity, start=start, limit=limit, multiple=multiple)
        leaked = 0
        began = time.monotonic()
        try:
            while (value := search.next()) is not None:
                held = self._held()
                probe = self.probe(step, value)
                search.add(probe)
                if not probe.fits:
                    leaked = max(leaked, self._held() - held)
                spent = time.monotonic() - began
                if spent > self.patience:
                    number = len(search.probes)
                    line = f"probe {number}: {outcome(probe, search.capacity)}"
                    if left := search.about_left:
                        line += f"; about {left} more, {duration(left * spent / number)}"
                    self.show(line)
        except KeyboardInterrupt:
            self.show(str(search.result(interrupted=True)))
            raise
        return replace(search.result(), left=leaked)

    def _held(self) -> int:
        return sum(peak.allocated for peak in self.meter.counted())

    def scaling(self, step: Step, sizes: Iterable[int], predict: int | None = None) -> Scaling:
        """Measure the growth of ``step(size)``'s memory; see ``gpu_memory.scaling``."""
        call = "gpu_memory.scaling"
        _check_step(call, step)
        members: list[int] = []
        with suppress(TypeError):
            members = list(sizes)
        for size in members:
            _check_number(call, "sizes", size)
        if len(set(members)) < 2:  # noqa: PLR2004 - a line has two points
            problem = "a line needs two different sizes"
            remedy = "write for example sizes=[8, 16, 32]"
            raise SpecError(f"{call}(sizes={shown(sizes)})", problem, remedy)
        checked_sizes = sorted(set(members))
        if predict is not None:
            _check_number(call, "predict", predict)
        began = time.monotonic()
        probes = []
        for size in checked_sizes:
            probes.append(self.probe(step, size))
            if time.monotonic() - began > self.patience:
                self.show(outcome(probes[-1], self.meter.room.capacity))
        fitting = {probe.value: probe.peak for probe in probes if probe.fits}
        if len(fitting) < 2:  # noqa: PLR2004 - a line has two points
            largest = max(probe.value for probe in probes if not probe.fits)
            raise GpuMemError(
                f"{call}(sizes={checked_sizes})",
                f"{'only one' if fitting else 'none'} of these sizes fits in "
                f"{format_size(self.meter.room.capacity)}",
                f"write sizes smaller than {largest}",
            )
        scaling = Scaling.of(fitting)
        if self.explain is not None and not grows_evenly(scaling):
            scaling = scaling.named(uneven(self._breakdowns(step, fitting, self.explain)))
        if predict is not None:
            probe = self.probe(step, predict)
            measured = probe.peak.allocated if probe.fits else None
            scaling = scaling.predicted(Prediction(predict, scaling.at(predict), measured))
        return scaling

    def probe(self, step: Step, value: int) -> Probe:
        """Run a step once with a value; errors propagate, except out-of-memory errors."""
        return self._run(step, value)[0]

    def _breakdowns(
        self, step: Step, sizes: Iterable[int], explain: Explain
    ) -> dict[int, Breakdown]:
        """Run a step again with these sizes; return the breakdowns of the peaks that are known."""
        breakdowns = {}
        for size in sizes:
            probe, tally = self._run(step, size, record=True)
            index = tally.peaks.index(max(tally.peaks, key=lambda peak: peak.allocated))
            foreign = reported(self.meter.isolation.kept_foreign[index:])
            windows, peaks = {"": tally.windows}, {"": tally.peaks[index:]}
            devices = self.meter.devices[index:]
            recorded = Recorded(tally.recording, devices, foreign, windows, peaks)
            if probe.fits and (breakdown := explain(recorded)) is not None:
                breakdowns[size] = breakdown
        return breakdowns

    def _run(self, step: Step, value: int, *, record: bool = False) -> tuple[Probe, Tally]:
        shortage = None
        with self.meter.separately(record=record) as tally:
            # Reset the collector's counters, so that it runs at the same points in every probe,
            # whatever was printed since the last one.
            gc.collect()
            try:
                step(value)
            except BaseException as error:
                cause = find_out_of_memory(error)
                if cause is None:
                    raise
                requested = WATCH.last(cause).requested
                shortage = "" if requested is None else f"{format_size(requested)} more requested"
                clear(error)
        peak, passes = fullest(tally.peaks), fullest(tally.highest.passes)
        if shortage is None and not VIEW.backend.caps and peak.reserved > self.meter.room.capacity:
            shortage = f"{format_size(peak.reserved)} reserved"
        return Probe(value, shortage is None, peak, passes, shortage or ""), tally


def outcome(probe: Probe, capacity: int) -> str:
    """Describe a probe in one line."""
    if probe.fits:
        reserved = format_size(probe.peak.reserved)
        return f"{probe.value} fits, {reserved} of {format_size(capacity)} reserved"
    return ": ".join(filter(None, [f"{probe.value} does not fit", probe.shortage]))


def _check_step(call: str, step: object) -> None:
    if not callable(step):
        remedy = "pass a function that takes one number"
        raise SpecError(f"{call}({shown(step)})", "the step cannot be called", remedy)


def _check_number(call: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_BATCH:
        problem = f"{name} must be a whole number from 1 to {MAX_BATCH:,}"
        raise SpecError(f"{call}({name}={shown(value)})", problem, f"write for example {name}=8")
