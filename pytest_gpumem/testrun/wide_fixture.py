"""The memory of fixtures with a wider scope than a test, in the figures of each test using them.

The rule: a test counts each fixture that it requests, directly or through another fixture, as if
the test had set the fixture up itself; other tests' memory does not count. So a set-up is measured
once, in stages between the fixtures that it requests (``request.getfixturevalue``), and replayed at
each test's first use. (If a whole set-up were one stage, a fixture that it requests would count
only for the test that comes first: a test of tests/plugin/test_order.py would have 4 MiB instead of
24 MiB.) A set-up on another card, or on another number of devices, may take different memory: such
a fixture is torn down before the test, which sets it up again.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.meter.peaks import NOTHING, minus, plus
from pytest_gpumem.meter.pins import FINDER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.meter.meter import Meter
    from pytest_gpumem.meter.peaks import Held, Highest
    from pytest_gpumem.recording.recording import Known


class SetUpStage(NamedTuple):
    """A stage of a fixture's set-up, without other fixtures' memory; one item per device."""

    highest: Highest
    """the highest figures, relative to the memory held when the set-up began"""
    held: list[Held]
    """the fixture's own memory at the end of the stage"""
    then: WideFixture | None = None
    """the fixture that the set-up requested at the end of the stage"""

    @property
    def takes_memory(self) -> bool:
        """Whether the stage or the fixture requested after it takes memory."""
        own = any(held != NOTHING for held in self.highest.all)
        return own or (self.then is not None and bool(self.then.stages))


@dataclass(eq=False)
class WideFixture:
    """An instance of a fixture of wider scope than a test, and its memory."""

    name: str
    devices: tuple[str, int]
    """the device key, and the number of devices, of the test that set the fixture up"""
    stages: list[SetUpStage] = field(default_factory=list, repr=False)
    """the stages of its set-up; empty if the set-up took no memory"""
    known: Known = field(default_factory=dict, repr=False)
    """the fixture's blocks, with the tensors that the recording saw in each"""

    is_live: bool = True
    before_run: bool = False
    """whether a test before the running one set the fixture up"""
    values_lost_by: str = ""
    """the test whose ``values="off"`` made the fixture's values unknown; "" for none"""

    @property
    def held(self) -> list[Held]:
        """The memory held since the set-up, one item per device; [] if none, or after tear-down."""
        return self.stages[-1].held if self.is_live and self.stages else []

    @property
    def holds_memory(self) -> bool:
        """Whether the fixture still holds allocated memory."""
        return any(peak.allocated for peak in self.held)

    def suits(self, devices: tuple[str, int]) -> bool:
        """Return whether a test on these devices can use the fixture as it is.

        It can if the fixture is live, and a set-up on these devices would take the same memory.
        """
        requested = [stage.then for stage in self.stages if stage.then and stage.then.stages]
        same = self.devices == devices or not self.stages
        return self.is_live and same and all(fixture.suits(devices) for fixture in requested)

    def forget(self) -> None:
        """Mark the fixture as torn down; forget its tensors, which may be garbage from now on."""
        FINDER.forget(self.known)
        self.is_live, self.known = False, {}


class _SetUp:
    """A running set-up: its memory, without that of the fixtures it requests."""

    def __init__(self, meter: Meter) -> None:
        self.stages: list[SetUpStage] = []
        self._meter = meter
        self._base = self._paused_at = meter.counted()
        self.resume()

    def resume(self) -> None:
        """Start a stage: memory added since the last stage belongs to another fixture."""
        grown = map(minus, self._meter.counted(), self._paused_at)
        self._base = list(map(plus, self._base, grown))
        self._stack = ExitStack()
        self._tally = self._stack.enter_context(self._meter.part())

    def pause(self, requested: WideFixture | None = None) -> None:
        """End a stage: the set-up requests another fixture, or has ended."""
        self._stack.close()
        self._meter.settle_again()
        self._paused_at = self._meter.counted()
        held = list(map(minus, self._paused_at, self._base))
        self.stages.append(SetUpStage(self._tally.highest.above(self._base), held, requested))


class WideFixtures:
    """The fixtures of wider scope that one test uses."""

    def __init__(self, meter: Meter, devices: tuple[str, int]) -> None:
        self.used: list[WideFixture] = []
        self.devices = devices
        self._meter = meter
        self._set_ups: list[_SetUp] = []
        """stack of running set-ups; each one was requested by the set-up before it"""

    def held(self, *, before_run: bool = False) -> list[Held]:
        """Return the memory of the used live fixtures, one item per device.

        With ``before_run``, only of fixtures that earlier tests set up.
        """
        total = [NOTHING] * self._meter.count
        for fixture in self.used:
            if fixture.held and (fixture.before_run or not before_run):
                total = list(map(plus, total, fixture.held))
        return total

    @contextmanager
    def set_up(self, name: str) -> Iterator[WideFixture]:
        """Measure a fixture that is set up in the block.

        The test's limit does not cap the set-up; it applies to the test, whichever test set the
        fixture up. Garbage and cached memory are released before and after the set-up, and before
        each use.
        """
        fixture = WideFixture(name, self.devices)
        with self._between_stages(fixture), self._meter.room.capped(None):
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
            fixture.known = self._meter.recording.known(
                set(self._meter.isolation.blocks()) - blocks
            )
            self.used.append(fixture)

    def use(self, fixture: WideFixture) -> None:
        """Count a live fixture's memory from now on, and replay its set-up's peaks."""
        with self._between_stages(fixture):
            if fixture not in self.used:
                fixture.before_run = True
                self._replay(fixture, [NOTHING] * self._meter.count)

    @contextmanager
    def _between_stages(self, fixture: WideFixture) -> Iterator[None]:
        """Exclude a fixture's memory from that of the fixture that requests it, if any."""
        if not self._set_ups:
            self._meter.settle_again()
            yield
            return
        requesting = self._set_ups[-1]
        requesting.pause(fixture)
        try:
            yield
        finally:
            requesting.resume()

    def _replay(self, fixture: WideFixture, held_by_requesting: Sequence[Held]) -> None:
        """Count a set-up's stages on top of the memory held now and ``held_by_requesting``.

        ``held_by_requesting`` is the memory of the fixtures that request this one: not counted yet.
        """
        self.used.append(fixture)
        for stage in fixture.stages:
            held = list(map(plus, self._meter.counted(), held_by_requesting))
            self._meter.consider(stage.highest.on_top_of(held))
            if stage.then is not None and stage.then not in self.used:
                self._replay(stage.then, list(map(plus, held_by_requesting, stage.held)))
        self._meter.adopt(fixture.held, fixture.known)
