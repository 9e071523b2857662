"""Parts of pytest's node IDs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


def split_nodeid(nodeid: str) -> tuple[str, str]:
    """Split a node ID into its file and the test in it: "a/test_b.py", "TestC::test_d[1]"."""
    module, _, test = nodeid.partition("::")
    return module, test


def module_of(nodeid: str) -> str:
    """Return the file part of a node ID."""
    return split_nodeid(nodeid)[0]


def without_card(nodeid: str, cards: Collection[str]) -> str:
    """Remove a card's name from a node ID's parameters: test_a[T4-32] becomes test_a[32].

    A card's name may contain the separator of parameters, a dash: "A100-80GB".
    """
    module, separator, test = nodeid.partition("::")
    name, bracket, parameters = test.partition("[")
    if not bracket:
        return nodeid
    marked = f"-{parameters.removesuffix(']')}-"
    # If names have the same beginning (A100, A100-80GB), match the longest.
    for card in sorted(cards, key=len, reverse=True):
        if f"-{card}-" in marked:
            left = marked.replace(f"-{card}-", "-", 1)[1:-1]
            return f"{module}{separator}{name}" + (f"[{left}]" if left else "")
    return nodeid
