"""Limits of a part that are told by another part: ``at_most="eager + 64MiB"``.

Everything here is pure. Sizes are bytes of peak allocated.
"""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.errors import SpecError, is_own_error
from pytest_gpumem.sizes import format_size, parse_size, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__tracebackhide__ = is_own_error

NAMES: Final = ("at_most", "less_than")
"""the arguments of ``gpu_memory.measure`` that make a relation"""
_NUMBER: Final = r"[0-9]{1,20}(?:\.[0-9]{1,20})?"
_SIZE: Final = r"(?:\s*(?P<sign>[+-])\s*(?P<size>[0-9][^+*%-]*))?"
_EXAMPLES: Final = 'write for example {0}="eager + 64MiB", {0}="1.1 * eager", or {0}=1.1, of=eager'


class Relation(NamedTuple):
    """A limit on a part's peak allocated, told by that of another part."""

    name: str
    """"at_most" or "less_than" """
    part: str
    """the other part"""
    factor: Fraction
    extra: int
    """bytes; negative: fewer than the other part"""

    def limit(self, peak: int) -> int:
        """Return the limit where the other part's peak is so many bytes; at it is within."""
        limit = self.factor.numerator * peak // self.factor.denominator + self.extra
        whole = self.factor * peak == limit - self.extra
        return limit - 1 if self.name == "less_than" and whole else limit

    def __str__(self) -> str:
        """Return it as it can be declared: ``at_most='1.1 * eager + 64.00 MiB'``."""
        words = self.part if self.factor == 1 else f"{float(self.factor):g} * {self.part}"
        if self.extra:
            words += f" {'+' if self.extra > 0 else '-'} {format_size(abs(self.extra))}"
        return f"{self.name}={words!r}"


def read_relations(
    declared: Mapping[str, Any], parts: Collection[str], call: str
) -> tuple[tuple[Relation, ...], dict[str, Any]]:
    """Return the relations of a part, and its remaining arguments.

    Args:
        declared: the arguments of ``gpu_memory.measure`` after the name.
        parts: the names of the parts that were measured before.
        call: the beginning of the call's text, for errors: "gpu_memory.measure('graph', ".

    Raises:
        SpecError: a relation that cannot be understood, or to a part that was not measured.
    """
    remaining = {name: value for name, value in declared.items() if name not in {*NAMES, "of"}}
    limits = {name: declared[name] for name in NAMES if declared.get(name) is not None}
    of = declared.get("of")
    if of is not None and not limits:
        raise SpecError(
            f"{call}of={shown(of)})",
            "of= needs a limit that refers to that part",
            "write at_most=1.1 as well",
        )
    reference = None if of is None else _part_name("of", of, parts, call)
    return tuple(_read(name, limits[name], reference, parts, call) for name in limits), remaining


def _read(
    name: str, value: object, reference: str | None, parts: Collection[str], call: str
) -> Relation:
    call_text = f"{call}{name}={shown(value)})"
    if not isinstance(value, (str, Real)) or isinstance(value, bool):
        return Relation(name, _part_name(name, value, parts, call), Fraction(1), 0)
    if isinstance(value, Real):
        try:
            factor = Fraction(repr(float(value)))  # the decimal that Python prints
        except (ValueError, OverflowError):  # no number, or infinite
            factor = Fraction(0)
        if reference is None or factor <= 0:
            problem = (
                "this number names no part to compare with"
                if factor > 0
                else f"{name} must be a number above 0"
            )
            raise SpecError(call_text, problem, _EXAMPLES.format(name))
        return Relation(name, reference, factor, 0)
    candidates = sorted(parts, key=len, reverse=True) if reference is None else [""]
    for part in candidates:  # the longest name first: it may begin with another one's
        relation = _relation_to(name, value.strip(), part)
        if relation is not None:
            return relation if part else relation._replace(part=reference or "")
    if reference is not None:
        raise SpecError(
            call_text, "this is neither a share of that part nor a size", f'write {name}="+ 64MiB"'
        )
    raise SpecError(
        call_text,
        (
            "this names no part that was measured before (measured: "
            f"{', '.join(map(shown, parts)) or 'none'})"
        ),
        _EXAMPLES.format(name),
    )


def _relation_to(name: str, value: str, part: str) -> Relation | None:
    """Return the relation to one part; None where the text is none of it."""
    word = re.escape(part)
    pattern = (
        rf"(?:(?P<before>{_NUMBER})\s*\*\s*|(?P<percent>{_NUMBER})\s*%(?:\s*of\s+)?)?"
        rf"{word}(?:\s*\*\s*(?P<after>{_NUMBER}))?{_SIZE}"
    )
    match = re.fullmatch(pattern, value)
    if match is None or ((match["before"] or match["percent"]) and match["after"]):
        return None
    factor = Fraction(match["before"] or match["after"] or 1)
    if match["percent"]:
        factor = Fraction(match["percent"]) / 100
    extra = 0
    if match["size"]:
        try:
            extra = parse_size(match["size"])
        except SpecError:
            return None
    if not value or not factor:
        return None
    return Relation(name, part, factor, -extra if match["sign"] == "-" else extra)


def _part_name(name: str, value: object, parts: Collection[str], call: str) -> str:
    """Return the name of a part that is given by its name or its figures."""
    part = value if isinstance(value, str) else getattr(value, "part", None)
    if isinstance(part, str) and part in parts:
        return part
    raise SpecError(
        f"{call}{name}={shown(value)})",
        (
            "this is not a part that was measured before (measured: "
            f"{', '.join(map(shown, parts)) or 'none'})"
        ),
        f'write {name}="eager" below: with gpu_memory.measure("eager"): ...',
    )
