"""Search for arguments and cards with which an inference server starts, after it refused.

Every answer comes from a start; the figures of the refusal only say where to begin.
"""

from __future__ import annotations

import json
import os
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.cli.program_trials import is_refused, measured, starts_of
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.variables import SERVER_ARGUMENTS
from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.judge.server_start import overflow, shortage
from pytest_gpumem.report.text import aligned_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.measurement import ServerStart

BLOCK: Final = 16
"""tokens in a block of the KV cache"""
MAX_UTILIZATION: Final = 0.99
MAX_CARDS: Final = 4
"""cards to try at most"""
MAX_LENGTHS: Final = 3


class Trial(NamedTuple):
    """One start to try."""

    title: str
    options: Sequence[str] = ()
    """of ``gpumem run``"""
    arguments: Mapping[str, Any] = MappingProxyType({})
    """arguments of the server in the place of its own"""


class ServerSearch:
    """Starts a server again in other ways: a shorter request, more of the memory, larger cards."""

    def __init__(self, options: Sequence[str], program: Sequence[str], card: Card) -> None:
        """Store ``options`` of ``gpumem run``, without a card, and the program with its words."""
        self._options, self._program, self._card = options, program, card

    def table(self, refused: ServerStart) -> str:
        """Return a table of the ways in which the server starts; "" if none was found."""
        sys.stderr.write("gpumem: searching for what would let it start; Ctrl-C ends the search\n")
        rows = [("what starts", "tokens in the KV cache")]
        for trials in (self._lengths(refused), self._utilizations(refused), self._cards(refused)):
            for trial in trials:
                start = self._start(trial)
                if start is not None:
                    rows.append((trial.title, f"{start.least_tokens:,}"))
                    break
        return aligned_table(rows, ("left", "right")) if rows[1:] else ""

    def _start(self, trial: Trial) -> ServerStart | None:
        """Start the server; return what it decided, None if it does not start."""
        options = [*self._options, *trial.options]
        if not any(option.startswith("--card=") for option in trial.options):
            options.append(f"--card={self._card.name}")
        os.environ[SERVER_ARGUMENTS] = json.dumps(dict(trial.arguments))
        try:
            results = measured(options, self._program)
        except GpuMemError as error:
            sys.stderr.write(f"gpumem: {trial.title}: {error}\n")
            return None
        finally:
            del os.environ[SERVER_ARGUMENTS]
        starts = None if any(map(is_refused, results)) else starts_of(results)
        sys.stderr.write(f"gpumem: {trial.title}: {'starts' if starts else 'does not start'}\n")
        return min(starts, key=lambda start: start.tokens) if starts else None

    def _lengths(self, refused: ServerStart) -> Iterator[Trial]:
        """Yield shorter requests, the longest first: memory of the cache is about linear in it."""
        enough = refused.needed - shortage(refused)
        if enough <= 0 or overflow(refused):
            return
        length = refused.length * enough // refused.needed // BLOCK * BLOCK
        for _ in range(MAX_LENGTHS):
            if length >= BLOCK:
                yield Trial(f"max_model_len={length}", arguments={"max_model_len": length})
            length = length // 2 // BLOCK * BLOCK

    def _utilizations(self, refused: ServerStart) -> Iterator[Trial]:
        """Yield the nearest share of the memory that may be enough, or leaves enough."""
        if not (refused.needed and refused.requested):
            return
        if overflow(refused):
            share = (refused.requested - overflow(refused)) * 100 // refused.total / 100
        else:
            share = -(-(refused.requested + shortage(refused)) * 100 // refused.total) / 100
        if share <= min(MAX_UTILIZATION, self._card.usable_memory / self._card.total_memory):
            title = f"gpu_memory_utilization={share}"
            yield Trial(title, arguments={"gpu_memory_utilization": share})

    def _cards(self, refused: ServerStart) -> Iterator[Trial]:
        """Yield cards with more memory, from small to large, one of each size."""
        missing = max(refused.needed - refused.cache, 0)
        sizes: dict[int, Card] = {}
        for card in CARDS.values():
            if card.total_memory > self._card.total_memory + missing:
                sizes.setdefault(card.total_memory >> 32, card)
        for size in sorted(sizes)[:MAX_CARDS]:
            name = sizes[size].name
            yield Trial(f"card {name}", [f"--card={name}"])
