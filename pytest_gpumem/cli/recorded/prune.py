"""``gpumem prune``: list baselines of tests that are gone, and delete them if asked to."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from pytest_gpumem.baselines.file_format import BaselineFile, encode
from pytest_gpumem.baselines.paths import Key, remove_file, replace_file
from pytest_gpumem.baselines.store import BaselineStore
from pytest_gpumem.cli.outcome import BAD_INPUT, FOUND, OK, Outcome, confirmed
from pytest_gpumem.cli.recorded import collect_plugin
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.report.text import printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

HELP = "list baselines whose tests are gone; with --delete, delete them"
DESCRIPTION = f"""{HELP[0].upper()}{HELP[1:]}. pytest collects all tests, with the given
arguments. Exit status 1: there are such baselines, and they were not deleted; 2: not all tests
could be collected. If a test file exists but was skipped or left out, its baselines are not
listed."""
SHOWN_LINES: Final = 20
"""last lines of pytest's output, shown if it fails"""
_COLLECTED: Final = (0, 1)
"""pytest's exit statuses with which all was collected: 1 is of --gpumem-stale=fail"""
_NO_TESTS: Final = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpumem prune``."""
    parser.add_argument(
        "--delete", action="store_true", help="delete these baselines, without a question"
    )
    parser.allow_abbrev = False  # all other options are pytest's, and some of these begin alike
    parser.usage = "gpumem prune [--delete] [argument for pytest ...]"


def run(arguments: argparse.Namespace) -> Outcome:
    """List stale baselines; delete them with ``--delete``, or after a yes on the terminal."""
    collected = _collect([each for each in arguments.pytest_arguments if each != "--"])
    folder = Path(collected.directory)
    stale = collected.stale
    if not stale:
        return Outcome("gpumem: every baseline has a test")
    lines = [printable(f"stale: {key.nodeid} on {key.device}") for key in stale]
    number = "1 baseline" if len(stale) == 1 else f"{len(stale)} baselines"
    verb = "has" if len(stale) == 1 else "have"
    lines.append(f"gpumem: {number} in {printable(str(folder))} {verb} no test any more")
    if not arguments.delete:
        print("\n".join(lines))
        if not confirmed("delete them?"):
            return Outcome("gpumem: nothing was deleted; --delete deletes them", FOUND)
        lines = []
    errors = remove(BaselineStore(folder), stale)
    if errors:
        return Outcome("\n".join(lines), BAD_INPUT, tuple(f"gpumem: {error}" for error in errors))
    return Outcome("\n".join([*lines, "gpumem: deleted"]), OK)


class Collected(msgspec.Struct, forbid_unknown_fields=True):
    """The list that :mod:`pytest_gpumem.cli.recorded.collect_plugin` writes."""

    directory: str
    partial: str
    """why not all tests were collected"""
    stale: list[Key]


def _collect(arguments: Sequence[str]) -> Collected:
    """Have pytest collect all tests; return the answer of the plugin in its session."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "collected.json"
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
        process = subprocess.run(
            [*command, "-p", collect_plugin.__name__, *arguments],
            env={**os.environ, collect_plugin.VARIABLE: str(answer)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        last_lines = process.stdout.decode(errors="replace").splitlines()[-SHOWN_LINES:]
        command_text = shlex.join(["pytest", "--collect-only", *arguments])
        collected = None
        if answer.exists():
            try:
                collected = msgspec.convert(json.loads(answer.read_bytes()), Collected)
            except (ValueError, RecursionError, msgspec.ValidationError) as error:
                problem = f"its list of baselines cannot be read: {error}"
                remedy = f"run {shlex.join(['gpumem', 'prune', *arguments])} again"
                raise BaselineError(command_text, problem, remedy) from None
    if process.returncode not in (*_COLLECTED, _NO_TESTS):
        print("\n".join(map(printable, last_lines)), file=sys.stderr)
    if collected is not None and collected.partial:
        remedy = "run gpumem prune where pytest collects all tests, and name no tests"
        raise BaselineError(
            command_text, f"not all tests were collected: {collected.partial}", remedy
        )
    if process.returncode not in _COLLECTED:
        problem = f"ended with exit status {process.returncode}"
        raise BaselineError(command_text, problem, "correct the errors that pytest printed above")
    if collected is None:
        remedy = "run gpumem prune from pytest's root folder, or add --gpumem-baseline-dir=DIR"
        raise BaselineError(command_text, "there is no folder of baselines", remedy)
    return collected


def remove(store: BaselineStore, keys: Iterable[Key]) -> list[BaselineError]:
    """Remove tests' baselines, and files that are then empty; return why any stayed."""
    errors: list[BaselineError] = []
    groups: dict[tuple[str, str], set[str]] = {}
    for key in keys:
        groups.setdefault((key.device, key.module), set()).add(key.test)

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except BaselineError as error:
            errors.append(error)

    with noted(), store.locked():
        for (device_key, module), tests in sorted(groups.items()):
            with noted():
                file, path = store.read(device_key, module), store.path(device_key, module)
                if file is None or tests.isdisjoint(file.tests):
                    continue
                remaining = {name: parts for name, parts in file.tests.items() if name not in tests}
                if remaining:
                    kept_file = BaselineFile(file.device, module, remaining, file.labels)
                    replace_file(path, encode(kept_file))
                else:
                    remove_file(path, store.directory)
    return errors
