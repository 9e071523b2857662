"""Limits of a part's memory relative to another part's: ``at_most="eager + 64MiB"``.

A limit may also be relative to the memory that was held when the part began. Everything here is
pure. Sizes are bytes.
"""

from __future__ import annotations

import re
from contextlib import suppress
from fractions import Fraction
from math import ceil, floor
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.errors import SpecError, is_own_error
from pytest_gpumem.sizes import format_size, parse_size, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

__tracebackhide__ = is_own_error

NAMES: Final = ("at_most", "less_than", "at_least", "more_than")
"""the arguments of ``gpu_memory.measure`` that declare a relation"""
FIGURES: Final = {
    "allocated": "peak allocated",
    "reserved": "peak reserved",
    "active": "peak active",
    "held": "held memory",
}
"""figures that a relation may limit, with their titles in reports"""
BEFORE: Final = "before"
"""name for the memory that was held when the part began"""
_NUMBER: Final = r"[0-9]{1,20}(?:\.[0-9]{1,20})?"
_SIZE: Final = r"(?:\s*(?P<sign>[+-])\s*(?P<size>[0-9][^+*%-]*))?"
_SIGN: Final = r"\s*(<=|<)\s*"
_EXAMPLES: Final = 'write for example {0}="eager + 64MiB", {0}="1.1 * eager", or {0}=1.1, of=eager'


class Relation(NamedTuple):
    """A limit on a part's figure, relative to the same figure of another part, or absolute."""

    name: str
    """one of NAMES"""
    part: str
    """the other part; BEFORE for the memory held when the part began; "" for neither: ``extra``
    alone is the limit"""
    factor: Fraction
    extra: int
    """bytes to add; may be negative"""
    figure: str = "allocated"
    """one of FIGURES"""
    chain: str = ""
    """the order that contains the relation: "leaf < block < whole"; "" if none does"""

    @property
    def members(self) -> list[str]:
        """The parts of the order that contains the relation; [] if none does."""
        return re.split(_SIGN, self.chain)[::2] if self.chain else []

    @property
    def is_lower(self) -> bool:
        """Whether it is a lower limit."""
        return self.name in {"at_least", "more_than"}

    @property
    def is_limit(self) -> bool:
        """Whether it limits a peak from above, as the marker's limits do."""
        return not self.is_lower and self.figure in {"allocated", "reserved"}

    def limit(self, reference: int) -> int:
        """Return the limit (inclusive) if the other part's figure is ``reference`` bytes."""
        exact = self.factor * reference + self.extra
        limit = ceil(exact) if self.is_lower else floor(exact)
        strict = {"less_than": -1, "more_than": 1}.get(self.name, 0)
        return limit + strict * (limit == exact)

    def __str__(self) -> str:
        """Return the relation as it could be declared: ``at_most='1.1 * eager + 64.00 MiB'``."""
        words = self.part if self.factor == 1 else f"{float(self.factor):g} * {self.part}"
        if not self.part:
            words = format_size(self.extra)
        elif self.extra:
            words += f" {'+' if self.extra > 0 else '-'} {format_size(abs(self.extra))}"
        figure = "" if self.figure == "allocated" else f", figure={self.figure!r}"
        return f"{self.name}={words!r}{figure}"


class Bound(NamedTuple):
    """A relation with its limit in bytes and the measured figure, after its part has run."""

    relation: Relation
    nbytes: int
    """the limit, inclusive"""
    measured: int
    """the part's figure on the fullest device"""
    sizes: str = ""
    """the figures of all parts of the relation's order, as text; "" without an order"""

    @property
    def excess(self) -> int:
        """Bytes by which the figure violates the limit; 0 or less if it does not."""
        return (self.nbytes - self.measured) * (1 if self.relation.is_lower else -1)

    def __str__(self) -> str:
        """Return how far the figure is from the limit: "8.00 MiB under at_least='load' (...)"."""
        far = f"{format_size(self.excess)} {'under' if self.relation.is_lower else 'over'}"
        if self.excess == 1 and self.relation.name in {"less_than", "more_than"}:
            far = "as much as"
        return f"{far} {self.relation} ({format_size(self.nbytes)})"


def read_relations(
    declared: Mapping[str, Any], parts: Collection[str], call: str
) -> tuple[tuple[Relation, ...], dict[str, Any]]:
    """Read the relations of a part; return them and the remaining arguments.

    ``call`` begins the call's text in errors: "gpu_memory.measure('graph', ".

    Raises:
        SpecError: a relation is invalid, or names a part that was not measured.
    """
    own = {*NAMES, "of", "figure"}
    remaining = {name: value for name, value in declared.items() if name not in own}
    limits = {name: declared[name] for name in NAMES if declared.get(name) is not None}
    of, figure = declared.get("of"), declared.get("figure")
    for name, value in (("of", of), ("figure", figure)):
        if value is not None and not limits:
            remedy = "write at_most=1.1 as well"
            raise SpecError(f"{call}{name}={shown(value)})", f"{name}= needs a limit", remedy)
    figure = _figure(figure, call)
    references = [*parts, BEFORE]
    reference = None if of is None else _part_name("of", of, references, call)
    relations = [_read(name, limits[name], reference, references, call) for name in limits]
    return tuple(relation._replace(figure=figure) for relation in relations), remaining


def _figure(figure: object, call: str) -> str:
    if figure is None:
        return "allocated"
    if isinstance(figure, str) and figure in FIGURES:
        return figure
    problem = "there is no such figure"
    remedy = f"write one of {', '.join(map(repr, FIGURES))}"
    raise SpecError(f"{call}figure={shown(figure)})", problem, remedy)


def read_order(
    chain: object, figure: object, parts: Collection[str]
) -> Iterator[tuple[str, Relation]]:
    """Parse an order such as "leaf < block <= whole"; yield each relation with its part."""
    call = f"gpu_memory.ordered({shown(chain)}"
    figure = _figure(figure, f"{call}, ")
    names = re.split(_SIGN, chain.strip()) if isinstance(chain, str) else []
    unknown = [name for name in names[::2] if name not in parts]
    if unknown or len(names) < 3:  # noqa: PLR2004 - two parts and a sign
        problem = "this is no order of parts"
        if len(names) > 1:
            problem = f"these are no parts that were measured: {', '.join(map(shown, unknown))}"
        raise SpecError(f"{call})", problem, 'write for example "checkpointed < plain"')
    for less, sign, more in zip(names[::2], names[1::2], names[2::2], strict=False):
        name = "more_than" if sign == "<" else "at_least"
        yield more, Relation(name, less, Fraction(1), 0, figure, " ".join(names))


def _read(
    name: str, value: object, reference: str | None, parts: Collection[str], call: str
) -> Relation:
    call_text = f"{call}{name}={shown(value)})"
    if not isinstance(value, (str, Real)) or isinstance(value, bool):
        return Relation(name, _part_name(name, value, parts, call), Fraction(1), 0)
    if isinstance(value, Real):
        try:
            factor = Fraction(repr(float(value)))  # as the decimal number that Python prints
        except (ValueError, OverflowError):  # NaN or infinite
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
    for part in candidates:  # the longest first, as one part's name may be the start of another's
        relation = _relation_to(name, value.strip(), part)
        if relation is not None:
            return relation if part else relation._replace(part=reference or "")
    if reference is not None:
        problem = "this is neither a share of that part nor a size"
        raise SpecError(call_text, problem, f'write {name}="+ 64MiB"')
    with suppress(SpecError):
        return Relation(name, "", Fraction(0), parse_size(value))
    problem = f"this names no part that was measured before (measured: {_listed(parts)})"
    raise SpecError(call_text, problem, _EXAMPLES.format(name))


def _relation_to(name: str, value: str, part: str) -> Relation | None:
    """Parse a relation to a part; return None if the text is not a relation to it."""
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
    part = value if isinstance(value, str) else getattr(value, "part", None)
    if isinstance(part, str) and part in parts:
        return part
    problem = f"this is not a part that was measured before (measured: {_listed(parts)})"
    remedy = f'write {name}="eager" below: with gpu_memory.measure("eager"): ...'
    raise SpecError(f"{call}{name}={shown(value)})", problem, remedy)


def _listed(parts: Collection[str]) -> str:
    return ", ".join(shown(part) for part in parts if part != BEFORE) or "none"
