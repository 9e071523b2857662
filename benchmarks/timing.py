"""Clocks: wall and processor time, and what a fixed loop takes of them on this machine."""

from __future__ import annotations

import os
import time


class Clock:
    """Wall and processor seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Return wall and processor seconds."""
        return time.perf_counter() - self._wall, time.process_time() - self._cpu


def machine_speed() -> str:
    """Return what a fixed loop of Python takes here, for comparing figures of two machines."""
    clock = Clock()
    sum(number * number for number in range(3_000_000))
    wall, cpu = clock.read()
    load = os.getloadavg()[0]
    return (
        f"3 million squares in a Python loop: {cpu:.2f} s CPU, {wall:.2f} s wall; load {load:.1f}"
    )
