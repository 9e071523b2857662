"""Random suites, every figure compared with that of the same test alone: run many, unattended.

::

    python -m benchmarks.fidelity.random_suites --up-to 2000 --publish  # after the recorded ones
    python -m benchmarks.fidelity.random_suites --first 17 --number 1     # one suite again
    python -m benchmarks.fidelity.random_suites --first 3000 --up-to 5000 --publish  # all kinds

With ``--publish`` results/random_suites.txt is rewritten after every suite, so that an interrupted
run is recorded, too. If a suite's figures differ, the suite is shrunk to the smallest one that
differs, which is printed. tests/helpers/random_suites.py describes the suites.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time

from benchmarks import harness

sys.path.insert(0, str(harness.ROOT / "tests"))

from helpers.random_suites import Runner, differences, random_suite, shrunk, source_of

RESULT = harness.RESULTS / "random_suites.txt"
RUN = re.compile(r"^seeds (\d+) to (\d+): (\d+) differ", re.MULTILINE)


def main() -> int:
    """Run the suites; return 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, metavar="SEED", help="by default 0, or the next one")
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--up-to", type=int, metavar="N", help="so many suites in all, recorded")
    parser.add_argument("--workers-every", type=int, default=20, metavar="N", help="with -n 2")
    parser.add_argument(
        "--plain-every", type=int, default=20, metavar="N", help="with all of the garbage collector"
    )
    parser.add_argument("--whole", action="store_true", help="do not make them smaller")
    parser.add_argument("--seconds", type=float, help="begin no suite after so long")
    parser.add_argument("--publish", action="store_true", help="write results/random_suites.txt")
    arguments = parser.parse_args()
    runs = recorded_runs(RESULT.read_text("utf-8") if RESULT.exists() else "")
    first = arguments.first
    if first is None:
        first = next_seed(runs) if arguments.publish else 0
    end = arguments.up_to or first + arguments.number
    failed: list[int] = []
    tests, start = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(folder)
        for seed in range(first, end):
            if arguments.seconds and time.monotonic() - start > arguments.seconds:
                break
            files = random_suite(seed)
            workers = seed % arguments.workers_every == 0
            runner.cheap = seed % arguments.plain_every != 0
            different = differences(runner, files, seed, workers=workers)
            tests += sum(len(file.tests) for file in files)
            if different:
                failed.append(seed)
            run = (
                f"seeds {first} to {seed}: {len(failed)} differ"
                f"{''.join(f', seed {seed}' for seed in failed)}; tests {tests}, "
                f"sessions {runner.sessions}, seconds {time.monotonic() - start:.0f}; "
                f"{harness.line('pytest-xdist')}"
            )
            if arguments.publish:
                RESULT.write_text(record([*runs, run]), "utf-8")
            if not different:
                continue
            if not arguments.whole:
                files = shrunk(runner, files, seed, workers=workers)
            print(f"== seed {seed}\n{source_of(files)}")
            print("\n".join(differences(runner, files, seed, workers=workers)), flush=True)
    print(run if end > first else f"all of {end} suites are recorded")
    return bool(failed)


def recorded_runs(text: str) -> list[str]:
    """Return the lines of a record that describe runs."""
    return [line for line in text.splitlines() if RUN.match(line)]


def next_seed(runs: list[str]) -> int:
    """Return the first seed after the recorded runs."""
    return max((int(RUN.match(run)[2]) + 1 for run in runs), default=0)


def record(runs: list[str]) -> str:
    """Return a record's text: the totals of all runs, then a line for each."""
    figures = [tuple(map(int, RUN.match(run).groups())) for run in runs]
    lines = [
        f"suites {sum(last - first + 1 for first, last, _ in figures)}",
        f"suites with a figure that is not the one of the test alone: {sum(f[2] for f in figures)}",
        "left out: differences that a note tells (by garbage in reference cycles, by expandable",
        "segments), or within the default tolerance",
        "",
        *runs,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
