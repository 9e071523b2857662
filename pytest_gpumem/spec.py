"""Parse the arguments of ``@pytest.mark.gpu_memory`` into a frozen MemorySpec.

All other code may rely on the values: every mistake raises a SpecError here, which shows the marker
and a correction.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import MISSING, dataclass, field, fields, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from pytest_gpumem.errors import SpecError, is_own_error
from pytest_gpumem.sizes import GIB, MIB, shown
from pytest_gpumem.spec_fields import (
    MAX_BATCH,
    MAX_RANKS,
    MAX_TOKENS,
    read_batch_sizes,
    read_budget,
    read_card,
    read_flag,
    read_mib,
    read_mib_or_zero,
    read_ranks,
    read_tolerance,
    read_values,
    read_variants,
    read_whole_number,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pytest_gpumem.sizes import Tolerance

    Reader = Callable[[str, object], object]

__tracebackhide__ = is_own_error

MAX_DEVICES: Final = 16
"""limit per process; the native library has arrays of this size"""
_MAX_WARMUP: Final = 1000
MAX_NAME_LENGTH: Final = 60
_SIZES: Final = {"batch_size", "batch_sizes"}
_INHERITED: Final = ("tolerance", "batch_size", "baseline", "devices", "world_size", "rank")
"""fields that a part inherits from its test"""


@dataclass(frozen=True)
class MemorySpec:
    """A test's declared limits, batch size and comparison settings.

    :func:`spec_from_marks` and :func:`spec_from_call` create it and check the values; the class
    itself does not.
    """

    max_gib: int | float | None = None
    """the step must fit in this much memory, in GiB; enforced while it runs"""
    max_allocated_gib: int | float | None = None
    """limit of the peak allocated memory, in GiB"""
    max_reserved_gib: int | float | None = None
    """limit of the peak reserved memory, in GiB"""
    max_pinned_gib: int | float | None = None
    """limit of the peak of pinned host memory, in GiB"""
    max_host_gib: int | float | None = None
    """limit of the growth of the process's resident memory, in GiB"""
    card: str | None = None
    """canonical name of the card that the step must fit on"""
    batch_size: int | None = None
    """number of samples in the step's batch"""
    tolerance: Tolerance | None = None
    """allowed difference from the baseline; None for the session's default"""
    baseline: bool = True
    """whether the measurement is compared with a baseline"""
    devices: int = 1
    """number of GPUs that the step runs on"""
    warmup: int = 0
    """number of unmeasured runs before the measured one"""
    world_size: int | None = None
    """number of ranks of the distributed run, if the test runs as one of them; else None"""
    rank: int | None = None
    """the test's rank; None if and only if ``world_size`` is None"""
    batch_sizes: tuple[int, ...] | None = None
    """batch sizes that the test runs with, ascending; ``batch_size`` is the last of them"""
    max_mib_per_sample: int | float | None = None
    """limit of the memory per additional sample, in MiB of peak allocated; with ``batch_sizes``"""
    max_fixed_gib: int | float | None = None
    """limit of the step's memory without any sample, in GiB; with ``batch_sizes``"""
    ranks: str | tuple[int, ...] | None = None
    """ranks as which the test runs, one after the other; "all" for all of ``world_size``"""
    variants: Mapping[str, Mapping[str, object]] = field(default_factory=dict, hash=False)
    """by name: values of ``gpu_memory.variant`` to try if the test does not fit"""
    max_leak_mib: int | float | None = None
    """limit of the memory that the test leaves behind after teardown, in MiB"""
    steady: bool = False
    """whether the memory allocated after each step must stop growing"""
    min_cache_tokens: int | None = None
    """least number of tokens that an inference server's KV cache must hold"""
    values: Literal["auto", "full", "off"] | None = None
    """which values a virtual GPU computes; None for the session's option"""

    def bytes_of(self, name: str) -> int | None:
        """Return the limit in a field, which is in GiB or MiB, in bytes; None if not declared."""
        limit: int | float | None = getattr(self, name)
        if limit is None:
            return None
        unit = GIB if name.endswith("_gib") else MIB
        return math.floor(Fraction(repr(limit)) * unit)


_DEFAULTS: Final[dict[str, Any]] = {
    spec_field.name: {} if spec_field.default is MISSING else spec_field.default
    for spec_field in fields(MemorySpec)
}


def spec_from_marks(
    marks: Iterable[tuple[tuple[object, ...], Mapping[str, object]]],
    *,
    find_card: Callable[[str], str],
) -> MemorySpec:
    """Merge a test's markers into one declaration.

    Markers are merged field by field: the nearest marker with a field wins, and None resets the
    field to its default even if outer markers set it. Overridden values are checked as well.

    ``marks`` has the arguments of each marker, the nearest first, in the order of
    ``Node.iter_markers``. ``find_card`` returns a card's canonical name, and raises SpecError for
    an unknown one.

    Raises:
        SpecError: the first mistake found.
    """
    readers: dict[str, Reader] = {**_READERS, "card": partial(read_card, find_card=find_card)}
    merged: dict[str, Any] = {}
    for args, kwargs in marks:
        if args:
            ellipsis = ", ..." if len(args) > 1 else ""
            example = f"card={shown(args[0])}" if isinstance(args[0], str) else "max_gib=8"
            problem = "the marker takes named arguments only"
            remedy = f"name each argument, for example {example}"
            raise SpecError(f"@pytest.mark.gpu_memory({shown(args[0])}{ellipsis})", problem, remedy)
        decided = _SIZES & merged.keys()
        for name, value in _read_all(kwargs, readers, "@pytest.mark.gpu_memory(").items():
            if not (decided and name in _SIZES):  # a nearer marker sets batch_size or batch_sizes
                merged.setdefault(name, value)
    card, ranks = merged.get("card"), merged.get("ranks")
    if ranks is not None:
        call_text = f"@pytest.mark.gpu_memory(ranks={_as_written(ranks)})"
        if merged.get("world_size") is None:
            raise SpecError(call_text, "ranks needs world_size", "write world_size=8 as well")
        raise _no_several(call_text, "rank=0")
    if isinstance(card, tuple):
        raise _no_several(f"@pytest.mark.gpu_memory(card={_as_written(card)})", "card='T4'")
    return _one_rank(_sized(MemorySpec(**merged)))


def _as_written(value: object) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)


def _no_several(call_text: str, single: str) -> SpecError:
    return SpecError(
        call_text,
        "a method of a unittest.TestCase cannot run as several tests",
        f"write {single}, or a plain class or function",
    )


def _sized(spec: MemorySpec) -> MemorySpec:
    """Set the batch size to the largest of several batch sizes."""
    if spec.batch_sizes is None:
        for name in ("max_mib_per_sample", "max_fixed_gib"):
            if (value := getattr(spec, name)) is not None:
                raise SpecError(
                    f"@pytest.mark.gpu_memory({name}={value!r})",
                    f"{name} needs several batch sizes",
                    "write batch_sizes=[8, 16, 32] as well, and use gpu_memory.batch_size in the "
                    "test",
                )
        return spec
    if spec.batch_size is not None:
        raise SpecError(
            f"@pytest.mark.gpu_memory(batch_size={spec.batch_size}, "
            f"batch_sizes={list(spec.batch_sizes)})",
            "the test already runs with every size in batch_sizes",
            "leave out batch_size",
        )
    return replace(spec, batch_size=spec.batch_sizes[-1])


def _one_rank(spec: MemorySpec) -> MemorySpec:
    """Set the rank, by default to 0, if there is a world size."""
    size, rank = spec.world_size, spec.rank
    if size is None and rank is None:
        return spec
    call_text = ", ".join(
        f"{name}={value}"
        for name, value in (("devices", spec.devices), ("world_size", size), ("rank", rank))
        if value not in {None, _DEFAULTS[name]}
    )
    call_text = f"@pytest.mark.gpu_memory({call_text})"
    if size is None:
        raise SpecError(
            call_text, "rank needs world_size", f"write world_size={rank + 1 if rank else 8}"
        )
    if spec.devices > 1:
        problem = "a rank runs on one device, and a test's process runs one rank"
        raise SpecError(call_text, problem, "leave out devices, or world_size")
    if rank is not None and rank >= size:
        remedy = f"write for example rank={size - 1}"
        raise SpecError(call_text, f"rank must be below world_size ({size})", remedy)
    return replace(spec, rank=rank or 0)


def spec_from_call(name: object, kwargs: Mapping[str, object], base: MemorySpec) -> MemorySpec:
    """Return the declaration of a part of a test: ``gpu_memory.measure(name, **kwargs)``.

    A part inherits the test's devices and rank and, unless it declares its own, the tolerance,
    batch size and baseline, but none of the budgets: those apply to the whole test. It has no
    warmup.

    Raises:
        SpecError: the first mistake found.
    """
    if not isinstance(name, str) or not name.strip():
        call_text = f"gpu_memory.measure({shown(name)})"
        remedy = "write gpu_memory.measure('forward')"
        raise SpecError(call_text, "a part of a test needs a name, as text", remedy)
    inherited: dict[str, Any] = {name: getattr(base, name) for name in _INHERITED}
    own = _read_all(kwargs, _PART_READERS, f"gpu_memory.measure({shown(name)}, ")
    return MemorySpec(**{**inherited, **own})


def _read_all(
    kwargs: Mapping[str, object], readers: Mapping[str, Reader], call: str
) -> dict[str, Any]:
    """Check the values of one call; errors show the call, whose text begins with ``call``."""
    values: dict[str, Any] = {}
    name, value = "", object()
    try:
        for name, value in kwargs.items():
            _check_name(name, readers)
            values[name] = _DEFAULTS[name] if value is None else readers[name](name, value)
    except SpecError as error:
        ellipsis = ", ..." if len(kwargs) > 1 else ""
        call_text = f"{call}{_brief(name)}={shown(value)}{ellipsis})"
        raise SpecError(call_text, error.problem, error.remedy) from None
    return values


def _check_name(name: str, readers: Mapping[str, Reader]) -> None:
    if name in readers:
        return
    if name in _DEFAULTS:
        remedy = f"put {name} on the test, in @pytest.mark.gpu_memory(...)"
        raise SpecError(name, f"{name} is for the whole test, not for a part", remedy)
    close = difflib.get_close_matches(name[:MAX_NAME_LENGTH].lower(), readers, n=1)
    if not close:
        remedy = f"write one of {', '.join(readers)}"
    elif close[0].endswith("_gib"):
        remedy = f"write {close[0]}, which is in GiB (2**30 bytes)"
    else:
        remedy = f"write {close[0]}"
    raise SpecError(name, f"there is no argument named {_brief(name)}", remedy)


def _brief(name: str) -> str:
    """Return an argument's name unchanged, or shortened if it is not an ordinary identifier."""
    return name if name.isidentifier() and len(name) <= MAX_NAME_LENGTH else shown(name)


_PART_READERS: Final[Mapping[str, Reader]] = {
    "max_gib": read_budget,
    "max_allocated_gib": read_budget,
    "max_reserved_gib": read_budget,
    "max_pinned_gib": read_budget,
    "batch_size": partial(read_whole_number, least=1, largest=MAX_BATCH),
    "tolerance": read_tolerance,
    "baseline": partial(read_flag, meaning="False for a test without a baseline"),
}
_READERS: Final[Mapping[str, Reader]] = {
    **_PART_READERS,
    "devices": partial(read_whole_number, least=1, largest=MAX_DEVICES),
    "warmup": partial(read_whole_number, least=0, largest=_MAX_WARMUP),
    "world_size": partial(read_whole_number, least=1, largest=MAX_RANKS),
    "rank": partial(read_whole_number, least=0, largest=MAX_RANKS - 1),
    "batch_sizes": read_batch_sizes,
    "max_mib_per_sample": read_mib,
    "max_fixed_gib": read_budget,
    "max_host_gib": read_budget,
    "variants": read_variants,
    "ranks": read_ranks,
    "max_leak_mib": read_mib_or_zero,
    "steady": partial(
        read_flag, meaning="True if the memory allocated after each step must stop growing"
    ),
    "min_cache_tokens": partial(read_whole_number, least=1, largest=MAX_TOKENS),
    "values": read_values,
}
