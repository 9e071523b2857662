"""How long the tests take on an idle machine, and whether one fails on a busy one.

    python -m benchmarks.speed.suite_times --publish

It runs all tests once with nothing beside them, and three times beside busy loops, one for each
core. With ``--together`` these three run at the same time, and the workers of the two other runs,
two for each core, are the busy ones: less has to be waited for. Begin on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks import harness

if TYPE_CHECKING:
    from collections.abc import Iterator

BUSY = "while True: pass"
CLOSING = re.compile(r"^=* ?(\d+ (?:passed|failed|error).*?) in [0-9.]+s")


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep so many cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class Run:
    """All tests, in a process that has begun to run them."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.process = subprocess.Popen(
            ["bash", "tests/run.sh", "-q"],
            cwd=harness.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def row(self, beside: str) -> tuple[str, str, str, int]:
        """Wait for its end; return its conditions, time and outcome."""
        output, _ = self.process.communicate()
        seconds = round(time.monotonic() - self.start)
        outcomes = [found[1] for line in output.splitlines() if (found := CLOSING.match(line))]
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        outcome = "\n".join([*outcomes[-1:], *failed]) or output[-500:]
        return beside, f"{seconds // 60}:{seconds % 60:02}", outcome, self.process.returncode


def main() -> int:
    """Run them, and print or publish the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loaded", type=int, default=3, metavar="N", help="runs beside busy loops")
    parser.add_argument("--together", action="store_true", help="at the same time, no loops")
    parser.add_argument("--not-idle", action="store_true", help="leave out the run beside nothing")
    parser.add_argument("--publish", action="store_true", help="keep the result in results/")
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    rows = [] if options.not_idle else [Run().row("nothing")]
    if options.together:
        runs = [Run() for _ in range(options.loaded)]
        rows += [run.row(f"{len(runs) - 1} other runs") for run in runs]
    else:
        with busy_loops(cores):
            rows += [Run().row(f"{cores} busy loops") for _ in range(options.loaded)]
    drawn = harness.table([row[:3] for row in rows], ("beside", "time", "outcome"))
    text = f"The tests, `bash tests/run.sh`, in min:s\n{harness.line('pytest-xdist')}\n\n{drawn}"
    harness.publish("suite_times", text, keep=options.publish)
    return max(row[3] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
