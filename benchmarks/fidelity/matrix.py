"""The rows of the fidelity matrix: each training step has a name and a family."""

# ruff: noqa: ANN401 - what a step takes besides is of any type

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 3
"""how often each step is run"""


@dataclass(frozen=True)
class Step:
    """One row of the matrix."""

    name: str
    family: str
    build: Callable[[], Callable[[], None]]
    """makes model, data and optimizer, and returns what runs one step"""
    needs: tuple[str, ...] = ()
    """packages besides torch"""
    capability: tuple[int, int] = (0, 0)
    """least compute capability"""


STEPS: dict[str, Step] = {}


def add(name: str, family: str, build: Callable[[], Callable[[], None]], **more: Any) -> None:
    """Put a step into the matrix."""
    assert name not in STEPS, name
    STEPS[name] = Step(name, family, build, **more)
