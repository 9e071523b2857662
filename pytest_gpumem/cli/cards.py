"""``gpumem cards``: the cards that the virtual GPU can be."""

from __future__ import annotations

from tabulate import tabulate

from pytest_gpumem.devices.cards import CARDS, Card
from pytest_gpumem.sizes import format_size


def cards_table() -> str:
    """Return the table of ``gpumem cards``."""
    titles = ("card", "memory", "for a step", "capability", "SMs", "CUDA's name")
    return tabulate([_card_row(card) for card in CARDS.values()], titles, disable_numparse=True)


def _card_row(card: Card) -> tuple[str, ...]:
    major, minor = card.capability
    return (
        card.name,
        format_size(card.total_memory),
        format_size(card.usable_memory),
        f"{major}.{minor}",
        str(card.sm_count),
        card.device_name,
    )
