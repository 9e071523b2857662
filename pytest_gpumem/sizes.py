"""Sizes and tolerances as text and as numbers; every printed size can be parsed.

"GiB" is 2**30 bytes and "GB" is 10**9 bytes, here and everywhere else in the package. Case does not
matter; the "i" distinguishes them. Arithmetic is exact, and sizes are integer bytes.
"""

from __future__ import annotations

import math
import re
import reprlib
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from pytest_gpumem.errors import SpecError, is_own_error

if TYPE_CHECKING:
    from collections.abc import Sequence

__tracebackhide__ = is_own_error

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30

_UNITS: Final = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 2**40,
}

# Commas only separate groups of three digits: "1,5 GiB" must not be read as 15 GiB. The digits are
# bounded so that no text, however long, makes a number that Python refuses to print.
_SIGNED_NUMBER = r"([+-]?(?:[0-9]{1,3}(?:,[0-9]{3}){1,12}|[0-9]{1,40})(?:\.[0-9]{1,20})?)"
_SIZE = re.compile(_SIGNED_NUMBER + r"\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_PERCENTAGE = re.compile(_SIGNED_NUMBER + r"\s*%", re.ASCII)
_PLACES = 20
# Every part of a tolerance ends in "%" or in a unit; a comma after a digit belongs to a number.
_BETWEEN_PARTS = re.compile(r"(?<=[%a-zA-Z\s]),")
_SUM = re.compile(r"(.*[%a-z])\s*\+\s*([0-9].*)", re.ASCII | re.IGNORECASE)
_HOW_TO_WRITE_A_TOLERANCE = (
    "write '2%', '64MiB', '2%, 64MiB' (the larger of the two), or their sum, '2% + 64MiB'"
)

MAX_SHOWN_LENGTH: Final = 80
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 60


def shown(value: object) -> str:
    """Return ``repr(value)`` for an error message: short, on one line, even if ``repr`` fails."""
    try:
        brief = _BRIEF.repr(value)
    except Exception:  # noqa: BLE001 - a __repr__ may raise anything
        brief = f"<{type(value).__name__}>"
    line = " ".join("".join(c if c.isprintable() else " " for c in brief).split())
    return line if len(line) <= MAX_SHOWN_LENGTH else f"{line[:MAX_SHOWN_LENGTH]}..."


def parse_size(text: str) -> int:
    """Parse a size; round a fraction of a byte half to even.

    Args:
        text: a number and its unit, such as "1.5GiB", "64 MiB", "+512.00 KiB" or "8,519,680 B".

    Raises:
        SpecError: ``text`` is anything else. A number without a unit is an error, not a guess.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        remedy = "write a number and its unit, such as '1.5GiB' or '64 MiB'"
        raise SpecError(shown(text), "this is not a size", remedy)
    number, unit = match.groups()
    if not unit:
        remedy = f"write {shown(number + ' MiB')}, or {shown(number + ' B')} for bytes"
        raise SpecError(shown(text), "this number has no unit", remedy)
    if unit.lower() not in _UNITS:
        remedy = "use B, KiB, MiB, GiB, TiB (steps of 1024) or kB, MB, GB, TB (steps of 1000)"
        raise SpecError(shown(text), f"{shown(unit)} is not a unit of size", remedy)
    return round(_fraction(number) * _UNITS[unit.lower()])


def format_size(nbytes: int, *, signed: bool = False) -> str:
    """Format a size for people: "2978.05 MiB", "512 B", "12.00 GiB".

    The unit is B below 1 KiB, KiB below 1 MiB, MiB below 10 GiB, and GiB above, with two decimals
    rounded half to even. :func:`parse_size` reads all of these, to within that rounding.

    Args:
        nbytes: bytes; negative for a decrease.
        signed: write "+" before a size that is not negative: "+512.00 MiB", "+0 B".
    """
    sign = "-" if nbytes < 0 else "+" if signed else ""
    size = abs(nbytes)
    if size < KIB:
        return f"{sign}{size} B"
    # A float is exact here: the units are powers of two. A size that rounds up to the next unit is
    # written in that unit: not "1024.00 KiB".
    kib, mib = f"{size / KIB:.2f}", f"{size / MIB:.2f}"
    if float(kib) < KIB:
        return f"{sign}{kib} KiB"
    return f"{sign}{mib} MiB" if float(mib) < 10 * KIB else f"{sign}{size / GIB:.2f} GiB"


def gib(value: float) -> int:
    """Convert GiB to bytes, rounded down.

    A float counts as the decimal that Python prints for it: 0.1 is a tenth of a GiB, not the binary
    fraction next to it. NaN and infinity are refused.
    """
    if isinstance(value, int):
        return value * GIB
    if not math.isfinite(value):
        raise SpecError(shown(value), "this is not a finite number", "write a number of GiB")
    return math.floor(Fraction(repr(float(value))) * GIB)


@dataclass(frozen=True)
class Tolerance:
    """How far a measurement may be from its baseline before it counts as changed.

    If there are a relative and an absolute part, the larger allowance applies, as in
    ``pytest.approx``. :func:`parse_tolerance` parses ``str()`` of a tolerance back to an equal one.
    """

    relative: Fraction
    """fraction of the baseline: 2% is ``Fraction(1, 50)``"""
    absolute: int
    """bytes"""
    added: bool = False
    """whether the allowance is the sum of both parts, not the larger one"""

    def allowance(self, baseline: int) -> int:
        """Return the largest difference from ``baseline`` that counts as unchanged, in bytes."""
        part = self.relative  # integers are faster than Fraction, and this is often called
        share = part.numerator * baseline // part.denominator
        return share + self.absolute if self.added else max(share, self.absolute)

    def __str__(self) -> str:
        """Return "2%", "64.00 MiB", "2%, 64.00 MiB" or "2% + 64.00 MiB"."""
        parts = []
        if self.relative or not self.absolute:
            # Print no more decimal places than parsing accepts.
            whole, decimals = divmod(round(self.relative * 100 * 10**_PLACES), 10**_PLACES)
            percentage = f"{whole}.{decimals:0{_PLACES}d}".rstrip("0").rstrip(".")
            parts.append(f"{percentage}%")
        if self.absolute:
            brief = format_size(self.absolute)
            exact = parse_size(brief) == self.absolute
            parts.append(brief if exact else f"{self.absolute:,} B")
        return (" + " if self.added else ", ").join(parts)


def parse_tolerance(value: object) -> Tolerance:
    """Parse a tolerance.

    Args:
        value: a Tolerance; "2%" or "64MiB"; both, in either order: "2%, 64MiB" or a tuple or
            list (the larger applies), "2% + 64MiB" (their sum applies).

    Raises:
        SpecError: ``value`` is anything else, such as a number without a unit, a negative size, or
            two percentages.
    """
    if isinstance(value, Tolerance):
        return value
    relative: Fraction | None = None
    absolute: int | None = None
    pieces: Sequence[object]
    total = _SUM.fullmatch(value.strip()) if isinstance(value, str) else None
    if total is not None:
        pieces = total.groups()
    elif isinstance(value, str):
        pieces = [piece.strip() for piece in _BETWEEN_PARTS.split(value)]
    elif isinstance(value, (tuple, list)) and value:
        pieces = value
    else:
        raise _bad_tolerance(value, "this is not a tolerance")
    for part in pieces:
        amount = _tolerance_part(part, value)
        if amount < 0:
            raise _bad_tolerance(value, f"{shown(part)} is negative")
        if isinstance(amount, Fraction):
            if relative is not None:
                raise _bad_tolerance(value, "this has two percentages")
            relative = amount
        else:
            if absolute is not None:
                raise _bad_tolerance(value, "this has two sizes")
            absolute = amount
    return Tolerance(relative or Fraction(0), absolute or 0, added=total is not None)


def _tolerance_part(part: object, whole: object) -> Fraction | int:
    if isinstance(part, str):
        if match := _PERCENTAGE.fullmatch(part.strip()):
            return _fraction(match[1]) / 100
        try:
            return parse_size(part)
        except SpecError:
            pass
    raise _bad_tolerance(whole, f"{shown(part)} is neither a percentage nor a size with its unit")


def _bad_tolerance(value: object, problem: str) -> SpecError:
    return SpecError(shown(value), problem, _HOW_TO_WRITE_A_TOLERANCE)


def _fraction(number: str) -> Fraction:
    return Fraction(number.replace(",", ""))


def duration(seconds: float) -> str:
    """Format a duration, rounded: "45 s", "12 min", "2 h"."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * unit:
            return f"{round(seconds / unit)} {name}"
    return f"{max(round(seconds), 1)} s"
