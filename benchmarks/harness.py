"""Helpers of the benchmarks: provenance of figures, processes, tables, results."""

from __future__ import annotations

import csv
import datetime as dt
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.devices.virtual.device import VirtualDevice

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks" / "data"
RESULTS = ROOT / "benchmarks" / "results"
MIB, GIB = 2**20, 2**30
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""variables that keep Hugging Face's libraries from downloading"""


# -- where a figure was made --


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
    """Return the commit's short hash, followed by "+" if files of the package differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    try:
        head = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--", "pytest_gpumem")
    except OSError:
        return "unknown"
    return f"{head}{'+' if changed else ''}" if head else "unknown"


def packages(*names: str) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
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
    """Return the provenance as one line, with the versions of the packages ``names``."""
    parts = {**where(), **packages("torch", "pytest", *names)}
    return "; ".join(f"{name} {value}" for name, value in parts.items())


# -- data and results --


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file in data/, in order."""
    with (DATA / name).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        import tomllib
    except ImportError:  # Python 3.10, where pytest requires tomli
        import tomli as tomllib
    return tomllib.loads(path.read_text(encoding="utf-8"))


def table(rows: Iterable[Iterable[object]], heads: Iterable[str], align: str = "") -> str:
    """Return a table whose cells are shown as they are.

    Args:
        rows: the cells of each row.
        heads: the columns' titles.
        align: "l" or "r" for each column; the last letter also applies to all later columns.
    """
    from tabulate import tabulate

    heads = list(heads)
    letters = align + align[-1:] * (len(heads) - len(align))
    sides = [{"l": "left", "r": "right"}[letter] for letter in letters]
    return tabulate(rows, heads, disable_numparse=True, colalign=sides or None)


def publish(name: str, text: str, *, keep: bool = True) -> None:
    """Print a result, and write it to results/ if ``keep``."""
    print(text)
    if keep:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.txt").write_text(f"{text}\n", encoding="utf-8")


def percent(value: float, real: float) -> float:
    """Return the error of a value in percent."""
    return 100 * (value - real) / real


def spread(errors: Iterable[float], median: int = 2, worst: int = 2) -> str:
    """Return median and maximum of absolute errors in percent, with these numbers of digits."""
    sizes = [abs(error) for error in errors]
    return f"median {statistics.median(sizes):.{median}f} %, worst {max(sizes):.{worst}f} %"


def spreads(groups: dict[str, list[float]], median: int = 2) -> list[str]:
    """Return a line for each group of rows: number, median and largest error."""
    return [
        f"{group}: {len(errors)} rows, {spread(errors, median)}"
        for group, errors in sorted(groups.items())
    ]


# -- processes --


def ask(
    python: str, module: str, *words: str, timeout: float | None = None, **environment: str
) -> Any:  # noqa: ANN401 - what the module prints
    """Run a module of this checkout in an interpreter; return the JSON of the last line it prints.

    Args:
        python: the interpreter.
        module: a module of the package benchmarks.
        words: the module's arguments.
        timeout: seconds, after which ``subprocess.TimeoutExpired`` is raised.
        environment: variables; this checkout comes before PYTHONPATH.
    """
    path = environment.pop("PYTHONPATH", os.environ.get("PYTHONPATH"))
    places = os.pathsep.join(filter(None, [str(ROOT), path]))
    done = subprocess.run(
        [python, "-m", module, *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=timeout,
        env={**os.environ, **environment, "PYTHONPATH": places},
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def output_of(*command: str, **environment: str) -> str:
    """Run a command in the project's folder, which must succeed; return its output."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


class Session(NamedTuple):
    """A session of pytest: exit status, output, wall-clock seconds and CPU seconds."""

    status: int
    output: str
    wall: float
    cpu: float


def session(
    folder: Path | str, *options: str, environment: dict[str, str] | None = None
) -> Session:
    """Run pytest in a folder, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        _, ended, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(ended)
        output.seek(0)
        text = output.read().decode()
    return Session(process.returncode, text, wall, usage.ru_utime + usage.ru_stime)


def forked(work: Callable[..., Iterable[Any]], *arguments: object) -> Iterator[Any]:
    """Yield the JSON records that a function yields in a fork of this process.

    If the fork fails, the last record is ``{"ended": why}``.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(read_end)
        try:
            with os.fdopen(write_end, "w") as stream:
                for record in work(*arguments):
                    stream.write(json.dumps(record) + "\n")
                    stream.flush()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end) as stream:
        yield from map(json.loads, stream)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        yield {"ended": signal.Signals(-status).name if status < 0 else f"exit status {status}"}


def in_fork(work: Callable[..., Iterable[Any]], *arguments: object) -> Any:  # noqa: ANN401 - of JSON
    """Return the first record that a function yields in a fork, or ``{"ended": why}``."""
    record, *_ = forked(work, *arguments)
    return record


# -- the virtual GPU of a process that uses a single card --


def open_card(card: Card) -> VirtualDevice:
    """Load the virtual GPU in this process as a card; torch must not be imported yet."""
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    device = VirtualDevice.load(card)
    device.open(card, 1)
    return device


def versions(device: VirtualDevice) -> str:
    """Return the versions of torch and cuDNN in this process.

    Raises:
        SystemExit: the process called functions that the virtual GPU does not support.
    """
    import torch

    if unsupported := sorted(device.library.unsupported()):
        raise SystemExit(f"not supported: {', '.join(unsupported)}")
    return f"torch {torch.__version__}, cuDNN {device.library.cudnn_found()}"


# -- environments without NVIDIA's packages --

LIGHT: dict[str, list[str] | None] = {
    "all packages": None,
    "without NVIDIA's but cuDNN": ["--cudnn"],
    "without NVIDIA's": [],
}
"""by kind of environment: the options of ``gpumem light``; None to leave nothing out"""


def excludes(folder: Path, options: list[str] | None) -> list[str]:
    """Write the names from ``gpumem light --excludes`` to a file; return uv's options for it."""
    if options is None:
        return []
    names = output_of(sys.executable, "-m", "pytest_gpumem", "light", "--excludes", *options)
    path = folder / "excludes.txt"
    path.write_text(names, encoding="utf-8")
    return ["--excludes", str(path)]
