"""``gpumem show``: a baseline with its breakdown, or the list of all."""

from __future__ import annotations

import shutil
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.baselines.folder import read_folder
from pytest_gpumem.cli.compare import FOLDER, add_folder
from pytest_gpumem.cli.outcome import BAD_INPUT, OK, Outcome
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.report.baseline_listing import details, listing

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Mapping

    from pytest_gpumem.baselines.key import Key
    from pytest_gpumem.measurement import BaselineEntry

HELP = "print a test's baseline with its breakdown, or list all baselines"
DESCRIPTION = f"{HELP.capitalize()}."
MOST_NAMES: Final = 5
"""names that a message suggests"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the subcommand takes."""
    parser.add_argument(
        "nodeid", metavar="NODEID", nargs="?", help="a test, a test file, or a part of a name"
    )
    parser.add_argument("--device", metavar="KEY", help='of this device only: "virtual-T4"')
    add_folder(parser)


def run(arguments: argparse.Namespace) -> Outcome:
    """Show what is there of the baselines that are asked for.

    Raises:
        BaselineError: there are none.
    """
    folder = Path(arguments.baseline_dir)
    figures = read_folder(folder)
    trouble = tuple(f"gpumem: {error}" for error in figures.errors)
    status = BAD_INPUT if trouble else OK
    entries = figures.entries
    if not entries:
        if trouble:
            return Outcome("", status, trouble)
        problem, remedy = "there are no baselines", _where(arguments.baseline_dir)
        raise BaselineError(arguments.baseline_dir, problem, remedy)
    if arguments.device:
        entries = _of_device(entries, arguments.device)
    found = _matching(entries, arguments.nodeid) if arguments.nodeid else entries
    width = shutil.get_terminal_size().columns
    if arguments.nodeid and len({key.nodeid for key in found}) == 1:
        return Outcome(details(found, width), status, trouble)
    return Outcome(listing(found, width), status, trouble)


def _where(folder: str) -> str:
    if folder == FOLDER:
        return "run gpumem from pytest's root folder, or name the folder with --baseline-dir"
    return "record some with pytest --gpumem-update-baselines"


def _of_device(entries: Mapping[Key, BaselineEntry], device: str) -> dict[Key, BaselineEntry]:
    found = {key: entry for key, entry in entries.items() if key.device == device}
    if not found:
        devices = ", ".join(sorted({key.device for key in entries}))
        raise BaselineError(f"--device={device}", "it has no baselines", f"these have: {devices}")
    return found


def _matching(entries: Mapping[Key, BaselineEntry], wanted: str) -> dict[Key, BaselineEntry]:
    """Return what a name means: a test, a file, else all tests that have it in their names."""
    wanted = wanted.removeprefix("./")
    for found in (
        {key for key in entries if key.nodeid == wanted},
        {key for key in entries if key.module == wanted},
        {key for key in entries if wanted in key.nodeid},
    ):
        if found:
            return {key: entry for key, entry in entries.items() if key in found}
    raise BaselineError(
        wanted, "no test with a baseline has this in its name", _near(entries, wanted)
    )


def _near(entries: Collection[Key], wanted: str) -> str:
    names = {key.nodeid for key in entries}
    near = get_close_matches(wanted, names, MOST_NAMES) or get_close_matches(
        wanted, {key.test for key in entries}, MOST_NAMES
    )
    return f"these do: {', '.join(near)}" if near else "gpumem show lists all"
