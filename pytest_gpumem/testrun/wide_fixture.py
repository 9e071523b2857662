"""Fixtures of wider scope than a test, which several tests share, and their memory in its figures.

The rule: a test counts each fixture that the test asks for, directly or through another fixture, as
if the test had set the fixture up itself; other tests' memory does not count. So a set-up is noted
once, in stages between the fixtures that the set-up asks for (``request.getfixturevalue``), and
counts at each test's first use. A set-up on another card, or on another number of devices, takes
other memory: such a fixture is torn down before the test, which sets the fixture up anew.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.meter.peaks import NOTHING, minus, plus
from pytest_gpumem.meter.pins import FINDER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.measurement import Peak
    from pytest_gpumem.meter.meter import Meter
    from pytest_gpumem.recording.recording import Known


class Stage(NamedTuple):
    """A stage of a fixture's set-up, without memory of other fixtures; one Peak a device."""

    peaks: list[Peak]
    """above the memory held when the set-up began"""
    held: list[Peak]
    """the fixture's own memory at the end of the stage"""
    then: WideFixture | None = None
    """the fixture that the set-up asked for then"""

    @property
    def takes_memory(self) -> bool:
        """Whether the stage takes memory, or the fixture that is asked for does."""
        own = any(peak != NOTHING for peak in self.peaks)
        return own or (self.then is not None and bool(self.then.stages))


@dataclass(eq=False)
class WideFixture:
    """An instance of a fixture of wider scope than a test, and its memory."""

    name: str
    devices: tuple[str, int]
    """the card, and the number of devices, of the test that set the fixture up"""
    stages: list[Stage] = field(default_factory=list, repr=False)
    """those of its set-up; none if that took no memory"""
    known: Known = field(default_factory=dict, repr=False)
    """its blocks, with the facts on them"""

    is_live: bool = True
    before_run: bool = False
    """whether it was live when the test that runs began"""
    values_lost_by: str = ""
    """the test that had no values computed, and so made its values unknown"""

    @property
    def held(self) -> list[Peak]:
        """The memory that it holds since its set-up, one Peak a device."""
        return self.stages[-1].held if self.is_live and self.stages else []

    @property
    def holds_memory(self) -> bool:
        """Whether the fixture holds memory."""
        return any(peak.allocated for peak in self.held)

    def suits(self, devices: tuple[str, int]) -> bool:
        """Whether a set-up on other devices would take the same memory, as far as is known."""
        asked_for = [stage.then for stage in self.stages if stage.then and stage.then.stages]
        same = self.devices == devices or not self.stages
        return self.is_live and same and all(fixture.suits(devices) for fixture in asked_for)

    def forget(self) -> None:
        """Note that it was torn down: holders of its blocks may be garbage from now on."""
        FINDER.forget(self.known)
        self.is_live, self.known = False, {}


class _SetUp:
    """A set-up that runs: its memory, without the memory of fixtures that it asks for."""

    def __init__(self, meter: Meter) -> None:
        self.stages: list[Stage] = []
        self._meter = meter
        self._base = self._paused_at = meter.counted()
        self.resume()

    def resume(self) -> None:
        """Begin a stage: memory counted since the end of the last one is another fixture's."""
        grown = map(minus, self._meter.counted(), self._paused_at)
        self._base = list(map(plus, self._base, grown))
        self._stack = ExitStack()
        self._tally = self._stack.enter_context(self._meter.part())

    def pause(self, asked_for: WideFixture | None = None) -> None:
        """End a stage: the set-up asks for another fixture, or has ended."""
        self._stack.close()
        self._meter.resettle()
        self._paused_at = self._meter.counted()
        peaks = list(map(minus, self._tally.peaks, self._base))
        held = list(map(minus, self._paused_at, self._base))
        self.stages.append(Stage(peaks, held, asked_for))


class WideFixtures:
    """The fixtures of wider scope that one test uses."""

    def __init__(self, meter: Meter, devices: tuple[str, int]) -> None:
        self.used: list[WideFixture] = []
        self.devices = devices
        self._meter = meter
        self._set_ups: list[_SetUp] = []
        """those that run, each asked for by the one before"""

    def held(self, *, before_run: bool = False) -> list[Peak]:
        """Return the memory of those that are live, one Peak a device.

        ``before_run``: only of those that other tests set up.
        """
        total = [NOTHING] * self._meter.count
        for fixture in self.used:
            if fixture.held and (fixture.before_run or not before_run):
                total = list(map(plus, total, fixture.held))
        return total

    @contextmanager
    def set_up(self, name: str) -> Iterator[WideFixture]:
        """Note the memory of a fixture that is set up in the block.

        The set-up is not held to the test's own limit: the test is, whether it or another one set
        the fixture up. The device is settled before and after, as before and after each use.
        """
        fixture = WideFixture(name, self.devices)
        with self._between_stages(fixture), self._meter.capped(None):
            blocks = set(self._meter.isolation.blocks())
            set_up = _SetUp(self._meter)
            self._set_ups.append(set_up)
            try:
                yield fixture
            finally:
                self._set_ups.remove(set_up)
                set_up.pause()
            if any(stage.takes_memory for stage in set_up.stages):
                fixture.stages = set_up.stages
            fixture.known = self._meter.known(set(self._meter.isolation.blocks()) - blocks)
            self.used.append(fixture)

    def use(self, fixture: WideFixture) -> None:
        """Count a live fixture's memory from now on, and its set-up as if that ran now."""
        with self._between_stages(fixture):
            if fixture not in self.used:
                fixture.before_run = True
                self._replay(fixture, [NOTHING] * self._meter.count)

    @contextmanager
    def _between_stages(self, fixture: WideFixture) -> Iterator[None]:
        """Keep the memory of a fixture apart from the fixture that asks for it, if any does."""
        if not self._set_ups:
            self._meter.resettle()
            yield
            return
        asking = self._set_ups[-1]
        asking.pause(fixture)
        try:
            yield
        finally:
            asking.resume()

    def _replay(self, fixture: WideFixture, held_by_asking: Sequence[Peak]) -> None:
        """Count the stages of a set-up; ``held_by_asking`` does not count yet."""
        self.used.append(fixture)
        for stage in fixture.stages:
            held = map(plus, self._meter.counted(), held_by_asking)
            self._meter.consider(list(map(plus, held, stage.peaks)))
            if stage.then is not None and stage.then not in self.used:
                self._replay(stage.then, list(map(plus, held_by_asking, stage.held)))
        self._meter.adopt(fixture.held, fixture.known)
