"""What the plugin costs a suite that has no marked test: time and imports.

    python -m benchmarks.speed.startup [--repeats 25]

Runs pytest on a suite of ten unmarked tests with the plugin and without it by turns, no other
plugin loaded, and compares the medians of the pairs. Wall time is what the goal is about; the
processor's time of the same runs is said beside it, for a machine that others use as well.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

from benchmarks.harness import line, publish, session, table

GOAL_MS = 10.0
SUITE = "\n".join(f"def test_{number}():\n    assert True\n" for number in range(10))
LIST_MODULES = (
    "def pytest_unconfigure():\n"
    "    import sys\n"
    "    open('modules', 'w').write(chr(10).join(sys.modules))\n"
)
OTHERS = [it.name for it in entry_points(group="pytest11") if it.name != "gpumem"]
BLOCKED = [word for name in OTHERS for word in ("-p", f"no:{name}")]
OFF = ["-p", "no:gpumem"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
"""of the runs: modules are compiled once, as they are for everybody"""


def timed(folder: Path, *more: str) -> tuple[float, float]:
    """Run the suite; return its wall time and its processor time, in milliseconds."""
    done = session(folder, *BLOCKED, *more, environment=ENVIRONMENT)
    assert done.status == 0, done.output
    return 1000 * done.wall, 1000 * done.cpu


def modules(folder: Path, *more: str) -> set[str]:
    """Return what a run of the suite had imported at its end."""
    conftest = folder / "conftest.py"
    conftest.write_text(LIST_MODULES, encoding="utf-8")
    timed(folder, *more)
    conftest.unlink()
    return set((folder / "modules").read_text(encoding="utf-8").split())


def import_times(folder: Path, added: set[str]) -> list[tuple[str, float]]:
    """Return the milliseconds that each of the added modules takes to import, the slowest first."""
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *BLOCKED)
    command = [sys.executable, "-X", "importtime", *pytest]
    said = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=True
    ).stderr
    found = {}
    for entry in said.splitlines():
        if entry.startswith("import time:") and entry.count("|") == 2:
            own, _, name = (part.strip() for part in entry.partition(":")[2].split("|"))
            if name in added:
                found[name] = int(own) / 1000
    return sorted(found.items(), key=lambda pair: -pair[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=25)
    repeats = parser.parse_args().repeats
    runs: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ENVIRONMENT["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
        (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        (folder / "test_plain.py").write_text(SUITE, encoding="utf-8")
        for count in range(repeats + 2):
            for key, more in (("with", []), ("without", OFF)):
                took = timed(folder, *more)
                if count >= 2:  # the first ones fill the file cache
                    runs[key].append(took)
        loaded = modules(folder)
        added = loaded - modules(folder, *OFF)
        several = [dict(import_times(folder, added)) for _ in range(7)]
        times = [(name, min(one[name] for one in several)) for name in several[0]]
    rows = []
    for index, clock in enumerate(("wall", "processor")):
        columns = {key: [took[index] for took in values] for key, values in runs.items()}
        pairs = [a - b for a, b in zip(columns["with"], columns["without"], strict=True)]
        medians = [statistics.median(columns[key]) for key in ("with", "without")]
        least = min(columns["with"]) - min(columns["without"])
        figures = (*medians, statistics.median(pairs), least)
        rows.append([clock, *(f"{figure:.1f}" for figure in figures)])
    heads = ["ms", "with", "without", "difference", "of the least"]
    text = [
        f"Start-up of a suite without a marked test: medians of {repeats} pairs of runs, by turns",
        line(),
        "",
        table(rows, heads, "r"),
        "",
        f"goal: under {GOAL_MS:g} ms of wall time; load when measured: {os.getloadavg()[0]:.1f}",
        f"torch imported: {'yes' if 'torch' in loaded else 'no'}",
        f"modules added: {len(added)}, {sum(took for _, took in times):.1f} ms by -X importtime:",
        *(f"  {took:6.2f} {name}" for name, took in times),
    ]
    publish("startup", "\n".join(text))


if __name__ == "__main__":
    main()
