"""What an allocation costs with few and with many live blocks, by ctypes alone: no torch.

    python -m benchmarks.speed.native_allocations [--output FILE]

Each figure is one cudaMalloc of 2 MiB, one cudaPointerGetAttributes in it and one cudaFree, at a
random place among the live blocks. An empty call through ctypes is shown beside them, since it is
part of each.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import random
import sys
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.virtual.library import NativeLibrary

NAME = "benchmarks.speed.native_allocations"
PAGE = 2 << 20
ROUNDS = 20_000
LIVE = (0, 100, 1_000, 10_000, 100_000, 400_000)


class Bench:
    """The library's functions, with as little Python around them as can be."""

    def __init__(self) -> None:
        self.library = NativeLibrary()
        self.library.set_card(replace(CARDS["H100"], total_memory=1 << 40, context=0))
        self.library.show(1)
        lib = ctypes.CDLL(None)  # the library is in the global scope
        self.malloc, self.free = lib.cudaMalloc, lib.cudaFree
        self.look_up, self.nothing = lib.cudaPointerGetAttributes, lib.cudaDeviceSynchronize
        self.malloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.free.argtypes = [ctypes.c_void_p]
        self.look_up.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.out = ctypes.c_uint64()
        self.address = ctypes.addressof(self.out)
        self.live: list[int] = []
        self.chance = random.Random(1)  # noqa: S311 - no secret

    def new(self) -> int:
        """Return a new block's address."""
        assert self.malloc(self.address, PAGE) == 0
        return self.out.value

    def grow(self, count: int) -> None:
        """Have so many live blocks."""
        while len(self.live) < count:
            self.live.append(self.new())

    def nanoseconds(self) -> tuple[float, float, float]:
        """Return what one allocation, one look-up and one free cost."""
        times = [0, 0, 0]
        clock = time.perf_counter_ns
        buffer = ctypes.create_string_buffer(128)
        attributes = ctypes.addressof(buffer)
        for _ in range(ROUNDS):
            begin = clock()
            block = self.new()
            made = clock()
            self.look_up(attributes, block)
            found = clock()
            if self.live:  # free another one, so that holes lie everywhere
                at = self.chance.randrange(len(self.live))
                block, self.live[at] = self.live[at], block
            before = clock()
            self.free(block)
            times[2] += clock() - before
            times[0] += made - begin
            times[1] += found - made
        return times[0] / ROUNDS, times[1] / ROUNDS, times[2] / ROUNDS

    def empty_call(self) -> float:
        """Return what a call costs that does nothing."""
        begin = time.perf_counter_ns()
        for _ in range(ROUNDS):
            self.nothing()
        return (time.perf_counter_ns() - begin) / ROUNDS


def run() -> str:
    """Return the table, with what it was made on."""
    bench = Bench()
    lines = [
        "The native library's allocations: nanoseconds a call, through ctypes",
        (
            f"made {datetime.now(timezone.utc):%Y-%m-%d} on {platform.machine()}, "
            f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, "
            f"Python {platform.python_version()}; no GPU, no torch"
        ),
        f"command: python -m {NAME}; {ROUNDS} rounds a row, 2 MiB each",
        f"an empty call: {bench.empty_call():.0f}",
        "",
        f"{'live blocks':>12}{'cudaMalloc':>12}{'look-up':>12}{'cudaFree':>12}",
    ]
    rows = []
    for count in LIVE:
        bench.grow(count)
        figures = min(bench.nanoseconds() for _ in range(3))
        rows.append(figures)
        lines.append(f"{count:>12}" + "".join(f"{figure:>12.0f}" for figure in figures))
    growth = rows[-1][0] / rows[1][0]
    lines += ["", f"cudaMalloc, {LIVE[-1]} live blocks against {LIVE[1]}: {growth:.2f} times"]
    assert growth < 10, lines[-1]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    text = run()
    sys.stdout.write(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
