"""After an inference server refused to start, search for arguments and cards with which it does.

Every result comes from an actual start; the failed start's figures only select what to try first.
"""

from __future__ import annotations

import json
import os
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.cli.program_trials import measured, starts_of
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.variables import SERVER_ARGUMENTS
from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.judge.server_start import overflow, shortage
from pytest_gpumem.report.text import aligned_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.measurement import ServerStart

BLOCK: Final = 16
"""number of tokens in a block of the KV cache"""
MAX_SHARE: Final = 0.99
MAX_CARDS: Final = 4
"""maximum number of cards to try"""
MAX_LENGTHS: Final = 4
"""maximum number of shorter lengths to try"""


class Trial(NamedTuple):
    """A start of the server to try."""

    title: str
    options: Sequence[str] = ()
    """additional options of ``gpumem run``"""
    arguments: Mapping[str, Any] = MappingProxyType({})
    """values, by name, that replace the server's own arguments"""


class Tried(NamedTuple):
    """The result of a trial."""

    trial: Trial
    start: ServerStart
    starts: bool


class ServerSearch:
    """Starts a server with shorter requests, another share of the memory, or larger cards."""

    def __init__(self, options: Sequence[str], program: Sequence[str], card: Card) -> None:
        """Store the options of ``gpumem run`` without a card, the command, and the card."""
        self._options, self._program, self._card = options, program, card

    def table(self, refused: ServerStart) -> str:
        """Return a table of the changes with which the server starts; "" if none was found."""
        sys.stderr.write("gpumem: searching for what would let it start; Ctrl-C ends the search\n")
        ways = (self._shorter(refused), self._other_share(refused), self._larger_card(refused))
        rows = [(found.trial.title, f"{found.start.least_tokens:,}") for found in ways if found]
        titles = ("what starts", "tokens in the KV cache")
        return aligned_table([titles, *rows], ("left", "right")) if rows else ""

    def _try(self, trial: Trial) -> Tried | None:
        """Start the server; return None if it failed for a reason other than memory."""
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
        starts = starts_of(results)
        if not starts:
            return None
        ok = not any(result.verdict.does_not_fit for result in results)
        sys.stderr.write(f"gpumem: {trial.title}: {'starts' if ok else 'does not start'}\n")
        return Tried(trial, max(starts, key=shortage), ok)

    def _shorter(self, refused: ServerStart) -> Tried | None:
        """Try shorter requests; the figures of each start determine the next length."""
        start = refused
        for _ in range(MAX_LENGTHS):
            enough = start.needed - shortage(start)
            if not start.needed or enough <= 0 or overflow(start):
                return None
            # The cache of a request is about linear in its length.
            length = start.length * enough // start.needed // BLOCK * BLOCK
            if length < BLOCK:
                return None
            title = f"max_model_len={length}"
            tried = self._try(Trial(title, arguments={"max_model_len": length}))
            if tried is None or tried.starts:
                return tried
            start = tried.start
        return None

    def _other_share(self, refused: ServerStart) -> Tried | None:
        """Try another share of memory: a smaller one after an overflow, else a larger one."""
        if not (refused.needed and refused.requested):
            return None
        if overflow(refused):
            share = (refused.requested - overflow(refused)) * 100 // refused.total / 100
        else:
            share = -(-(refused.requested + shortage(refused)) * 100 // refused.total) / 100
        if not 0 < share <= min(MAX_SHARE, self._card.usable_memory / self._card.total_memory):
            return None
        title = f"gpu_memory_utilization={share}"
        tried = self._try(Trial(title, arguments={"gpu_memory_utilization": share}))
        return tried if tried and tried.starts else None

    def _larger_card(self, refused: ServerStart) -> Tried | None:
        """Try cards with more memory, from small to large, one of each size."""
        missing = max(refused.needed - refused.cache, 0)
        sizes: dict[int, Card] = {}
        for card in CARDS.values():
            if card.total_memory > self._card.total_memory + missing:
                sizes.setdefault(card.total_memory >> 32, card)
        for size in sorted(sizes)[:MAX_CARDS]:
            name = sizes[size].name
            tried = self._try(Trial(f"card {name}", [f"--card={name}"]))
            if tried and tried.starts:
                return tried
        return None
