"""Memory as fixed + per sample * size: the line through measurements, and what is not on it.

Everything here is pure. Sizes are numbers of samples (or of anything), memory is bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from pytest_gpumem.fit.search import fit_line
from pytest_gpumem.measurement import Slope
from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.fit.search import Line
    from pytest_gpumem.measurement import Breakdown, Peak

EVEN: Final = Fraction(1, 100)
"""part of the growth that the line may miss before it is said not to be one"""
EVEN_BYTES: Final = 2 * MIB
"""or so many bytes: PyTorch's allocator rounds every block"""
NOTEWORTHY: Final = Fraction(1, 10)
"""part of the largest misfit that another line of source has to have to be named as well"""
MOST_NAMED: Final = 3


@dataclass(frozen=True)
class Prediction:
    """What the line says of a size, and what a run of it took."""

    size: int
    predicted: int
    """bytes allocated"""
    measured: int | None
    """bytes allocated; None: it does not fit"""

    @property
    def error(self) -> float | None:
        """How far off the prediction is, as a part of what was measured."""
        if self.measured is None:
            return None
        return (self.predicted - self.measured) / self.measured


@dataclass(frozen=True)
class Scaling:
    """How a step's memory grows."""

    points: tuple[tuple[int, Peak], ...]
    """sizes, in their order, and what they take"""
    allocated: Line
    """through peak allocated"""
    reserved: Line
    """through peak reserved, which grows by whole segments"""
    uneven: tuple[str, ...] = ()
    """what does not grow in proportion, the worst first"""
    prediction: Prediction | None = None

    @classmethod
    def of(cls, points: Mapping[int, Peak]) -> Scaling:
        """Return the lines through two points or more."""
        ordered = tuple(sorted(points.items()))
        return cls(
            ordered,
            fit_line({size: peak.allocated for size, peak in ordered}),
            fit_line({size: peak.reserved for size, peak in ordered}),
        )

    @property
    def fixed(self) -> int:
        """Bytes allocated, whatever the size."""
        return round(self.allocated.fixed)

    @property
    def per_sample(self) -> int:
        """Bytes allocated more for each one more."""
        return round(self.allocated.slope)

    @property
    def residual(self) -> int:
        """Bytes by which the farthest point is off the line of allocated."""
        return round(self.allocated.residual)

    @property
    def slope(self) -> Slope:
        """What of it a baseline keeps."""
        return Slope(tuple(size for size, _ in self.points), self.fixed, self.per_sample)

    def at(self, size: int) -> int:
        """Return the bytes that the line says are allocated at a size."""
        return self.allocated.at(size)

    def named(self, uneven: tuple[str, ...]) -> Scaling:
        """Return this with what does not grow in proportion."""
        return replace(self, uneven=uneven)

    def predicted(self, prediction: Prediction) -> Scaling:
        """Return this with a prediction that was checked."""
        return replace(self, prediction=prediction)

    def __str__(self) -> str:
        """Return it in one sentence."""
        sizes = ", ".join(str(size) for size, _ in self.points)
        text = (
            f"{format_size(self.fixed)} and {format_size(self.per_sample)} a sample allocated, "
            f"at most {format_size(self.residual)} off at {sizes}"
        )
        if self.uneven:
            text += f"; not in proportion: {'; '.join(self.uneven)}"
        if self.prediction is not None:
            text += f"; {_checked(self.prediction)}"
        return text


def _checked(found: Prediction) -> str:
    text = f"predicted {format_size(found.predicted)} at {found.size}"
    if found.measured is None or found.error is None:
        return f"{text}, which does not fit"
    return f"{text}, it took {format_size(found.measured)} ({100 * found.error:+.2f}%)"


def grows_evenly(scaling: Scaling) -> bool:
    """Return whether the measured points lie on the line, as far as an allocator's rounding goes.

    Two points always do.
    """
    (_, least), (_, most) = scaling.points[0], scaling.points[-1]
    grown = max(most.allocated - least.allocated, 0)
    return scaling.allocated.residual <= max(EVEN * grown, Fraction(EVEN_BYTES))


def uneven(breakdowns: Mapping[int, Breakdown]) -> tuple[str, ...]:
    """Return the source lines whose memory is not on a line, the worst first.

    Args:
        breakdowns: what the peak consists of, by size; of three sizes or more to say anything.
    """
    keys = {
        (site.path, site.line, site.category): site
        for breakdown in breakdowns.values()
        for site in breakdown.sites
    }
    misfits = []
    for key, site in keys.items():
        points = {
            size: sum(it.nbytes for it in one.sites if (it.path, it.line, it.category) == key)
            for size, one in breakdowns.items()
        }
        if len(points) > 2:  # noqa: PLR2004 - through two points goes a line
            misfits.append((fit_line(points).residual, site, points))
    misfits.sort(key=lambda it: -it[0])
    worst = misfits[0][0] if misfits else Fraction(0)
    return tuple(
        f"{site.path}:{site.line} ({site.function}), {site.category}: {_sizes(points)}"
        for residual, site, points in misfits[:MOST_NAMED]
        if residual and residual >= NOTEWORTHY * worst
    )


def _sizes(points: Mapping[int, int]) -> str:
    return ", ".join(f"{format_size(nbytes)} at {size}" for size, nbytes in sorted(points.items()))
