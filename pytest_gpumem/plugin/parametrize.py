"""One test as several: on each of its cards, and as each of its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.errors import SpecError
from pytest_gpumem.plugin.pytest_item import FIXTURE, MARKER

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pytest

CARD: Final = "_gpumem_card"
RANK: Final = "_gpumem_rank"
"""fixtures of no use but to give a test its parameter"""
MAX_RANKS: Final = 4096
"""ranks that "all" may mean"""


def spread(metafunc: pytest.Metafunc, cards: Sequence[str]) -> None:
    """Make several tests of one with several cards or ranks in its marker.

    Mistakes in a marker are errors of the test's set-up, not of this.

    The session's ``cards`` are those of every test; without them the marker's.
    """
    declared = [mark.kwargs for mark in metafunc.definition.iter_markers(MARKER)]
    if not declared and FIXTURE not in metafunc.fixturenames:
        return
    fields = {name: value for kwargs in reversed(declared) for name, value in kwargs.items()}
    names, card = list(cards), fields.get("card")
    if not names and isinstance(card, (list, tuple)) and all(isinstance(n, str) for n in card):
        names = list(dict.fromkeys(map(canonical_or_given, card)))
    if names:
        _parametrize(metafunc, CARD, names, names)
    ranks, world_size = fields.get("ranks"), fields.get("world_size")
    if isinstance(ranks, str) and str.__str__(ranks) == "all" and isinstance(world_size, int):
        ranks = range(world_size) if 1 <= world_size <= MAX_RANKS else ranks
    # Of anything else, and of too many, the test's own error tells.
    if (
        isinstance(ranks, (list, tuple, range))
        and len(ranks) <= MAX_RANKS
        and all(type(rank) is int for rank in ranks)
    ):
        ranks = list(dict.fromkeys(ranks))
        if ranks:
            _parametrize(metafunc, RANK, ranks, [f"rank{rank}" for rank in ranks])


def _parametrize(
    metafunc: pytest.Metafunc, name: str, values: Sequence[object], ids: list[str]
) -> None:
    if name not in metafunc.fixturenames:
        metafunc.fixturenames.append(name)
    metafunc.parametrize(name, values, indirect=True, ids=ids)


def canonical_or_given(name: str) -> str:
    """Return a card's name as the table has it, or as it was given where the table has none."""
    from pytest_gpumem.devices.cards import find_card

    try:
        return find_card(name).name
    except SpecError:
        return name


def spread_fields(item: pytest.Item) -> dict[str, object]:
    """Return the marker's arguments that are a test's parameters."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    fields: dict[str, object] = {}
    if CARD in params:
        fields["card"] = params[CARD]
    if RANK in params:
        fields |= {"rank": params[RANK], "ranks": None}
    return fields


def cards_of(items: Iterable[pytest.Item]) -> set[str | None]:
    """Return the cards that tests name; None stands for a test that names none."""
    named: set[str | None] = set()
    for item in items:
        fields = spread_fields(item)
        if "card" not in fields:
            for mark in item.iter_markers(MARKER):
                fields = {**mark.kwargs, **fields}
        card = fields.get("card")
        named.add(canonical_or_given(card) if isinstance(card, str) else None)
    return named
