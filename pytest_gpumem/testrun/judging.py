"""Judging measurements: look up each baseline, and return a result with its verdict."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.errors import BaselineError, DeviceError, TooSmallError
from pytest_gpumem.judge.judge import judge
from pytest_gpumem.judge.result import Result, describe_budget
from pytest_gpumem.judge.verdict import Lookup, unexplained
from pytest_gpumem.measurement import type_of_key
from pytest_gpumem.nodeids import split_nodeid
from pytest_gpumem.sizes import format_size
from pytest_gpumem.torchrun_env import current_rank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.baselines.store import BaselineStore
    from pytest_gpumem.devices.children import Child
    from pytest_gpumem.judge.verdict import ExplainGrowth, Policy
    from pytest_gpumem.measurement import DeviceInfo, Measurement, ServerStart
    from pytest_gpumem.notes import Note
    from pytest_gpumem.recording.recording import Recorded, Recording
    from pytest_gpumem.relations import Bound
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.run import Run

SIZE_LIMITS: Final = ("max_gib", "max_allocated_gib", "max_reserved_gib")
"""the marker's limits on the whole test's memory"""
Measured = tuple["MemorySpec", "Measurement"]


class EndedTest(NamedTuple):
    """A marked test that has ended, with the findings so far; stages return changed copies."""

    item: MarkedItem
    run: Run
    measured: dict[str, Measured]
    """the parts to judge by name; "" is the whole test"""
    relations: Mapping[str, Sequence[Bound]] = MappingProxyType({})
    """by part: its limits that depend on other parts, computed from the first run's figures"""
    children: Sequence[Child] = ()
    """the test's child processes that used a GPU"""
    servers: tuple[ServerStart, ...] = ()
    """starts of an inference server in the test, one per device"""
    recorded: Recorded | None = None
    """what its recording shows; None if it was not recorded, or the recording is still running"""
    error: BaseException | None = None
    """the error that ended it: out of memory, or a server's refusal to start"""
    debugging: bool = False
    """whether a debugger needs the error's frames: then the body does not run again"""
    results: Sequence[Result] = ()
    """empty until it is judged"""

    @property
    def whole(self) -> Measurement:
        """The whole test's measurement."""
        return self.measured[""][1]

    @property
    def recording(self) -> Recording | None:
        """The finished recording; None if the test was not recorded."""
        return self.recorded.recording if self.recorded else None

    def with_whole(self, measurement: Measurement) -> EndedTest:
        """Return the test with another measurement of the whole test."""
        spec, _ = self.measured[""]
        return self._replace(measured={**self.measured, "": (spec, measurement)})

    def noted(self, note: Note) -> EndedTest:
        """Return the test with a note added to each measurement."""
        measured = {
            part: (spec, replace(kept, notes=(*kept.notes, note)))
            for part, (spec, kept) in self.measured.items()
        }
        return self._replace(measured=measured)


class Judging:
    """Judges tests by a session's baselines and policy."""

    def __init__(self, stores: Sequence[BaselineStore], policy: Policy) -> None:
        """Store the folders of baselines, in order of look-up; only the first is written."""
        self._stores, self.store = stores, stores[0]
        self._policy = policy
        self.explain: ExplainGrowth = unexplained
        """returns the causes of peaks that grew"""
        self._rank = current_rank()

    def baseline_file(self, result: Result) -> Path:
        """Return a result's baseline file, from the first store that has it."""
        place = result.device_key, *split_nodeid(result.nodeid)
        paths = [store.path(*place[:2]) for store in self._stores]
        return next((path for path in paths if path.is_file()), paths[0])

    def require_alike(self, device: DeviceInfo) -> None:
        """Refuse to compare a test with baselines of another type of device than its own.

        Raises:
            DeviceError: ``--gpumem-against`` names a device of another type.
        """
        against = self._policy.against
        if against and type_of_key(against) != device.device_type:
            raise DeviceError(
                f"--gpumem-against={against}",
                f"this is a CUDA GPU, and the test runs on {device.device_type}",
                "leave the option out: the test is compared with its own device's baseline",
            )

    def require_room(self, item: MarkedItem, spec: MemorySpec, device: DeviceInfo) -> None:
        """Refuse a test that needs more memory than the device has.

        A test that names its card is not refused: it tests whether it fits on that card.

        Raises:
            TooSmallError: the test needs more, as :meth:`_need` says.
        """
        capacity = device.usable_memory
        need, source = self._need(item, spec, device.key)
        if spec.card is None and need > capacity and device.total_memory:  # 0: unknown
            raise TooSmallError(
                f"{format_size(need)} by {source}",
                f"{device.name} has only {format_size(capacity)}",
                "run this test on a larger GPU",
            )

    def _need(self, item: MarkedItem, spec: MemorySpec, device_key: str) -> tuple[int, str]:
        """Return the bytes that a test is known to need, and the source; (0, "") if unknown.

        The need is the peak reserved in the test's baseline for this device. A test that does not
        fit on this device has no such baseline: then it is the smallest peak reserved in baselines
        for devices of the same type. Without a baseline for this batch size, it is the smallest
        limit, which the test's author expects to be enough.
        """
        place = (*split_nodeid(item.nodeid), "")
        peaks: dict[str, int] = {}
        with suppress(BaselineError):  # an unreadable file is reported by the verdict
            for store in self._stores if spec.baseline else ():
                alike = (
                    key
                    for key in store.other_devices(device_key, *place)
                    if type_of_key(key) == type_of_key(device_key)
                )
                for key in (device_key, *alike):
                    entry = store.get(key, *place)
                    if entry is not None and entry.batch_size in {None, spec.batch_size}:
                        peaks.setdefault(key, entry.peak_reserved)
        if peaks:
            key = device_key if device_key in peaks else min(peaks, key=peaks.__getitem__)
            return peaks[key], f"the baseline of {key}"
        limits = [(size, name) for name in SIZE_LIMITS if (size := spec.bytes_of(name)) is not None]
        size, name = min(limits, default=(0, ""))
        return size, f"{name}={getattr(spec, name)!r}" if name else ""

    def results(
        self, test: EndedTest, explain_parts: Mapping[str, ExplainGrowth] = MappingProxyType({})
    ) -> list[Result]:
        """Return the results of a test and its parts.

        ``explain_parts`` maps some parts to the function that explains their growth.
        """
        item, card, own, found = test.item, test.run.card, self._rank, []
        for part, (declared, measurement) in test.measured.items():
            spec, policy, relations = declared, self._policy, test.relations.get(part, ())
            lookup = Lookup()
            if spec.baseline:
                device_key = self._policy.against or measurement.device.key
                place = (device_key, *split_nodeid(item.nodeid), part)
                try:
                    entries = (store.get(*place) for store in self._stores)
                    lookup = Lookup(next((entry for entry in entries if entry is not None), None))
                except BaselineError as error:
                    lookup = Lookup(error=str(error))
                if lookup == Lookup():
                    lookup = Lookup(other_devices=tuple(self.store.other_devices(*place)))
            world, rank = spec.world_size, spec.rank
            if own is not None and world is None:  # the baseline is the fullest rank's
                world, rank = own.size, own.rank
                spec = replace(spec, world_size=world)
                policy = replace(policy, shrinkage="note")  # another rank may have a higher peak
            if own is not None:
                policy = replace(policy, launcher=own.launcher)
            verdict = judge(
                measurement,
                spec,
                lookup,
                policy,
                nodeid=item.argument,
                card_bytes=card.usable_memory if card and (spec.card or not part) else None,
                relations=relations,
                explain=explain_parts.get(part, self.explain),
            )
            result = Result(
                nodeid=item.nodeid,
                verdict=verdict,
                measurement=measurement,
                part=part,
                batch_size=declared.batch_size,
                world_size=world,
                rank=rank,
                card=declared.card or "",
                budget=describe_budget(declared, relations),
                location=item.location(),
                baseline=declared.baseline,
                baseline_entry=lookup.entry,
            )
            found.append(result)
        return found
