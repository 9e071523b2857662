"""How well tests of one to four GPUs are packed on eight: the wall time beside a lower bound.

    python -m benchmarks.scale.packing [--sessions]

The ledger's own rule (``admits``) and the workers' own order of GPUs (``turn``) decide; the clock
is simulated, so that no test runs and the result is exact. 500 tests take one to four of eight
GPUs, a share of the memory of each, and a while; of one in ten nothing is known, so that it runs
alone on its GPUs. At each moment no GPU may be taken beyond its memory.

The lower bound is the largest of three: all tests' bytes times seconds over those of eight GPUs,
where a test that is alone counts with whole GPUs; all seconds over the workers; the longest test.
"Each from the next GPU on": worker 1 begins with GPU 1, worker 2 with GPU 2, however few they are.

With ``--sessions`` the figures of a suite are compared: in one process with eight virtual GPUs, and
in workers of pytest-xdist that find the virtual GPU as a real one, with packing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tabulate import tabulate

from benchmarks.harness import ROOT, line, publish
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.virtual.device import VirtualDevice

sys.path.insert(0, str(ROOT / "tests"))
from helpers.packing import GPUS, MEMORY, figures, lower_bound, made_up, suite, wall_time
from helpers.virtual_gpu import virtual_card

TESTS = 500
WORKERS = (1, 2, 4, 8, 16, 32)


def simulated() -> list[str]:
    """Return the table of wall times."""
    tests = made_up(TESTS)
    serial = sum(test.seconds for test in tests)
    rows = []
    for workers in WORKERS:
        wall, apart = wall_time(tests, workers), wall_time(tests, workers, spread=False)
        bound = lower_bound(tests, workers)
        row = (f"{workers}", f"{wall}", f"{apart}", f"{bound:.0f}", f"{wall / bound:.2f}")
        rows.append([*row, f"{serial / wall:.1f}"])
    heads = [
        "workers",
        "s",
        "s, each from the next GPU on",
        "lower bound, s",
        "s / bound",
        "speed-up",
    ]
    return [tabulate(rows, heads, disable_numparse=True, stralign="right")]


def sessions(number: int, workers: int) -> list[str]:
    """Run a suite in one process and packed; return how many figures differ.

    Raises:
        RuntimeError: a session failed.
    """
    VirtualDevice.load(CARDS["H100"])
    with tempfile.TemporaryDirectory() as name, virtual_card("H100", GPUS):
        folder = Path(name)
        (folder / "test_suite.py").write_text(suite(number), encoding="utf-8")
        pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
        pytest = (*pytest, "--gpumem-device=cuda", "--gpumem-attribution=off")
        packed = (*pytest, "-n", f"{workers}", "--gpumem-packing=baselines")
        for report, words in {
            "serial": (*pytest, "--gpumem-update-baselines"),
            "packed": packed,
        }.items():
            done = subprocess.run(
                [*words, f"--gpumem-json={report}.json"],
                cwd=folder,
                env={**os.environ, "TMPDIR": name},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(done.stdout + done.stderr)
        alone, beside = (figures(folder / f"{report}.json") for report in ("serial", "packed"))
    different = sum(alone[test] != beside.get(test) for test in alone)
    what = (
        f"{len(alone)} tests of 1 to 4 of {GPUS} virtual GPUs that {workers} workers take as real"
    )
    return [f"{what}: {different} have other peaks than in one process"]


def main() -> None:
    """Simulate, print, and keep the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", action="store_true", help="compare figures of sessions too")
    head = f"{TESTS} tests of 1 to 4 of {GPUS} GPUs with {MEMORY} GiB; the clock is simulated"
    text = [head, line(), "", *simulated()]
    if parser.parse_args().sessions:
        text += ["", *sessions(TESTS, 4)]
    publish("packing", "\n".join(text))


if __name__ == "__main__":
    main()
