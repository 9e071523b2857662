"""A test's figures as properties: in JUnit's XML, in the reports of other plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_gpumem.judge.result import Result

PREFIX: Final = "gpumem_"
"""what the names of all of them begin with"""
_SIZES: Final = ("allocated", "reserved")


def properties(results: Iterable[Result]) -> Iterator[tuple[str, str | int]]:
    """Yield names and values: "gpumem_peak_allocated", of a part "gpumem_peak_allocated[forward]".

    Sizes are bytes, those of the fullest device. What ran out of memory has "gpumem_needed_..." as
    well, where that is known.
    """
    for index, result in enumerate(results):
        if index == 0:
            yield from _head(result)
        end = f"[{result.part}]" if result.part else ""
        for name, value in _values(result).items():
            yield f"{PREFIX}{name}{end}", value


def _head(result: Result) -> Iterator[tuple[str, str | int]]:
    """Yield what is a test's own, and its parts' as well."""
    yield f"{PREFIX}device", result.device_key
    for name in ("batch_size", "world_size", "rank"):
        value = getattr(result, name)
        if value is not None:
            yield f"{PREFIX}{name}", value


def _values(result: Result) -> Mapping[str, str | int]:
    measurement = result.measurement
    found: dict[str, str | int] = {"verdict": str(result.verdict.kind)}
    if measurement is not None:
        found["peak_allocated"] = measurement.peak_allocated
        found["peak_reserved"] = measurement.peak_reserved
        needed = measurement.out_of_memory.needed if measurement.out_of_memory else None
        if needed is not None:
            found["needed_allocated"] = needed.allocated
            found["needed_reserved"] = needed.reserved
    return found


def property_lines(found: Iterable[tuple[str, object]]) -> Iterator[str]:
    """Yield a line for each of these among a report's properties, sizes in words as well."""
    for name, value in found:
        if name.startswith(PREFIX):
            sized = isinstance(value, int) and any(word in name for word in _SIZES)
            words = f" ({format_size(value)})" if sized and isinstance(value, int) else ""
            yield f"{name}: {value}{words}"
