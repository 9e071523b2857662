"""Tests of one to four GPUs packed on eight, by the ledger's own rule and a simulated clock.

benchmarks/scale/packing.py has 500 of them, and says what the lower bound is.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem import read_report
from pytest_gpumem.devices.sharing.gpu_ledger import LedgerEntry, admits, earlier
from pytest_gpumem.devices.sharing.xdist_order import turn

if TYPE_CHECKING:
    from pathlib import Path

GPUS = 8
MEMORY = 80
"""GiB of each GPU"""
CONTEXT = 1
"""GiB that a process holds of each GPU that its tests have used"""


class Packed(NamedTuple):
    """A test that is to be packed."""

    gpus: int
    gib: int
    """of each GPU"""
    seconds: int
    alone: bool


def made_up(number: int, seed: int = 1) -> list[Packed]:
    """Return tests as a suite for large models has them: most are small and short."""
    chance = random.Random(seed)
    tests = []
    for _ in range(number):
        gpus = chance.choices((1, 2, 3, 4), (60, 25, 5, 10))[0]
        gib = chance.choices((2, 8, 20, 40, 70), (40, 30, 15, 10, 5))[0]
        tests.append(Packed(gpus, gib, chance.randint(1, 30), chance.random() < 0.1))
    return tests


@dataclass
class Simulated:
    """A worker of pytest-xdist."""

    order: list[str]
    """its GPUs, its first one first"""
    entry: LedgerEntry
    test: Packed | None = None
    used: set[str] = field(default_factory=set)
    """GPUs on which it has a context"""


def wall_time(tests: list[Packed], workers: int, *, spread: bool = True) -> int:
    """Return the seconds until all tests have run, each given to the next worker that is free.

    Args:
        tests: in their order.
        workers: their number.
        spread: whether workers know how many they are, and spread over the GPUs.

    Raises:
        RuntimeError: a GPU was taken beyond its memory, or a test beside one that is alone.
    """
    names = ["H100"] * GPUS
    crew = [
        Simulated(
            (turn(None, names, number, workers if spread else 0) or "").split(","),
            LedgerEntry(f"gw{number}", {}),
        )
        for number in range(workers)
    ]
    waiting = list(reversed(tests))
    ends: list[tuple[int, int]] = []
    now = ticket = 0
    while True:
        for worker in crew:
            if worker.test is None and waiting:
                worker.test = waiting.pop()
                ticket += 1
                own = worker.order[: worker.test.gpus]
                worker.used.update(own)
                worker.entry = LedgerEntry(
                    worker.entry.process,
                    dict.fromkeys(own, CONTEXT + worker.test.gib),
                    "waiting",
                    worker.test.alone,
                    ticket,
                    held=dict.fromkeys(worker.used, CONTEXT),
                )
        for number in sorted(range(workers), key=lambda number: crew[number].entry.ticket):
            worker = crew[number]
            others = [other.entry for other in crew if other is not worker]
            free = {str(gpu): (_free(crew, str(gpu)), MEMORY) for gpu in range(GPUS)}
            if worker.entry.state == "waiting" and admits(worker.entry, others, free):
                for overtaken in earlier(worker.entry, others):
                    overtaken.overtaken += 1
                worker.entry.state = "running"
                assert worker.test is not None
                heapq.heappush(ends, (now + worker.test.seconds, number))
        _require_room(crew)
        if not ends:
            return now
        now, number = heapq.heappop(ends)
        worker = crew[number]
        worker.test = None
        held = dict.fromkeys(worker.used, CONTEXT)
        worker.entry = LedgerEntry(worker.entry.process, held)


def _free(crew: list[Simulated], gpu: str) -> int:
    return MEMORY - sum(worker.entry.taken(gpu) for worker in crew)


def _require_room(crew: list[Simulated]) -> None:
    for gpu in map(str, range(GPUS)):
        entries = [it.entry for it in crew if it.entry.shares([gpu], "running")]
        crowded = len(entries) > 1 and any(entry.alone for entry in entries)
        if crowded or (len(entries) > 1 and _free(crew, gpu) < 0):
            raise RuntimeError(f"GPU {gpu} was taken by {entries}")


def lower_bound(tests: list[Packed], workers: int) -> float:
    """Return seconds that no packing on the GPUs takes less than."""
    room = GPUS * MEMORY
    volume = sum(
        test.seconds * test.gpus * (MEMORY if test.alone else test.gib + CONTEXT) for test in tests
    )
    seconds = [test.seconds for test in tests]
    return max(volume / room, sum(seconds) / min(workers, len(tests)), *seconds)


# -- figures --

SUITE = """
import pytest, torch


def step(gpus, mib):
    held = [
        torch.empty((mib + device) << 20, dtype=torch.uint8, device=f"cuda:{device}")
        for device in range(gpus)
    ]
    weight = torch.empty(256, 1024, device="cuda", requires_grad=True)
    (weight @ weight.T).sum().backward()
    del held
"""
CASE = """

@pytest.mark.gpu_memory(devices={gpus})
def test_{number}():
    step({gpus}, {mib})
"""


def suite(number: int) -> str:
    """Return the source of a suite of tests of one to four GPUs."""
    cases = (CASE.format(number=it, gpus=it % 4 + 1, mib=it % 7 + 1) for it in range(number))
    return SUITE + "".join(cases)


def figures(path: Path) -> dict[str, tuple[object, ...]]:
    """Return the peaks of each test of a report."""
    return {
        result.nodeid: result.measurement.peaks if result.measurement else ()
        for result in read_report(path).results
    }
