"""Fit the line fixed + per sample * size to measured memory; find source lines off the line.

Everything here is pure. Sizes are numbers of samples (or of anything), memory is bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from pytest_gpumem.fit.search import fit_line
from pytest_gpumem.measurement import Slope
from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.fit.search import MemoryLine
    from pytest_gpumem.measurement import Breakdown, Peak

EVEN: Final = Fraction(1, 100)
"""allowed distance of a point from the line, as a fraction of the growth"""
EVEN_BYTES: Final = 2 * MIB
"""the same limit in bytes; the larger limit applies, as PyTorch's allocator rounds every block"""
NOTEWORTHY: Final = Fraction(1, 10)
"""A source line is named if its memory deviates from linear growth by at least this fraction of the
largest deviation."""
MAX_NAMED: Final = 3
"""maximum number of source lines that are named"""


@dataclass(frozen=True)
class Prediction:
    """The line's value at a size, and a measurement at that size."""

    size: int
    predicted: int
    """bytes allocated"""
    measured: int | None
    """bytes allocated; None if the size does not fit"""

    @property
    def error(self) -> float | None:
        """The prediction's error relative to the measurement."""
        if self.measured is None:
            return None
        return (self.predicted - self.measured) / self.measured


@dataclass(frozen=True)
class Scaling:
    """A step's memory as a function of its size."""

    points: tuple[tuple[int, Peak], ...]
    """sizes, ascending, with their peaks"""
    allocated: MemoryLine
    """the line fitted to peak allocated"""
    reserved: MemoryLine
    """the line fitted to peak reserved, which grows by whole segments"""
    uneven: tuple[str, ...] = ()
    """sentences on the source lines whose memory is least linear in the size, worst first"""
    prediction: Prediction | None = None

    @classmethod
    def of(cls, points: Mapping[int, Peak]) -> Scaling:
        """Fit the lines to two or more points."""
        ordered = tuple(sorted(points.items()))
        return cls(
            ordered,
            fit_line({size: peak.allocated for size, peak in ordered}),
            fit_line({size: peak.reserved for size, peak in ordered}),
        )

    @property
    def fixed(self) -> int:
        """Bytes allocated at size 0, according to the line."""
        return round(self.allocated.fixed)

    @property
    def per_sample(self) -> int:
        """Bytes allocated per unit of size."""
        return round(self.allocated.slope)

    @property
    def residual(self) -> int:
        """Largest distance of a point from the line of allocated memory, in bytes."""
        return round(self.allocated.residual)

    @property
    def slope(self) -> Slope:
        """The figures that a baseline stores."""
        return Slope(tuple(size for size, _ in self.points), self.fixed, self.per_sample)

    def at(self, size: int) -> int:
        """Return the line's allocated bytes at a size."""
        return self.allocated.at(size)

    def named(self, uneven: tuple[str, ...]) -> Scaling:
        """Return a copy with sentences on the source lines whose memory is not linear."""
        return replace(self, uneven=uneven)

    def predicted(self, prediction: Prediction) -> Scaling:
        """Return a copy with a checked prediction."""
        return replace(self, prediction=prediction)

    def __str__(self) -> str:
        sizes = ", ".join(str(size) for size, _ in self.points)
        sentence = (
            f"{format_size(self.fixed)} and {format_size(self.per_sample)} a sample allocated, "
            f"at most {format_size(self.residual)} off at {sizes}"
        )
        if self.uneven:
            sentence += f"; not in proportion: {'; '.join(self.uneven)}"
        if self.prediction is not None:
            size, predicted = self.prediction.size, format_size(self.prediction.predicted)
            measured, error = self.prediction.measured, self.prediction.error
            sentence += f"; predicted {predicted} at {size}"
            if measured is None or error is None:
                sentence += ", which does not fit"
            else:
                sentence += f", it took {format_size(measured)} ({100 * error:+.2f}%)"
        return sentence


def grows_evenly(scaling: Scaling) -> bool:
    """Return whether the measured points lie on the line, apart from the allocator's rounding.

    Two points always do.
    """
    (_, smallest), (_, largest) = scaling.points[0], scaling.points[-1]
    grown = max(largest.allocated - smallest.allocated, 0)
    return scaling.allocated.residual <= max(EVEN * grown, Fraction(EVEN_BYTES))


def uneven(breakdowns: Mapping[int, Breakdown]) -> tuple[str, ...]:
    """Return sentences on the source lines whose memory is least linear in the size, worst first.

    There are none with fewer than three sizes.
    """
    sites = {}
    amounts: dict[int, Counter[tuple[str, int, str]]] = {size: Counter() for size in breakdowns}
    for size, breakdown in breakdowns.items():
        for site in breakdown.sites:
            key = site.path, site.line, site.category
            sites[key] = site
            amounts[size][key] += site.nbytes
    misfits = []
    for key, site in sites.items():
        points = {size: nbytes[key] for size, nbytes in amounts.items()}
        if len(points) > 2:  # noqa: PLR2004 - two points are always on a line
            misfits.append((fit_line(points).residual, site, points))
    misfits.sort(key=lambda misfit: -misfit[0])
    worst = misfits[0][0] if misfits else Fraction(0)
    sentences = []
    for residual, site, points in misfits[:MAX_NAMED]:
        if residual and residual >= NOTEWORTHY * worst:
            texts = (f"{format_size(points[size])} at {size}" for size in sorted(points))
            place = f"{site.path}:{site.line} ({site.function})"
            sentences.append(f"{place}, {site.category}: {', '.join(texts)}")
    return tuple(sentences)
