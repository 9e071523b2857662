"""Arguments of markers for tests: valid ones, and Hypothesis strategies for invalid ones."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st

from pytest_gpumem.errors import SpecError
from pytest_gpumem.sizes import GIB
from pytest_gpumem.spec import MemorySpec, spec_from_marks

if TYPE_CHECKING:
    from collections.abc import Mapping

FIELDS = [field.name for field in fields(MemorySpec)]
"""the marker's arguments"""
BUDGETS = ["max_gib", "max_allocated_gib", "max_reserved_gib", "max_pinned_gib", "max_host_gib"]
WORLD = {"world_size": 64, "rank": 3}
"""arguments that are refused together with ``devices`` above 1"""
NAN, INF = float("nan"), float("inf")


def find_card(name: str) -> str:
    if name.lower() == "t4":
        return "T4"
    raise SpecError(name, "nobody knows this card", "write card='T4'")


def spec(*marks: Mapping[str, object]) -> MemorySpec:
    """Parse markers, the nearest first."""
    return spec_from_marks([((), mark) for mark in marks], find_card=find_card)


def refusal(**mark: object) -> SpecError:
    with pytest.raises(SpecError) as caught:
        spec(mark)
    return caught.value


class Hostile:
    """An object whose every special method raises."""

    def _raise(self, *_: object) -> Any:
        raise RuntimeError

    __repr__ = __index__ = __float__ = __int__ = __bool__ = __len__ = __lt__ = _raise


class Indexable:
    """An integer type of another library, like numpy's."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**400)
    | st.floats()
    | st.fractions()
    | st.decimals()
    | st.complex_numbers()
    | st.text()
    | st.sampled_from(["8GiB", "2%", "64MiB", "T4", "-1B", "1e3"])
    | st.binary()
    | st.builds(Hostile),
    lambda inner: st.lists(inner) | st.tuples(inner, inner),
    max_leaves=4,
)
KWARGS = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=100), JUNK, max_size=4)


def assert_usable(made: MemorySpec) -> None:
    for budget in (
        made.bytes_of("max_gib"),
        made.bytes_of("max_allocated_gib"),
        made.bytes_of("max_reserved_gib"),
    ):
        assert budget is None or 1 <= budget <= 10**9 * GIB
    assert made.card in (None, "T4")
    assert made.batch_size is None or made.batch_size >= 1
    assert made.tolerance is None or made.tolerance.allowance(GIB) >= 0
    assert isinstance(made.baseline, bool)
    assert made.devices in range(1, 17)
    assert made.warmup in range(1001)
    if made.world_size is None:
        assert made.rank is None
    else:
        assert made.devices == 1
        assert made.rank in range(made.world_size)
