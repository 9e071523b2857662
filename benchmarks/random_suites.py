"""Random suites, every figure compared with that of the same test alone: run many, unattended.

::

    python benchmarks/random_suites.py --first 0 --number 2000   # recorded in results/
    python benchmarks/random_suites.py --first 17 --number 1     # one of them again

For each suite that differs the smallest one with a difference is printed. See
tests/helpers/random_suites.py for what is in a suite.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.random_suites import Runner, differences, random_suite, shrunk, source_of


def main() -> int:
    """Run the suites; return 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--workers-every", type=int, default=20, metavar="N", help="with -n 2")
    parser.add_argument(
        "--plain-every", type=int, default=20, metavar="N", help="with all of the garbage collector"
    )
    parser.add_argument("--whole", action="store_true", help="do not make them smaller")
    parser.add_argument("--seconds", type=float, help="begin no suite after so long")
    parser.add_argument("--publish", action="store_true", help="write results/random_suites.txt")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.number)
    failed, count, tests, start = [], 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(folder)
        for seed in seeds:
            if arguments.seconds and time.monotonic() - start > arguments.seconds:
                break
            count += 1
            files = random_suite(seed)
            tests += sum(len(file.tests) for file in files)
            workers = seed % arguments.workers_every == 0
            runner.cheap = seed % arguments.plain_every != 0
            if count % 100 == 0:
                print(f"{count} suites, {len(failed)} differ", file=sys.stderr, flush=True)
            if not differences(runner, files, seed, workers=workers):
                continue
            failed.append(seed)
            if not arguments.whole:
                files = shrunk(runner, files, seed, workers=workers)
            print(f"== seed {seed}\n{source_of(files)}")
            print("\n".join(differences(runner, files, seed, workers=workers)), flush=True)
    lines = [
        provenance.line("pytest-xdist"),
        f"suites {count} (seeds {seeds.start} to {seeds.start + count - 1})",
        f"tests {tests}, sessions {runner.sessions}, seconds {time.monotonic() - start:.0f}",
        "left out: differences by garbage in reference cycles that a note tells, or within the",
        "default tolerance",
        f"suites with a figure that is not the one of the test alone: {len(failed)}",
        *(f"seed {seed}" for seed in failed),
    ]
    if arguments.publish:
        provenance.publish("random_suites", "\n".join(lines))
    else:
        print("\n".join(lines))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
