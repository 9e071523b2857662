"""``gpumem cards``: the cards that the virtual GPU can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tabulate import tabulate

from pytest_gpumem.cli.outcome import Outcome
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    import argparse


HELP: Final = "list the cards that the virtual GPU can be"
DESCRIPTION: Final = f"{HELP.capitalize()}."


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """Add no argument: the list is always whole."""


def run(_arguments: argparse.Namespace) -> Outcome:
    """Return the table of all cards."""
    titles = ("card", "memory", "for a step", "capability", "SMs", "CUDA's name")
    rows = [
        (
            card.name,
            format_size(card.total_memory),
            format_size(card.usable_memory),
            "{}.{}".format(*card.capability),
            str(card.sm_count),
            card.device_name,
        )
        for card in CARDS.values()
    ]
    return Outcome(tabulate(rows, titles, disable_numparse=True))
