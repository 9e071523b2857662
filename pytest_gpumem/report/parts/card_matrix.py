"""Show which test fits on which card, and how much memory it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.nodeids import without_card
from pytest_gpumem.report.text import aligned_table, columns, printable, shortened
from pytest_gpumem.sizes import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.judge.result import Result

TITLE: Final = "GiB left on each card"
MIN_NAME: Final = 16
"""columns that a test's name gets even on a narrow terminal"""


class CardMatrix(NamedTuple):
    """A table of tests by cards."""

    cards: list[str]
    """smallest first"""
    cells: dict[str, dict[str, str]]
    """by test name (without a card), then by card: GiB left on the card at the peak, or, if the
    test does not fit, the GiB that it needs"""


def card_matrix(results: Iterable[Result]) -> CardMatrix | None:
    """Arrange tests by the cards that they ran on; None if no test ran on several."""
    rows: dict[str, dict[str, Result]] = {}
    for result in results:
        if result.card and not result.part:
            rows.setdefault(without_card(result.nodeid, [result.card]), {})[result.card] = result
    rows = {name: on_cards for name, on_cards in rows.items() if len(on_cards) > 1}
    if not rows:
        return None
    cards = sorted(
        {card for on_cards in rows.values() for card in on_cards},
        key=lambda card: (CARDS[card].usable_memory if card in CARDS else 0, card),
    )
    cells = {
        name: {card: _cell(result) for card, result in on_cards.items()}
        for name, on_cards in rows.items()
    }
    return CardMatrix(cards, cells)


def cards_matrix(results: Sequence[Result], width: int = 80) -> str:
    """Return a table of tests by cards; "" if no test ran on several.

    Cards that exceed the width go into further tables.
    """
    matrix = card_matrix(results)
    if matrix is None:
        return ""
    cards, cells = matrix
    groups: list[list[str]] = [[]]
    used, room = 0, width - min(max(map(columns, cells)), MIN_NAME)
    for card in cards:
        wide = 2 + max(columns(card), *(columns(row.get(card, "")) for row in cells.values()))
        if groups[-1] and used + wide > room:
            groups.append([])
            used = 0
        groups[-1].append(card)
        used += wide
    tables = []
    for group in groups:
        rows_of_group = [[row.get(card, "") for card in group] for row in cells.values()]
        wide = sum(
            2 + max(map(columns, column)) for column in zip(group, *rows_of_group, strict=True)
        )
        room = max(width - wide, MIN_NAME)
        names = [shortened(printable(name), room) for name in cells]
        lines = [[shortened(TITLE, room), *group]]
        lines += ([name, *row] for name, row in zip(names, rows_of_group, strict=True))
        tables.append(aligned_table(lines, ["left", *("right" for _ in group)]))
    return "\n\n".join(tables)


def headroom(result: Result) -> int | None:
    """Return the bytes that a test leaves free on its card at its peak; None if unknown."""
    if result.measurement is None or result.card not in CARDS:
        return None
    return CARDS[result.card].usable_memory - result.measurement.peak_reserved


def _cell(result: Result) -> str:
    measurement = result.measurement
    if measurement is None:
        return "?"
    oom = measurement.out_of_memory
    if oom is not None:
        return f"no, needs {oom.needed.reserved / GIB:.2f}" if oom.needed else "no"
    left = headroom(result)
    if result.verdict.does_not_fit:
        return result.verdict.kind.word
    return "?" if left is None else f"{left / GIB:.2f}"
