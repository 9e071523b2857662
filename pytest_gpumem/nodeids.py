"""Parts of pytest's node ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


def split_nodeid(nodeid: str) -> tuple[str, str]:
    """Return a nodeid's test module and the test in it: "a/test_b.py", "TestC::test_d[1]"."""
    module, _, test = nodeid.partition("::")
    return module, test


def module_of(nodeid: str) -> str:
    """Return a nodeid's test module."""
    return split_nodeid(nodeid)[0]


def without_card(nodeid: str, cards: Collection[str]) -> str:
    """Return a nodeid without the parameter that is a card: test_a[32] of test_a[T4-32].

    A card's name may have dashes, as the separators of parameters are: "A100-80GB".
    """
    module, separator, test = nodeid.partition("::")
    name, bracket, parameters = test.partition("[")
    if not bracket:
        return nodeid
    marked = f"-{parameters.removesuffix(']')}-"
    # Of names that start alike (A100, A100-80GB) the longest is meant.
    for card in sorted(cards, key=len, reverse=True):
        if f"-{card}-" in marked:
            left = marked.replace(f"-{card}-", "-", 1)[1:-1]
            return f"{module}{separator}{name}" + (f"[{left}]" if left else "")
    return nodeid
