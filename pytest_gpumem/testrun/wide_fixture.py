"""The memory of fixtures of wider scope than a test, which several tests share.

A test's figures are those that it has alone, where it sets up its fixtures itself. So the set-up of
such a fixture is noted, in stages where it asks for another one (``request.getfixturevalue``), and
replayed where a later test uses the live fixture.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.meter.peaks import NOTHING, minus, plus
from pytest_gpumem.meter.pins import FINDER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.attribution.recording import Known
    from pytest_gpumem.measurement import Peak
    from pytest_gpumem.meter.meter import Meter


def no_memory(count: int) -> list[Peak]:
    """Return no memory on each of so many devices."""
    return [NOTHING] * count


def sums(lefts: Sequence[Peak], rights: Sequence[Peak]) -> list[Peak]:
    """Return the sum on each device."""
    return list(map(plus, lefts, rights))


def differences(lefts: Sequence[Peak], rights: Sequence[Peak]) -> list[Peak]:
    """Return the difference on each device, never below zero."""
    return list(map(minus, lefts, rights))


def padded(peaks: Sequence[Peak], count: int) -> list[Peak]:
    """Return one Peak for each of a test's devices, whatever test set the fixture up."""
    return [*peaks, *no_memory(count)][:count]


@dataclass(frozen=True)
class Stage:
    """A stage of a fixture's set-up, without memory of other fixtures; one Peak a device."""

    peaks: tuple[Peak, ...]
    """above the memory held when the set-up began"""
    held: tuple[Peak, ...]
    """the fixture's own memory at the end of the stage"""
    then: Retained | None = None
    """the fixture that the set-up asked for then"""


@dataclass(eq=False)
class Retained:
    """The memory of an instance of a fixture of wider scope than a test."""

    name: str
    held: tuple[Peak, ...] = ()
    """the memory that it holds since its set-up, one Peak a device"""
    stages: tuple[Stage, ...] = field(default=(), repr=False)
    known: Known = field(default_factory=dict, repr=False)
    """its blocks, with what is known of them"""

    before_run: bool = False
    """whether it was live when the test that runs began"""
    values_lost_by: str = ""
    """the test that had no values computed, and so made its values unknown"""

    @property
    def holds_memory(self) -> bool:
        """Whether it holds any."""
        return any(peak.allocated for peak in self.held)

    def forget(self) -> None:
        """Note that it was torn down: what held its blocks may be garbage from now on."""
        FINDER.forget(self.known)
        self.held, self.stages, self.known = (), (), {}


class SetUpWatch:
    """Watches the memory of a set-up, apart from that of the fixtures that it asks for."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._base = meter.counted()
        """memory that is not this fixture's"""
        self._stages: list[Stage] = []
        self._paused_at: list[Peak] = []
        self._stack = ExitStack()
        self._tally = self._stack.enter_context(meter.part())

    def pause(self, asked_for: Retained | None) -> None:
        """End a stage: the set-up asks for another fixture, or has ended."""
        self._stack.close()
        self._meter.resettle()
        self._paused_at = self._meter.counted()
        peaks = tuple(differences(self._tally.peaks, self._base))
        held = tuple(differences(self._paused_at, self._base))
        self._stages.append(Stage(peaks, held, asked_for))

    def resume(self) -> None:
        """Begin the next stage: memory counted since the pause is the other fixture's."""
        self._base = sums(self._base, differences(self._meter.counted(), self._paused_at))
        self._tally = self._stack.enter_context(self._meter.part())

    def close(self) -> None:
        """End the last stage."""
        self.pause(None)

    def result(self) -> tuple[tuple[Peak, ...], tuple[Stage, ...]]:
        """Return the memory that the fixture holds, and the stages of its set-up."""
        return self._stages[-1].held, tuple(self._stages)
