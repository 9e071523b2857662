"""``gpumem show``: a baseline with its breakdown, or the list of all."""

from __future__ import annotations

import shlex
import shutil
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.cli.outcome import BAD_INPUT, OK, Outcome
from pytest_gpumem.cli.recorded.compare import FOLDER, add_folder
from pytest_gpumem.cli.recorded.folder import read_folder
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.judge.verdict import UpdateCommand
from pytest_gpumem.report.baseline_listing import details, listing

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Mapping

    from pytest_gpumem.baselines.paths import Key
    from pytest_gpumem.measurement import BaselineEntry

HELP = "print a test's baseline with its breakdown, or list all baselines"
DESCRIPTION = f"{HELP[0].upper()}{HELP[1:]}."
MAX_NAMES: Final = 5
"""names that a message suggests"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpumem show``."""
    add_choice(parser)
    add_folder(parser)


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose baselines."""
    parser.add_argument(
        "nodeid", metavar="NODEID", nargs="?", help="a test, a test file, or a part of a name"
    )
    parser.add_argument(
        "--device", metavar="KEY", help='only baselines of this device: "virtual-T4"'
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Return the baselines that were asked for, one in detail, several as a list."""
    folder = Path(arguments.baseline_dir)
    figures = read_folder(folder)
    trouble = tuple(f"gpumem: {error}" for error in figures.errors)
    status = BAD_INPUT if trouble else OK
    entries = figures.entries
    if not entries:
        if trouble:
            return Outcome("", status, trouble)
        # From the working folder; the option of pytest starts from its root folder.
        option = f"--gpumem-baseline-dir={folder.absolute()}"
        remedy = f"record some with {UpdateCommand(options=(option,))}"
        if arguments.baseline_dir == FOLDER:
            remedy = (
                "record some with pytest --gpumem-update-baselines, run gpumem from pytest's root "
                "folder, or name the folder with --baseline-dir"
            )
        raise BaselineError(arguments.baseline_dir, "there are no baselines", remedy)
    if arguments.device:
        devices = sorted({key.device for key in entries})
        entries = {key: entry for key, entry in entries.items() if key.device == arguments.device}
        if not entries:
            problem = "this device has no baselines"
            remedy = f"these have: {', '.join(devices)}"
            raise BaselineError(f"--device={arguments.device}", problem, remedy)
    if arguments.nodeid:
        entries = _matching(entries, arguments.nodeid, arguments.baseline_dir)
    width = shutil.get_terminal_size().columns
    if arguments.nodeid and len({key.nodeid for key in entries}) == 1:
        return Outcome(details(entries, width), status, trouble)
    return Outcome(listing(entries, width), status, trouble)


def _matching(
    entries: Mapping[Key, BaselineEntry], name: str, folder: str
) -> dict[Key, BaselineEntry]:
    """Return the entries that a name means: a test, a file, else any test with it in its name."""
    name = name.removeprefix("./")
    for keys in (
        {key for key in entries if key.nodeid == name},
        {key for key in entries if key.module == name},
        {key for key in entries if name in key.nodeid},
    ):
        if keys:
            return {key: entry for key, entry in entries.items() if key in keys}
    similar = similar_names(name, {key.nodeid for key in entries})
    remedy = similar or f"{command_for_all('show', folder)} lists all"
    raise BaselineError(name, "no test with a baseline has this text in its name", remedy)


def command_for_all(name: str, folder: str) -> str:
    """Return the subcommand that lists all baselines of a folder."""
    options = [] if folder == FOLDER else [f"--baseline-dir={folder}"]
    return shlex.join(["gpumem", name, *options])


def similar_names(name: str, nodeids: Collection[str]) -> str:
    """Return the tests with a name like one, as a message's remedy; "" if none is."""
    tests = {nodeid.partition("::")[2] for nodeid in nodeids}
    similar = get_close_matches(name, nodeids, MAX_NAMES) or get_close_matches(
        name, tests, MAX_NAMES
    )
    return f"these do: {', '.join(similar)}" if similar else ""
