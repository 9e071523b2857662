"""From the arguments of ``@pytest.mark.gpu_memory`` to a frozen MemorySpec, by one door.

What is behind this door may rely on its values; every mistake ends here, as a SpecError that shows
the marker and says what to write instead.
"""

from __future__ import annotations

import difflib
import math
import operator
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, SupportsFloat, SupportsIndex, cast

from pytest_gpumem.errors import SpecError
from pytest_gpumem.sizes import GIB, MIB, Tolerance, gib, parse_size, parse_tolerance, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Reader = Callable[[str, object], object]

_MOST_GIB: Final = 10**9
_MOST_LEAK_MIB: Final = 10**12
_MOST_DEVICES: Final = 16
_MOST_WARMUP: Final = 1000
_MOST_BATCH: Final = 10**9
_MOST_RANKS: Final = 10**6
_LONGEST_NAME: Final = 60


@dataclass(frozen=True)
class MemorySpec:
    """What a test declares about its GPU memory.

    Made by :func:`spec_from_marks` and :func:`spec_from_call`, which check the values; the class
    itself does not.
    """

    max_gib: int | float | None = None
    """the step fits on a device with this much memory, in GiB: enforced while it runs"""
    max_allocated_gib: int | float | None = None
    """limit of the peak allocated memory, in GiB"""
    max_reserved_gib: int | float | None = None
    """limit of the peak reserved memory, in GiB"""
    card: str | None = None
    """canonical name of the card whose memory the step must fit in"""
    batch_size: int | None = None
    """number of samples in the step's batch"""
    tolerance: Tolerance | None = None
    """how far from its baseline is no change (None: the session's default)"""
    baseline: bool = True
    """whether the measurement is held against a baseline"""
    devices: int = 1
    """number of GPUs that the step runs on"""
    warmup: int = 0
    """how many times the step is run before, unmeasured"""
    world_size: int | None = None
    """number of ranks of the distributed run that the test is one of; None: of none"""
    rank: int | None = None
    """which of them; None exactly where world_size is"""
    max_leak_mib: int | float | None = None
    """how much more than before may be held once the test is torn down, in MiB"""
    steady: bool = False
    """whether what is allocated after each step has to stop growing"""

    @property
    def max_bytes(self) -> int | None:
        """``max_gib`` in bytes."""
        return None if self.max_gib is None else gib(self.max_gib)

    @property
    def max_allocated_bytes(self) -> int | None:
        """``max_allocated_gib`` in bytes."""
        return None if self.max_allocated_gib is None else gib(self.max_allocated_gib)

    @property
    def max_reserved_bytes(self) -> int | None:
        """``max_reserved_gib`` in bytes."""
        return None if self.max_reserved_gib is None else gib(self.max_reserved_gib)

    @property
    def max_leak_bytes(self) -> int | None:
        """``max_leak_mib`` in bytes."""
        limit = self.max_leak_mib
        return None if limit is None else math.floor(Fraction(repr(limit)) * MIB)


_DEFAULTS: Final = {field.name: field.default for field in fields(MemorySpec)}


def spec_from_marks(
    marks: Iterable[tuple[tuple[object, ...], Mapping[str, object]]],
    *,
    find_card: Callable[[str], str],
) -> MemorySpec:
    """Return what a test's markers declare together.

    They are merged field by field: the nearest marker that gives a field wins, and where it gives
    None, the field is back at its default whatever outer markers say. Overridden values are checked
    like the others.

    Args:
        marks: positional and named arguments of each marker, nearest first, in the order of
            ``Node.iter_markers``.
        find_card: returns a card's canonical name; raises SpecError for one that nobody knows.

    Raises:
        SpecError: the first mistake found.
    """
    readers: dict[str, Reader] = {**_READERS, "card": partial(_read_card, find_card=find_card)}
    merged: dict[str, Any] = {}
    for args, kwargs in marks:
        if args:
            raise _positional(args)
        for name, value in _read_all(kwargs, readers, "@pytest.mark.gpu_memory(").items():
            merged.setdefault(name, value)
    return _one_rank(MemorySpec(**merged))


def _one_rank(spec: MemorySpec) -> MemorySpec:
    """Return a spec whose rank is one of its world's, and the first where none is given."""
    size, rank = spec.world_size, spec.rank
    if size is None and rank is None:
        return spec
    given = ", ".join(
        f"{name}={value}"
        for name, value in (("devices", spec.devices), ("world_size", size), ("rank", rank))
        if value not in {None, _DEFAULTS[name]}
    )
    given = f"@pytest.mark.gpu_memory({given})"
    if size is None:
        raise SpecError(
            given, "rank is one of world_size ranks", f"write world_size={rank + 1 if rank else 8}"
        )
    if spec.devices > 1:
        raise SpecError(
            given,
            "a rank runs on one device, and there is one rank in a test's process",
            "leave out devices, or world_size",
        )
    if rank is not None and rank >= size:
        raise SpecError(
            given, f"rank must be below world_size ({size})", f"write for example rank={size - 1}"
        )
    return replace(spec, rank=rank or 0)


def spec_from_call(name: object, kwargs: Mapping[str, object], base: MemorySpec) -> MemorySpec:
    """Return what ``gpu_memory.measure(name, **kwargs)`` declares about one part of a test.

    A part has the test's devices and rank and, unless it says otherwise, its tolerance, batch size
    and baseline, but none of its budgets: those hold for the whole test. It has no warmup of its
    own.

    Args:
        name: the part's name: text that is not blank.
        kwargs: of the marker's arguments max_gib, max_allocated_gib, max_reserved_gib, batch_size,
            tolerance and baseline.
        base: what the whole test declares.

    Raises:
        SpecError: the first mistake found.
    """
    if not isinstance(name, str) or not name.strip():
        given = f"gpu_memory.measure({shown(name)})"
        raise SpecError(
            given,
            "a part of a test needs a name, as text",
            "write gpu_memory.measure('forward')",
        )
    inherited: dict[str, Any] = {
        "tolerance": base.tolerance,
        "batch_size": base.batch_size,
        "baseline": base.baseline,
        "devices": base.devices,
        "world_size": base.world_size,
        "rank": base.rank,
    }
    own = _read_all(kwargs, _PART_READERS, f"gpu_memory.measure({shown(name)}, ")
    return MemorySpec(**{**inherited, **own})


def _read_all(
    kwargs: Mapping[str, object], readers: Mapping[str, Reader], call: str
) -> dict[str, Any]:
    """Return the checked values of one call. Errors show it; ``call`` is how its text begins."""
    others = ", ..." if len(kwargs) > 1 else ""

    def read(name: str, value: object) -> object:
        try:
            _check_name(name, readers)
            return _DEFAULTS[name] if value is None else readers[name](name, value)
        except SpecError as error:
            given = f"{call}{_brief(name)}={shown(value)}{others})"
            raise SpecError(given, error.problem, error.remedy) from None

    return {name: read(name, value) for name, value in kwargs.items()}


def _check_name(name: str, readers: Mapping[str, Reader]) -> None:
    if name in readers:
        return
    if name in _DEFAULTS:
        raise SpecError(
            name,
            f"{name} holds for the whole test, not for a part of it",
            f"put {name} on the test, in @pytest.mark.gpu_memory(...)",
        )
    close = difflib.get_close_matches(name[:_LONGEST_NAME].lower(), readers, n=1)
    if not close:
        remedy = f"it may be one of {', '.join(readers)}"
    elif close[0].endswith("_gib"):
        remedy = f"write {close[0]}, which is in GiB (2**30 bytes)"
    else:
        remedy = f"write {close[0]}"
    raise SpecError(name, f"there is no argument named {_brief(name)}", remedy)


def _positional(args: tuple[object, ...]) -> SpecError:
    others = ", ..." if len(args) > 1 else ""
    example = f"card={shown(args[0])}" if isinstance(args[0], str) else "max_gib=8"
    return SpecError(
        f"@pytest.mark.gpu_memory({shown(args[0])}{others})",
        "the marker takes named arguments only",
        f"name each argument, for example {example}",
    )


def _read_budget(name: str, value: object) -> float:
    number = _number(value)
    if number is None:
        raise SpecError(
            name, f"{name} must be a plain number of GiB", f"write {name}={_plain_gib(value)}"
        )
    if not number > 0:
        raise SpecError(
            name,
            f"{name} must be a number above 0",
            f"write {name}=8 for 8 GiB, or leave it out for no limit",
        )
    if number > _MOST_GIB:
        raise SpecError(
            name,
            f"{name} is more than {_MOST_GIB:,} GiB",
            f"give it in GiB, not in bytes: {name}=8; or leave it out for no limit",
        )
    if gib(number) == 0:
        raise SpecError(name, f"{name} is less than one byte", f"give it in GiB: {name}=0.5")
    return number


def _read_leak(name: str, value: object) -> float:
    number = _number(value)
    if number is None or not 0 <= number <= _MOST_LEAK_MIB:
        raise SpecError(
            name,
            f"{name} must be a plain number of MiB, 0 or more",
            f"write {name}=0 for a test that must leave nothing behind",
        )
    return number


def _plain_gib(value: object) -> str:
    """Return the number to write for ``value``: "12" for "12GiB", "8" where that is not clear."""
    if isinstance(value, str):
        for text in (value, f"{value}GiB"):
            try:
                meant = Fraction(parse_size(text), GIB)
            except SpecError:
                continue
            if 0 < meant <= _MOST_GIB:
                return str(meant) if meant.denominator == 1 else repr(float(meant))
    return "8"


def _read_whole_number(name: str, value: object, *, least: int, most: int) -> int:
    number = _integer(value)
    if number is None or not least <= number <= most:
        raise SpecError(
            name,
            f"{name} must be a whole number from {least} to {most:,}",
            f"write for example {name}={max(least, 1)}",
        )
    return number


def _read_tolerance(_name: str, value: object) -> Tolerance:
    return parse_tolerance(value)


def _read_baseline(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SpecError(
            name, f"{name} must be True or False", f"write {name}=False to hold it against none"
        )
    return value


def _read_steady(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SpecError(
            name,
            f"{name} must be True or False",
            f"write {name}=True if what is allocated after each step must stop growing",
        )
    return value


def _read_card(name: str, value: object, *, find_card: Callable[[str], str]) -> str:
    if not isinstance(value, str):
        raise SpecError(name, f"{name} must be a card's name, as text", f"write {name}='T4'")
    return find_card(value)


def _integer(value: object) -> int | None:
    """Return an int for what is one to Python, numpy's included; None for all else, a bool too."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(cast("SupportsIndex", value))
    except Exception:  # noqa: BLE001 - __index__ of any object may raise anything
        return None


def _number(value: object) -> float | None:
    """Return an int or float for a real number, numpy's included; None for all else, a bool too."""
    integer = _integer(value)
    if integer is not None or isinstance(value, bool) or not isinstance(value, Real):
        return integer
    try:
        return float(cast("SupportsFloat", value))
    except Exception:  # noqa: BLE001 - so may __float__
        return None


def _brief(name: str) -> str:
    """Return an argument's name as it was written, or cut short where nobody wrote it by hand."""
    return name if name.isidentifier() and len(name) <= _LONGEST_NAME else shown(name)


_PART_READERS: Final[Mapping[str, Reader]] = {
    "max_gib": _read_budget,
    "max_allocated_gib": _read_budget,
    "max_reserved_gib": _read_budget,
    "batch_size": partial(_read_whole_number, least=1, most=_MOST_BATCH),
    "tolerance": _read_tolerance,
    "baseline": _read_baseline,
}
_READERS: Final[Mapping[str, Reader]] = {
    **_PART_READERS,
    "devices": partial(_read_whole_number, least=1, most=_MOST_DEVICES),
    "warmup": partial(_read_whole_number, least=0, most=_MOST_WARMUP),
    "world_size": partial(_read_whole_number, least=1, most=_MOST_RANKS),
    "rank": partial(_read_whole_number, least=0, most=_MOST_RANKS - 1),
    "max_leak_mib": _read_leak,
    "steady": _read_steady,
}
