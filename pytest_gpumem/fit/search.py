"""Search for the largest value that fits, and fit a line to the memory of several values.

Everything here is pure: :mod:`pytest_gpumem.fit.prober` measures the memory of a value. Sizes are
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import isqrt
from typing import TYPE_CHECKING, Final, Literal

from pytest_gpumem.measurement import Peak
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

Stop = Literal["memory", "limit", "no growth", "interrupted"]

MAX_GROWTH: Final = 64
"""maximum ratio of the next value to the largest fitting one, however little memory that took"""
GUIDED: Final = 6
"""after this many probes between a fitting and a refused value, every second one bisects"""
GROWTH: Final = 4
"""minimum ratio of the next value to the largest fitting one, while no line gives an estimate"""
FLAT_PROBES: Final = 4
"""number of probes without growth after which the search stops"""
DOWN: Final = (9, 8)
"""If the first value does not fit, try these tenths of it: a user's guess may be close."""
FAR_DOWN: Final = 16
"""Then divide the smallest refused value by this. In a run with a small value, memory that the step
keeps (an optimizer's state, say) is placed in small segments. In large segments it would prevent
their release."""
MIN_DOWN: Final = 64
"""below this value, a search without a fitting value halves"""
CLOSE: Final = 4
"""A bracket is close if its width is at most 1/N of its lower end."""
FARTHEST: Final = 8
"""A value larger than the refused one by at most 1/N may still need less memory."""
USUAL_MULTIPLE: Final = 8
"""Kernels may need less memory at multiples of this (tensor core sizes), so try the next one above
the answer."""

_NOTHING = Peak(0, 0)


@dataclass(frozen=True)
class Probe:
    """The result of running one value."""

    value: int
    fits: bool
    peak: Peak
    """the fullest device's peak; if the value does not fit, the peak until the refused request"""
    passes: Peak = _NOTHING
    """the peak outside of optimizer steps; an optimizer's peak may hide how everything else
    grows"""
    shortage: str = ""
    """why the value does not fit, as "2.00 GiB more requested"; "" if it fits, or if no reason is
    known"""


@dataclass(frozen=True)
class Largest:
    """The largest value that fits, with the probes of the search."""

    value: int
    """0 if no value fits"""
    capacity: int
    """bytes that a step may reserve"""
    probes: tuple[Probe, ...]
    """all probes, in the order of their runs"""
    stopped: Stop
    """why the search ended: the next value does not fit or exceeds the limit, memory does not grow
    with the value, or the user interrupted it"""
    left: int = 0
    """bytes that a refused probe left behind, which later probes include"""

    @property
    def peak(self) -> Peak:
        """The peak with this value; zeros if no value fits."""
        peaks = [probe.peak for probe in self.probes if probe.fits and probe.value == self.value]
        return peaks[-1] if peaks else Peak(0, 0)

    @property
    def holes(self) -> tuple[int, ...]:
        """Values that do not fit although a larger value fits."""
        refused = {probe.value for probe in self.probes if not probe.fits}
        return tuple(sorted(value for value in refused if value < self.value))

    @property
    def dips(self) -> tuple[int, ...]:
        """Values that fit with less allocated memory than a smaller value."""
        fitting = sorted(
            (probe for probe in self.probes if probe.fits), key=lambda probe: probe.value
        )
        return tuple(
            late.value
            for early, late in pairwise(fitting)
            if late.value > early.value and late.peak.allocated < early.peak.allocated
        )

    @property
    def monotonic(self) -> bool:
        """Whether no larger value needed less memory in any probe."""
        return not self.holes and not self.dips

    def __str__(self) -> str:
        number = f"{len(self.probes)} probe{'s' * (len(self.probes) != 1)}"
        if self.stopped == "interrupted":
            state = f"{self.value} fits" if self.value else "no value is known to fit"
            return f"interrupted after {number}: {state}"
        refused = [
            probe.value for probe in self.probes if not probe.fits and probe.value > self.value
        ]
        if not self.value:
            return f"not even {min(refused)} fits in {format_size(self.capacity)} ({number})"
        sentence = (
            f"{self.value} fits in {format_size(self.capacity)} with "
            f"{format_size(self.peak.reserved)} reserved"
        )
        if self.holes:
            verb = "do" if self.holes[1:] else "does"
            sentence += f", though {', '.join(map(str, self.holes))} {verb} not"
        elif self.dips:
            dips = ", ".join(map(str, self.dips))
            sentence += f", though {dips} take less than smaller values"
        if self.stopped == "limit":
            sentence += ", the limit of the search"
        elif self.stopped == "no growth":
            sentence += "; memory does not grow with the value"
        elif refused:
            sentence += f"; {min(refused)} does not"
        if self.left:
            sentence += (
                f"; {format_size(self.left)} that a refused probe left behind count in later probes"
            )
        return f"{sentence} ({number})"


class Search:
    """Chooses the values to try; pass each probe to :meth:`add` before calling :meth:`next`.

    A blind search can only double. Here the first probe's memory shows how far it is safe to go:
    memory is fixed + slope * value with ``fixed`` at least 0, so a value that needed a share of the
    capacity can be divided by that share. Then the line through the two largest fitting values
    gives the value at which the capacity is reached. The line uses the peaks of forward and
    backward passes, because at small values an optimizer step, which hardly grows, has the higher
    peak. The answer is a value that fitted in a probe, just below one that did not. If the first
    value does not fit, the search tries two values near it, and then one far below, from which it
    goes up as from a small first value.

    Args:
        capacity: bytes that a step may reserve.
        start: the first value to try.
        limit: the largest value of interest; None for no limit.
        multiple: only try multiples of this.
    """

    def __init__(
        self,
        capacity: int,
        *,
        start: int = 1,
        limit: int | None = None,
        multiple: int = 1,
    ) -> None:
        self.capacity = capacity
        self.probes: list[Probe] = []
        self._multiple = multiple
        self._limit = None if limit is None else limit // multiple
        first = -(-start // multiple)
        self._first = first if self._limit is None else max(1, min(first, self._limit))
        self._low = 0
        """the largest value that fits; like all values here, in units of ``multiple``"""
        self._high: int | None = None
        """the smallest value above ``_low`` that does not fit"""
        self._guided = 0
        """number of probes that :meth:`_between` chose since both bounds are known"""
        self._step = 1
        self._checked = False

    def add(self, probe: Probe) -> None:
        """Add a probe, and narrow the bounds by its result."""
        self.probes.append(probe)
        unit = probe.value // self._multiple
        if probe.fits and unit > self._low:
            if self._high is not None and unit > self._high:  # not monotonic: continue above it
                self._high = None
                self._guided = 0
            self._low = unit
        elif not probe.fits and unit > self._low:
            self._high = unit if self._high is None else min(self._high, unit)

    def next(self) -> int | None:
        """Return the next value to try; None when the answer is known."""
        limited = self._limit is not None and self._low >= self._limit
        last = [probe.passes.allocated for probe in self._points()[-FLAT_PROBES:]]
        flat = len(last) == FLAT_PROBES and last[0] >= last[-1]  # no growth with the value
        unit: int | None
        if not self.probes:
            unit = self._first
        elif self._high is not None and self._high - self._low <= 1:
            unit = self._check(self._high)
        elif limited or (self._high is None and flat):
            unit = None
        elif self._high is None:
            unit = self._further()
        elif self._low:
            unit = self._between(self._low, self._high)
        elif self._high < MIN_DOWN:  # in this and the next cases no value has fitted yet
            unit = _middle(0, self._high)
        elif len(self.probes) <= len(DOWN):
            first = max(probe.value for probe in self.probes) // self._multiple
            unit = min(first * DOWN[len(self.probes) - 1], self._high * DOWN[0]) // 10
        else:
            unit = self._high // FAR_DOWN
        return None if unit is None else unit * self._multiple

    @property
    def about_left(self) -> int | None:
        """Estimated number of remaining probes; None until a value was refused."""
        return None if self._high is None else (self._high - self._low - 1).bit_length()

    def result(self, *, interrupted: bool = False) -> Largest:
        """Return the answer so far."""
        limited = self._limit is not None and self._low >= self._limit
        stopped: Stop = "memory" if self._high is not None else "limit" if limited else "no growth"
        return Largest(
            self._low * self._multiple,
            self.capacity,
            tuple(self.probes),
            "interrupted" if interrupted else stopped,
        )

    def _further(self) -> int:
        """Return a larger value to try, while none was refused."""
        end = self._end("allocated")
        unit = max(self._safe(), GROWTH * self._low) if end is None else end
        unit = min(unit, MAX_GROWTH * self._low)
        if unit <= self._low:
            unit = self._low + self._stride()
        return unit if self._limit is None else min(unit, self._limit)

    def _between(self, low: int, high: int) -> int:
        self._guided += 1
        end = self._end("allocated")
        blind = self._guided > GUIDED and self._guided % 2
        if blind or end is None:
            return _middle(low, high)
        safe = self._safe()
        if end >= high > safe > low + (high - low) // CLOSE:  # the estimate is far too high
            return safe
        edge = self._end("reserved")
        for unit in (end, edge):
            if unit is not None and low < unit < high:
                return unit
        if end <= low or (edge is not None and edge <= low):  # the estimate is a little too low
            return min(low + self._stride(), high - 1)
        if high - low > max(low // CLOSE, 1):
            return _middle(low, high)
        return max(high - self._stride(), low + 1)  # the estimate is a little too high

    def _safe(self) -> int:
        """Return the value that fits even if all memory grows in proportion to the value."""
        peak = self._points()[-1].peak
        return self._low * self.capacity // max(peak.reserved, 1)

    def _end(self, which: Literal["allocated", "reserved"]) -> int | None:
        """Return the value at which memory reaches the capacity, on a line through two probes.

        They are the two with the largest fitting values. None if fewer than two values fit, or if
        the line does not rise.
        """
        points = self._points()[-2:]
        if len(points) < 2:  # noqa: PLR2004 - two points
            return None
        (x0, y0), (x1, y1) = (
            (probe.value // self._multiple, getattr(probe.passes, which)) for probe in points
        )
        if y1 <= y0:
            return None
        end: int = x1 + (self.capacity - y1) * (x1 - x0) // (y1 - y0)
        return end

    def _stride(self) -> int:
        """Return how far from a bound to probe next; the distance doubles each time."""
        step, self._step = self._step, 2 * self._step
        return step

    def _points(self) -> list[Probe]:
        return sorted((probe for probe in self.probes if probe.fits), key=lambda probe: probe.value)

    def _check(self, high: int) -> int | None:
        """Return a multiple of 8 above the refused value: kernels may need less memory for it.

        Return None if such a multiple was tried already, or if the next one is too far above.
        """
        if self._checked or self._low == 0:
            return None
        self._checked = True
        over = [probe.value for probe in self.probes if probe.value > high * self._multiple]
        if any(value % USUAL_MULTIPLE == 0 for value in over):
            return None
        value = (high * self._multiple // USUAL_MULTIPLE + 1) * USUAL_MULTIPLE
        unit = -(-value // self._multiple)
        far = unit > high + high // FARTHEST
        return None if far or (self._limit is not None and unit > self._limit) else unit


def _middle(low: int, high: int) -> int:
    """Bisect: the geometric mean if the bounds are far apart, else the arithmetic mean."""
    return isqrt(low * high) if 0 < low < high // 4 else (low + high) // 2


@dataclass(frozen=True)
class MemoryLine:
    """A line, memory = fixed + slope * value, fitted by least squares."""

    fixed: Fraction
    """bytes at value 0"""
    slope: Fraction
    """bytes per unit of the value"""
    residual: Fraction
    """largest distance of a point from the line, in bytes"""

    def at(self, value: int) -> int:
        """Return the bytes at a value, rounded."""
        return round(self.fixed + self.slope * value)


def fit_line(points: Mapping[int, int]) -> MemoryLine:
    """Fit a line to points, given as bytes by value; it passes through two points exactly."""
    number = len(points)
    mean = Fraction(sum(points), number)
    level = Fraction(sum(points.values()), number)
    spread = sum((value - mean) ** 2 for value in points)
    slope = sum(((v - mean) * (b - level) for v, b in points.items()), Fraction(0)) / spread
    fixed = level - slope * mean
    residual = max(abs(fixed + slope * v - b) for v, b in points.items())
    return MemoryLine(fixed, slope, residual)
