"""Run a family's rows, each process of them in an interpreter with the rows' torch.

A family is a module with ``CARD`` or ``card(row)``, with ``rows()``, the published rows, with
``step(row, process)``, which runs a row on the virtual GPU and returns its figures, and with
``report(answers)``, the result. Optional are:
``group(row)``: rows of the same group run in one process, one after the other.
``steps(process)``, in place of ``step``: yields the name and the figures of each row, if a row's
figures depend on the rows before it.
``VARIANTS``: each process runs once per variant, with its environment variables.
``varies(row)``: whether the row runs with variants other than the first; by default each row does.
``folders(row)``: parts of the source that the row needs, at the row's commit.
``source(row)``: the name of the row's source, if a family has several; by default the group's.
``environment(row)``: environment variables of the row's process.
``SECONDS``: time limit of a process; ``PACKAGES``: packages whose versions the result names.
"""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.harness import ask, commit, open_card, versions

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from pytest_gpumem.devices.virtual.device import VirtualDevice

LATE, FAILED = "took too long", "ended with an error"
ONE_VARIANT: dict[str, dict[str, str]] = {"": {}}
Row = dict[str, str]
"""a line of a file in data/, with its name as "row" """


class Process(NamedTuple):
    """Rows that run one after the other in this process."""

    rows: list[Row]
    variant: str
    device: VirtualDevice
    source: Path
    """folder of the rows' source, if the family has one"""


class Answers(NamedTuple):
    """The figures of a family's rows."""

    rows: list[Row]
    figures: dict[str, dict[str, Any]]
    """by variant and row"""
    versions: dict[str, str]
    """by row: the versions of torch, cuDNN and ``PACKAGES``"""
    without: dict[str, str]
    """by row without figures: the reason"""
    commits: dict[str, str]
    """by row: the commits at which its figures were made, which are older if read from a file"""

    @property
    def answered(self) -> list[Row]:
        """The rows that have a figure."""
        return [row for row in self.rows if row["row"] not in self.without]

    def torch(self, row: Row) -> str:
        """Return the torch that a row ran with, such as "2.8.0"."""
        return self.versions[row["row"]].removeprefix("torch ").partition(",")[0].partition("+")[0]

    def here(self) -> str:
        """Return a line with the versions, which must be the same for all rows."""
        (version,) = set(self.versions.values())
        return f"here: {version}"


def looked(row: Row) -> str:
    """Return the group of a row by whether somebody had looked at it before its first run."""
    return "never looked at" if row["unseen"] == "1" else "looked at"


def unseen(row: Row) -> str:
    """Return the cell of the column "never looked at"."""
    return "yes" if row["unseen"] == "1" else ""


def missing(answers: Answers) -> list[str]:
    """Return a line for each reason why rows have no figure."""
    reasons = sorted(set(answers.without.values()))
    names = {why: [row for row, it in answers.without.items() if it == why] for why in reasons}
    return [f"{why}: {len(rows)} rows: {'; '.join(rows)}" for why, rows in names.items()]


def within(groups: dict[str, list[float]]) -> list[str]:
    """Return a line for each group on how many rows have an error of at most 2 %."""
    return [
        f"{group}: {sum(abs(error) <= 2 for error in errors)} of {len(errors)} rows within 2 %"
        for group, errors in sorted(groups.items())
    ]


# -- in the worker --


def work(name: str, task: dict[str, Any]) -> None:
    """Run the rows of a process here; print their figures, and the versions."""
    from pytest_gpumem.devices.cards import find_card

    family = import_module(f"benchmarks.published.{name}")
    rows = [row for row in family.rows() if row["row"] in task["rows"]]
    card = family.card(rows[0]) if hasattr(family, "card") else find_card(family.CARD)
    device = open_card(card)
    process = Process(rows, task["variant"], device, Path(task["source"]))
    figures = dict(family.steps(process) if hasattr(family, "steps") else steps(family, process))
    packages = getattr(family, "PACKAGES", ())
    more = [f"{package} {metadata.version(package)}" for package in packages]
    print(json.dumps([figures, ", ".join([versions(device), *more])]))


def steps(family: ModuleType, process: Process) -> Iterator[tuple[str, Any]]:
    """Run rows that do not depend on each other."""
    for row in process.rows:
        yield row["row"], family.step(row, process)


def with_range(step: Callable[[], Any], device: VirtualDevice) -> tuple[list[int], list[Any]]:
    """Run a step as a test does, with the process's device.

    Returns:
        the peaks allocated and reserved in bytes; and the range: both peaks at the lower end, both
        at the upper end, and the reason. Without a range: no peaks, and notes if there are any.
    """
    from pytest_gpumem.replay.size_range import with_ranges
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.run import Run

    spec = MemorySpec()
    with Run.open(spec, device, Path.cwd(), record=True) as run:
        run.start()
    step()
    gc.collect()
    measured = run.measurement()
    recording = run.meter.recording.stop()
    run.meter.release()
    _, ranged = with_ranges(run, {"": (spec, measured)}, recording)[""]
    run.close()
    device.open(device.card, 1)  # run.close() has closed it
    peaks = [measured.peak_allocated, measured.peak_reserved]
    if ranged.range is None:
        texts = [note.text for note in ranged.notes if note not in measured.notes]
        return peaks, [[], "; ".join(texts)]
    ends = (ranged.range.least[0], ranged.range.most[0])
    sizes = [size for end in ends for size in (end.allocated, end.reserved)]
    return peaks, [sizes, ranged.range.reason]


def holds(ends: Sequence[float], real: float) -> str:
    """Return a range's cell: its ends, and whether the measured figure lies between them.

    The figure may be outside by 0.1 %, the tolerance of a baseline.
    """
    least, most = ends
    held = least * 0.999 <= real <= most * 1.001
    return f"{least:.2f} to {most:.2f}: {'held' if held else 'NOT HELD'}"


# -- the processes --


def run(family: ModuleType, options: argparse.Namespace) -> str:
    """Run the chosen rows; return the report."""
    rows = family.rows()
    assert len({row["row"] for row in rows}) == len(rows), "two rows of one name"
    chosen = [row for row in rows if options.only in row["row"]]
    if options.seen:
        chosen = [row for row in chosen if row["unseen"] == "0"]
    kept: dict[str, Any] = {}
    if options.keep and Path(options.keep).exists():
        kept = json.loads(Path(options.keep).read_text(encoding="utf-8"))
    answers = Answers(chosen, {}, {}, {}, {})
    for variant in getattr(family, "VARIANTS", ONE_VARIANT):
        answers.figures[variant] = {}
        for group, together in processes(family, rows).items():
            if not any(row in chosen for row in together):
                continue
            if variant and hasattr(family, "varies") and not family.varies(together[0]):
                continue
            key = f"{group} {variant}"
            if key not in kept and options.kept:
                answers.without.update((row["row"], "not run") for row in together)
                continue
            if key not in kept:
                kept[key] = answer(family, options, group, together, variant)
                print(key, kept[key], file=sys.stderr, flush=True)
                if options.keep:
                    Path(options.keep).write_text(json.dumps(kept), encoding="utf-8")
            if kept[key] in (LATE, FAILED):
                answers.without.update((row["row"], kept[key]) for row in together)
                continue
            figures, version, made = kept[key]
            answers.figures[variant] |= figures
            answers.versions.update(dict.fromkeys(figures, version))
            for row in figures:  # variants may have run at different commits
                before = answers.commits.get(row, made)
                answers.commits[row] = before if made in before else f"{before}, {made}"
    return family.report(answers)


def processes(family: ModuleType, rows: list[Row]) -> dict[str, list[Row]]:
    """Return rows by the process that they run in."""
    group = getattr(family, "group", lambda row: row["row"])
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(group(row), []).append(row)
    return found


def answer(
    family: ModuleType, options: argparse.Namespace, group: str, rows: list[Row], variant: str
) -> list[Any] | str:
    """Run a process; return its figures by row, its versions and commit, or why it failed."""
    name = family.__name__.rpartition(".")[2]
    version = ".".join(rows[0].get("torch", "").split(".")[:2])
    python = chosen_of(options.python, version, sys.executable)
    source_name = family.source(rows[0]) if hasattr(family, "source") else group
    source = chosen_of(options.source, source_name, "")
    variables = getattr(family, "VARIANTS", ONE_VARIANT)[variant]
    if hasattr(family, "environment"):
        variables = variables | family.environment(rows[0])
    # Use empty caches: code from this machine's caches is not timed as in a first run.
    with checkout(family, source, rows[0]) as place, tempfile.TemporaryDirectory() as caches:
        variables = variables | {"TORCHINDUCTOR_CACHE_DIR": caches}
        task = {"rows": [row["row"] for row in rows], "variant": variant, "source": place}
        try:
            figures, there = ask(
                python,
                "benchmarks.published",
                *(name, "--worker", json.dumps(task)),
                timeout=getattr(family, "SECONDS", None),
                **variables,
            )
        except subprocess.TimeoutExpired:
            return LATE
        except subprocess.CalledProcessError:
            if not options.keep:  # with --keep, the next rows still run
                raise
            return FAILED
    return [figures, there, commit()]


def chosen_of(given: list[str], name: str, default: str) -> str:
    """Return the path given for a name, or the one without a name."""
    paths = dict(it.split("=", 1) if "=" in it else ("", it) for it in given)
    return paths.get(name) or paths.get("", default)


@contextmanager
def checkout(family: ModuleType, source: str, row: Row) -> Iterator[str]:
    """Make a folder with the parts of a source that a row needs, at the row's commit."""
    if not hasattr(family, "folders"):
        yield str(Path(source).resolve()) if source else ""
        return
    command = ["git", "-C", source, "archive", row["commit"], *family.folders(row)]
    archive = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        yield folder
