"""What every benchmark says of the circumstances that its figures were made in."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def cpu() -> str:
    """Return the processor's name and number of cores."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(it.partition(":")[2].strip() for it in lines if it.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {os.cpu_count()} cores"


def commit() -> str:
    """Return git's commit, "+" behind it where files of the package differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--", "pytest_gpumem")
    except OSError:
        return "unknown"
    return f"{head}{'+' if changed else ''}" if head else "unknown"


def packages(*names: str) -> dict[str, str]:
    """Return the versions of packages, of those that are there."""
    there = [name for name in names if importlib.util.find_spec(name)]
    return {name: importlib.metadata.version(name) for name in there}


def where() -> dict[str, str]:
    """Return date, machine, Python and commit."""
    now = dt.datetime.now(dt.timezone.utc)
    return {
        "date": now.strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu(),
        "python": platform.python_version(),
        "commit": commit(),
    }


def line(*names: str) -> str:
    """Return the provenance as one line; ``names`` are packages whose versions to say."""
    parts = {**where(), **packages("torch", "pytest", *names)}
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def publish(name: str, text: str) -> None:
    """Print a result, and keep it in results/."""
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.txt").write_text(f"{text}\n", encoding="utf-8")
