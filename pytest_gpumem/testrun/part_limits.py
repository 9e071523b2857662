"""A part's limits that depend on other parts: ``at_most``, ``gpu_memory.ordered`` ..."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.relations import BEFORE, Bound
from pytest_gpumem.sizes import format_size
from pytest_gpumem.testrun.run import most

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.testrun.run import Part


def bounds(parts: Mapping[str, Part], name: str) -> list[Bound]:
    """Return a part's limits that depend on other parts, or on the memory before the part."""
    found = []
    for relation in parts[name].relations if name in parts else ():
        figure, part = relation.figure, parts[name]
        if relation.part == BEFORE and BEFORE not in parts:
            start = part.tally.ends[0]
            reference = most(start, "reserved" if figure == "reserved" else "allocated")
        elif relation.part in parts:
            reference = parts[relation.part].figure(figure)
        elif relation.part:  # no limit: the part that it depends on did not run
            continue
        else:
            reference = 0
        sizes = (
            f"{member} {format_size(parts[member].figure(figure))}" for member in relation.members
        )
        limit = relation.limit(reference)
        found.append(Bound(relation, limit, part.figure(figure), ", ".join(sizes)))
    return found
