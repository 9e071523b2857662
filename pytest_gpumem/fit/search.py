"""What fits: the search for the largest value, and memory as a line over the batch size.

Everything here is pure: what a value takes is measured in :mod:`pytest_gpumem.fit.prober`.
Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import isqrt
from typing import TYPE_CHECKING, Final, Literal

from pytest_gpumem.measurement import Peak
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Oracle = Callable[[int, "int | None", int, int], "int | None"]
"""Says which value will fit at last: from one that fits, one that does not (None: not known), the
most that is asked for, and what all are multiples of. None where it cannot tell."""
Stop = Literal["memory", "limit", "no growth", "interrupted"]

MOST_GROWTH: Final = 64
"""times the value before that a probe may be, however little memory that took"""
GUIDED: Final = 6
"""probes between a value that fits and one that does not, before every other is in the middle"""
GROWTH: Final = 4
"""times the value before that a probe is at least, where nothing is known yet"""
FLAT_PROBES: Final = 4
"""probes that have to show no growth before the search is given up"""
MOST_ERRORS: Final = 3
"""wrong sayings after which an oracle is no longer asked"""
DOWN: Final = (9, 8)
"""tenths of a first value that does not fit to try next: who names one may be near"""
FAR_DOWN: Final = 16
"""then a value so many times smaller: what a step makes and keeps, as an optimizer's state, lies
among little then, and not in the midst of large segments, which nobody could give back any more"""
LEAST_DOWN: Final = 64
"""the least value for which that is done, and not half of it tried"""
NEAR: Final = 20
"""part of a value that the next one has to be more"""
CLOSE: Final = 4
"""A bracket is close whose width is no more than this part of its lower end."""
FARTHEST: Final = 8
"""part of a value that another one may be above it and still be hoped to need less"""
USUAL_MULTIPLE: Final = 8
"""Values of which kernels may need less: of tensor cores' sizes, so the check above the answer."""

_NOTHING = Peak(0, 0)


@dataclass(frozen=True)
class Probe:
    """One value that was tried."""

    value: int
    fits: bool
    peak: Peak
    """of the fullest device; of what does not fit, what it held when it was refused"""
    passes: Peak = _NOTHING
    """the same without optimizers' steps, whose memory may hide how the rest grows"""
    shortage: str = ""
    """what was asked for when it was refused"""


@dataclass(frozen=True)
class Largest:
    """The largest value that fits, and how it was found."""

    value: int
    """0: none fits"""
    capacity: int
    """bytes that a step may reserve"""
    probes: tuple[Probe, ...]
    """in the order in which they were made"""
    stopped: Stop
    """what ended the search: the next value does not fit, or is over the limit; or memory does not
    grow with the value"""

    @property
    def peak(self) -> Peak:
        """What the value takes."""
        found = [it.peak for it in self.probes if it.fits and it.value == self.value]
        return found[-1] if found else Peak(0, 0)

    @property
    def holes(self) -> tuple[int, ...]:
        """Smaller values that do not fit: what fits is not monotonic then."""
        return tuple(sorted({it.value for it in self.probes if not it.fits} & _below(self)))

    @property
    def dips(self) -> tuple[int, ...]:
        """Values that fit and take less than a smaller value, allocated."""
        fitting = sorted((it for it in self.probes if it.fits), key=lambda it: it.value)
        return tuple(
            late.value
            for early, late in pairwise(fitting)
            if late.value > early.value and late.peak.allocated < early.peak.allocated
        )

    @property
    def monotonic(self) -> bool:
        """Whether every probe agrees with this: larger values take more."""
        return not self.holes and not self.dips

    def __str__(self) -> str:
        """Return the answer in one sentence."""
        number = f"{len(self.probes)} probe{'s' * (len(self.probes) != 1)}"
        if self.stopped == "interrupted":
            known = f"{self.value} fits" if self.value else "none is known to fit"
            return f"interrupted after {number}: {known}"
        refused = [it for it in self.probes if not it.fits and it.value > self.value]
        if not self.value:
            least = min(refused, key=lambda it: it.value)
            return f"not even {least.value} fits in {format_size(self.capacity)} ({number})"
        text = (
            f"{self.value} fits in {format_size(self.capacity)} with "
            f"{format_size(self.peak.reserved)} reserved"
        )
        if self.holes:
            text += f", though {_listed(self.holes)} {'do' if self.holes[1:] else 'does'} not"
        elif self.dips:
            text += f", though {_listed(self.dips)} take less than smaller values"
        if self.stopped == "limit":
            text += ", the limit of the search"
        elif self.stopped == "no growth":
            text += "; memory does not grow with the value"
        elif refused:
            text += f"; {min(it.value for it in refused)} does not"
        return f"{text} ({number})"


def _below(found: Largest) -> set[int]:
    return {it.value for it in found.probes if it.value < found.value}


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


class Search:
    """Decides which values to try; each is told to :meth:`add` before the next is asked for.

    Doubling is the most that can be done blindly. Here the first probe's memory says how far is
    safe: memory is fixed + slope * value at least, so a value that took a share of the capacity may
    be divided by that share. Then the line through the largest two that fit says where the capacity
    ends: through what forward and backward passes took, for at small values an optimizer's step
    takes more, which hardly grows. The answer is a value that was seen to fit, beside one that was
    seen not to. Where the first value does not fit, two that are near are tried, and then one that
    is far below: from there it goes up as from a small first value.

    Where an oracle can tell (:class:`~pytest_gpumem.fit.rehearsal.Rehearsal`), that is tried first.

    Args:
        capacity: bytes that a step may reserve.
        start: the first value to try.
        limit: the largest value of interest; None for no limit.
        multiple: only multiples of it are tried.
        oracle: says which value will turn out to be the largest.
    """

    def __init__(
        self,
        capacity: int,
        *,
        start: int = 1,
        limit: int | None = None,
        multiple: int = 1,
        oracle: Oracle | None = None,
    ) -> None:
        self.capacity = capacity
        self.probes: list[Probe] = []
        self._multiple = multiple
        self._limit = None if limit is None else limit // multiple
        first = -(-start // multiple)
        self._first = first if self._limit is None else max(1, min(first, self._limit))
        self._low = 0
        """the largest that fits, as all here in multiples"""
        self._high: int | None = None
        """the smallest above it that does not"""
        self._guided = 0
        self._step = 1
        self._checked = False
        self._oracle = oracle
        self._said: int | None = None
        self._errors = 0
        self._outdated = False
        """whether it was wrong and knows nothing new since"""

    def add(self, probe: Probe) -> None:
        """Take what became of a value."""
        self.probes.append(probe)
        unit = probe.value // self._multiple
        said, self._said = self._said, None
        if said is not None and probe.fits != (probe.value <= said):
            self._errors += 1
            self._outdated = True
        self._outdated &= not probe.fits
        if probe.fits and unit > self._low:
            if self._high is not None and unit > self._high:  # not monotonic: go on above it
                self._high = None
                self._guided = 0
            self._low = unit
        elif not probe.fits and unit > self._low:
            self._high = unit if self._high is None else min(self._high, unit)

    def next(self) -> int | None:
        """Return the value to try; None when the answer is known."""
        unit = self._next()
        return None if unit is None else unit * self._multiple

    def result(self, *, interrupted: bool = False) -> Largest:
        """Return what is known."""
        limited = self._limit is not None and self._low >= self._limit
        stopped: Stop = "memory" if self._high is not None else "limit" if limited else "no growth"
        return Largest(
            self._low * self._multiple,
            self.capacity,
            tuple(self.probes),
            "interrupted" if interrupted else stopped,
        )

    def _next(self) -> int | None:
        if not self.probes:
            return self._first
        if self._high is not None and self._high - self._low <= 1:
            return self._check(self._high)
        limited = self._limit is not None and self._low >= self._limit
        if limited or (self._high is None and self._is_flat()):
            return None
        foretold = self._foretold()
        if foretold is not None:
            return foretold
        if self._high is None:
            return self._further()
        return self._between(self._low, self._high) if self._low else self._down(self._high)

    def _foretold(self) -> int | None:
        """Return the value that is said to be the largest, or the next, which is to be refused."""
        if not self._trusted or self._outdated or self._oracle is None:
            return None
        bounds = [MOST_GROWTH * self._low, self._limit, self._high and self._high - 1]
        most = min(bound for bound in bounds if bound is not None)
        high = None if self._high is None else self._high * self._multiple
        self._said = self._oracle(
            self._low * self._multiple, high, most * self._multiple, self._multiple
        )
        if self._said is None:
            return None
        return max(self._said // self._multiple, self._low + 1)

    @property
    def _trusted(self) -> bool:
        """Whether there is an oracle to ask, now or when it knows more."""
        return self._oracle is not None and self._errors < MOST_ERRORS and self._low > 0

    def _further(self) -> int:
        """Return a larger value, none having been refused."""
        safe, end = self._safe(), self._end("allocated")
        if self._trusted:  # it needs values that fit, to compare
            wanted = safe if safe > self._low + self._low // NEAR else end or 2 * self._low
        else:
            wanted = max(safe, GROWTH * self._low) if end is None else end
        wanted = min(wanted, MOST_GROWTH * self._low)
        if wanted <= self._low:
            wanted = self._low + self._stride()
        return wanted if self._limit is None else min(wanted, self._limit)

    def _between(self, low: int, high: int) -> int:
        """Return a value between one that fits and one that does not."""
        self._guided += 1
        end = self._end("allocated")
        blind = self._guided > GUIDED and self._guided % 2
        if (self._trusted and self._outdated) or blind or end is None:
            return _middle(low, high)
        safe = self._safe()
        if end >= high > safe > low + (high - low) // CLOSE:  # said too much, from far away
            return safe
        for wanted in (end, self._end("reserved")):
            if wanted is not None and low < wanted < high:
                return wanted
        edge = self._end("reserved")
        if end <= low or (edge is not None and edge <= low):  # said a little too little
            return min(low + self._stride(), high - 1)
        if high - low > max(low // CLOSE, 1):
            return _middle(low, high)
        return max(high - self._stride(), low + 1)  # said a little too much

    def _down(self, high: int) -> int:
        """Return a smaller value, where none has fitted; ``high`` is above 1."""
        if high < LEAST_DOWN:
            return _middle(0, high)
        number, first = len(self.probes), max(it.value for it in self.probes) // self._multiple
        if number <= len(DOWN):
            return min(first * DOWN[number - 1], high * DOWN[0]) // 10
        return high // FAR_DOWN

    def _safe(self) -> int:
        """Return how far the largest that fits can be raised if all its memory is in scale."""
        peak = self._points()[-1].peak
        return self._low * self.capacity // max(peak.reserved, 1)

    def _end(self, which: Literal["allocated", "reserved"]) -> int | None:
        """Return the value at which the line through the largest two that fit ends the capacity.

        None where there are not two, or where it never does.
        """
        points = self._points()[-2:]
        if len(points) < 2:  # noqa: PLR2004 - two points
            return None
        values = [it.value // self._multiple for it in points]
        before, after = (getattr(it.passes, which) for it in points)
        if after <= before:
            return None
        end: int = values[1] + (self.capacity - after) * (values[1] - values[0]) // (after - before)
        return end

    def _is_flat(self) -> bool:
        """Return whether the value has nothing to do with memory, as far as was seen."""
        last = [it.passes.allocated for it in self._points()[-FLAT_PROBES:]]
        return len(last) == FLAT_PROBES and last[0] >= last[-1]

    def _stride(self) -> int:
        """Return how far to go beside what the line says: twice as far each time."""
        step, self._step = self._step, 2 * self._step
        return step

    def _points(self) -> list[Probe]:
        """Return the values that fit, in their order."""
        return sorted((it for it in self.probes if it.fits), key=lambda it: it.value)

    def _check(self, high: int) -> int | None:
        """Return one more value above what does not fit: kernels may need less for it.

        None where such a one was seen, and did not fit either, or is far.
        """
        if self._checked or self._low == 0:
            return None
        self._checked = True
        over = [it.value for it in self.probes if it.value > high * self._multiple]
        if any(value % USUAL_MULTIPLE == 0 for value in over):
            return None
        wanted = (high * self._multiple // USUAL_MULTIPLE + 1) * USUAL_MULTIPLE
        unit = -(-wanted // self._multiple)
        far = unit > high + high // FARTHEST
        return None if far or (self._limit is not None and unit > self._limit) else unit


def _middle(low: int, high: int) -> int:
    """Return a value between: of orders of magnitude first, then of numbers."""
    return isqrt(low * high) if 0 < low < high // 4 else (low + high) // 2


@dataclass(frozen=True)
class Line:
    """Memory = fixed + slope * value, by least squares."""

    fixed: Fraction
    """bytes at 0"""
    slope: Fraction
    """bytes more for each one more"""
    residual: Fraction
    """bytes by which the farthest point is off"""

    def at(self, value: int) -> int:
        """Return the bytes at a value, rounded."""
        return round(self.fixed + self.slope * value)


def fit_line(points: Mapping[int, int]) -> Line:
    """Return the line through points, value to bytes; exact where there are two.

    Args:
        points: of two values or more.
    """
    number = len(points)
    mean = Fraction(sum(points), number)
    level = Fraction(sum(points.values()), number)
    spread = sum((value - mean) ** 2 for value in points)
    slope = sum(((v - mean) * (b - level) for v, b in points.items()), Fraction(0)) / spread
    fixed = level - slope * mean
    residual = max(abs(fixed + slope * v - b) for v, b in points.items())
    return Line(fixed, slope, residual)
