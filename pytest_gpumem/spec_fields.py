"""Parsing the values of the marker's arguments; every mistake raises a SpecError.

An error's ``given`` is only the argument's name; :mod:`pytest_gpumem.spec` replaces it by the call.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from fractions import Fraction
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Final, Literal, SupportsFloat, SupportsIndex, cast

from pytest_gpumem.errors import SpecError, is_own_error
from pytest_gpumem.sizes import GIB, Tolerance, gib, parse_size, parse_tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__tracebackhide__ = is_own_error

MAX_GIB: Final = 10**9
_MAX_LEAK_MIB: Final = 10**12
MAX_BATCH: Final = 10**9
MAX_SIZES: Final = 1000
"""maximum number of batch sizes of one test, which runs once with each"""
MAX_RANKS: Final = 1_000_000
"""maximum world size"""
MAX_TOKENS: Final = 10**12
_VALUES: Final = "auto", "full", "off"


def read_budget(name: str, value: object) -> float:
    """Return a limit in GiB; refuse all but plain numbers above 0."""
    number = _number(value)
    if number is None:
        raise SpecError(
            name, f"{name} must be a plain number of GiB", f"write {name}={_plain_gib(value)}"
        )
    if not number > 0:
        remedy = f"write {name}=8 for 8 GiB, or leave out {name} for no limit"
        raise SpecError(name, f"{name} must be a number above 0", remedy)
    if number > MAX_GIB:
        remedy = f"write GiB, not bytes: {name}=8; or leave out {name} for no limit"
        raise SpecError(name, f"{name} is more than {MAX_GIB:,} GiB", remedy)
    if gib(number) == 0:
        raise SpecError(name, f"{name} is less than one byte", f"write GiB: {name}=0.5")
    return number


def _plain_gib(value: object) -> str:
    """Return the number to suggest for ``value``: "12" for "12GiB", "8" if unclear."""
    if isinstance(value, str):
        for size in (value, f"{value}GiB"):
            try:
                meant = Fraction(parse_size(size), GIB)
            except SpecError:
                continue
            if 0 < meant <= MAX_GIB:
                return str(meant) if meant.denominator == 1 else repr(float(meant))
    return "8"


def read_whole_number(name: str, value: object, *, least: int, largest: int) -> int:
    """Return a whole number; refuse one outside the bounds, and anything else."""
    number = _integer(value)
    if number is None or not least <= number <= largest:
        remedy = f"write for example {name}={max(least, 1)}"
        raise SpecError(name, f"{name} must be a whole number from {least} to {largest:,}", remedy)
    return number


def read_batch_sizes(name: str, value: object) -> tuple[int, ...]:
    """Check batch sizes, and return them in ascending order."""
    sizes: list[object] = []
    if not isinstance(value, (str, bytes)):
        with suppress(TypeError):
            sizes = list(islice(cast("Iterable[object]", value), MAX_SIZES + 1))
    numbers = {
        number for number in map(_integer, sizes) if number is not None and 1 <= number <= MAX_BATCH
    }
    if len(sizes) > MAX_SIZES:  # it may be range(10**9), or endless
        problem = f"{name} has more than {MAX_SIZES} sizes, and the test runs once for each size"
        raise SpecError(name, problem, f"write for example {name}=[8, 16, 32]")
    if len(numbers) < 2 or len(numbers) < len(sizes):  # noqa: PLR2004 - a line has two points
        problem = f"{name} must be a list of two or more different whole numbers above 0"
        raise SpecError(name, problem, f"write for example {name}=[8, 16, 32]")
    return tuple(sorted(numbers))


def read_mib(name: str, value: object) -> float:
    """Return a limit in MiB; refuse all but numbers above 0."""
    number = _number(value)
    if number is None or not 0 < number <= MAX_GIB:
        raise SpecError(
            name, f"{name} must be a number of MiB above 0", f"write for example {name}=120"
        )
    return number


def read_variants(name: str, value: object) -> dict[str, dict[str, object]]:
    """Check variants, and return each variant's dict of switches by name."""
    example = f'write for example {name}={{"amp": {{"amp": True}}}}'
    if not isinstance(value, dict) or not all(
        isinstance(key, str) and key.strip() for key in value
    ):
        raise SpecError(name, f"{name} must be a dict from names to switches", example)
    variants = {}
    for key, options in value.items():
        if isinstance(options, dict) and all(isinstance(option, str) for option in options):
            variants[key] = dict(options)
        elif options is True:
            variants[key] = {key: True}
        else:
            problem = f"the switches of {name}[{key!r}] must be True or a dict with text keys"
            raise SpecError(name, problem, example)
    return variants


def read_tolerance(_name: str, value: object) -> Tolerance:
    """Parse a tolerance."""
    return parse_tolerance(value)


def read_flag(name: str, value: object, *, meaning: str) -> bool:
    """Return a boolean; ``meaning`` is what the remedy suggests for anything else."""
    if not isinstance(value, bool):
        raise SpecError(name, f"{name} must be True or False", f"write {name}={meaning}")
    return value


def read_mib_or_zero(name: str, value: object) -> float:
    """Return a limit in MiB; refuse all but numbers from 0 on."""
    number = _number(value)
    if number is None or not 0 <= number <= _MAX_LEAK_MIB:
        remedy = f"write {name}=0 if the test must free all its memory"
        raise SpecError(name, f"{name} must be a plain number of MiB, 0 or more", remedy)
    return number


def read_values(name: str, value: object) -> Literal["auto", "full", "off"]:
    """Return which values a virtual GPU computes: "auto", "full" or "off"."""
    if isinstance(value, str):  # == of another type may do anything, as an array's does
        for choice in _VALUES:
            if str.__str__(value) == choice:
                return choice
    remedy = f'write {name}="full" to compute all values on a virtual GPU'
    raise SpecError(name, f"{name} is one of auto, full and off", remedy)


def read_card(
    name: str, value: object, *, find_card: Callable[[str], str]
) -> str | tuple[str, ...]:
    """Return the canonical name of a card, or of several."""
    if isinstance(value, str):
        return find_card(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(card, str) for card in value):
        return tuple(dict.fromkeys(map(find_card, value)))
    remedy = f"write {name}='T4' or {name}=['T4', 'L4']"
    raise SpecError(name, f"{name} must be a card's name, as text, or a list of them", remedy)


def read_ranks(name: str, value: object) -> str | tuple[int, ...]:
    """Return "all", or the ranks of a list in ascending order."""
    if isinstance(value, str) and str.__str__(value) == "all":
        return "all"
    ranks: list[int | None] = []
    if isinstance(value, (list, tuple, range)):
        ranks = [_integer(rank) for rank in islice(value, MAX_RANKS + 1)]
    if len(ranks) > MAX_RANKS:  # it may be range(10**9)
        ranks.clear()
    valid = {rank for rank in ranks if rank is not None and rank >= 0}
    if not valid or len(valid) < len(ranks):
        remedy = f'write {name}="all" or {name}=[0, 7]'
        raise SpecError(name, f'{name} must be "all", or a list of different ranks from 0', remedy)
    return tuple(sorted(valid))


def _integer(value: object) -> int | None:
    """Convert any integer, including numpy's, to int; return None for all else, including bool."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(cast("SupportsIndex", value))
    except Exception:  # noqa: BLE001 - an __index__ may raise anything
        return None


def _number(value: object) -> float | None:
    """Convert any real number, including numpy's, to int or float; else None, also for bool."""
    integer = _integer(value)
    if integer is not None or isinstance(value, bool) or not isinstance(value, Real):
        return integer
    try:
        return float(cast("SupportsFloat", value))
    except Exception:  # noqa: BLE001 - a __float__ may raise anything
        return None
