"""Attach a test's figures as properties, for JUnit's XML and other plugins' reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.report.text import printable
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_gpumem.judge.result import Result

PREFIX: Final = "gpumem_"
_SIZES: Final = ("allocated", "reserved", "pinned")


def properties(results: Iterable[Result]) -> Iterator[tuple[str, str | int]]:
    """Yield names and values: "gpumem_peak_allocated", for a part "gpumem_peak_allocated[forward]".

    Sizes are bytes, of the fullest device. After running out of memory, "gpumem_needed_..." is the
    memory that the step needs, if known.
    """
    for index, result in enumerate(results):
        if index == 0:  # properties of the test, shared by its parts
            yield f"{PREFIX}device", result.device_key
            for name in ("batch_size", "world_size", "rank"):
                value = getattr(result, name)
                if value is not None:
                    yield f"{PREFIX}{name}", value
        # A part's name is any text, and pytest escapes the values of properties but not their
        # names: a control character or a lone surrogate would make the whole XML file invalid.
        end = f"[{printable(result.part)}]" if result.part else ""
        yield f"{PREFIX}verdict{end}", str(result.verdict.kind)
        measurement = result.measurement
        if measurement is None:
            continue
        yield f"{PREFIX}peak_allocated{end}", measurement.peak_allocated
        yield f"{PREFIX}peak_reserved{end}", measurement.peak_reserved
        if measurement.peak_pinned:
            yield f"{PREFIX}peak_pinned{end}", measurement.peak_pinned
        needed = measurement.out_of_memory.needed if measurement.out_of_memory else None
        if needed is not None:
            yield f"{PREFIX}needed_allocated{end}", needed.allocated
            yield f"{PREFIX}needed_reserved{end}", needed.reserved


def property_lines(user_properties: Iterable[tuple[str, object]]) -> Iterator[str]:
    """Yield a line for each of our properties in a report, with sizes formatted as well."""
    for name, value in user_properties:
        if name.startswith(PREFIX):
            is_size = isinstance(value, int) and any(word in name for word in _SIZES)
            words = f" ({format_size(value)})" if is_size and isinstance(value, int) else ""
            yield f"{name}: {value}{words}"
