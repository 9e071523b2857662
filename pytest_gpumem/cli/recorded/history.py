"""``gpumem history``: show the figures of baselines by commit, from git."""

from __future__ import annotations

import shlex
import shutil
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.cli.outcome import BAD_INPUT, OK, Outcome
from pytest_gpumem.cli.recorded import history_listing as listing
from pytest_gpumem.cli.recorded.commits import read_history
from pytest_gpumem.cli.recorded.compare import FOLDER, add_folder
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.files.git import GitError, OutsideRepositoryError

if TYPE_CHECKING:
    import argparse

    from pytest_gpumem.baselines.paths import Key
    from pytest_gpumem.cli.recorded.commits import BaselineHistory

HELP = "print how baselines changed from commit to commit"
DESCRIPTION = f"""{HELP[0].upper()}{HELP[1:]}, from git: all tests whose figures each commit
changed, or the figures of one test at each commit, and the cause of each change. Uncommitted
changes come first."""
DEFAULT_COMMITS: Final = 20
"""commits to read, unless a test is named"""
MAX_NAMES: Final = 5
"""maximum number of names that a message suggests"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpumem history``."""
    parser.add_argument(
        "nodeid", metavar="NODEID", nargs="?", help="a test, a test file, or a part of a name"
    )
    parser.add_argument(
        "--device", metavar="KEY", help='only baselines of this device: "virtual-T4"'
    )
    parser.add_argument(
        "-n",
        "--commits",
        metavar="N",
        type=int,
        help=f"read the newest N commits that changed baselines ({DEFAULT_COMMITS}; of a named "
        "test all)",
    )
    add_folder(parser)


def run(arguments: argparse.Namespace) -> Outcome:
    """Return the history of all baselines, or of the tests that are named, as text."""
    name = (arguments.nodeid or "").removeprefix("./")
    limit = arguments.commits
    if limit is not None and limit < 1:
        problem = "this is not a number of commits"
        raise BaselineError(f"--commits={limit}", problem, f"write --commits={DEFAULT_COMMITS}")
    if limit is None and not name:
        limit = DEFAULT_COMMITS
    history = matching_history(arguments, name, limit)
    trouble = tuple(f"gpumem: {error}" for step in history.steps for error in step.errors)
    render = listing.of_tests if name else listing.overview
    rendered = render(history, shutil.get_terminal_size().columns)
    return Outcome(rendered, BAD_INPUT if trouble else OK, trouble)


def matching_history(
    arguments: argparse.Namespace, name: str, limit: int | None
) -> BaselineHistory:
    """Read the history of the tests that match a name: a test, a file, or a part of a name."""
    nodeids: set[str] = set()
    exact = "::" in name or name.endswith(".py")

    def accepts(key: Key) -> bool:
        nodeids.add(key.nodeid)
        if arguments.device and key.device != arguments.device:
            return False
        return name in {key.nodeid, key.module} if exact else name in key.nodeid

    module = name.partition("::")[0] if exact else ""
    directory = Path(arguments.baseline_dir)
    try:
        history = read_history(directory, limit=limit, accept=accepts, module=module)
    except GitError as error:
        remedy = "run gpumem in a git repository, with git installed"
        if isinstance(error, OutsideRepositoryError):
            remedy = "name the baselines' folder with --baseline-dir"
        raise BaselineError(arguments.baseline_dir, str(error), remedy) from error
    if history.steps:
        return history
    if not name and not arguments.device:
        problem = "no commit has a baseline in this folder"
        remedy = (
            "commit baselines, run gpumem from pytest's root folder, or name the folder with "
            "--baseline-dir"
        )
        raise BaselineError(arguments.baseline_dir, problem, remedy)
    words = " ".join(filter(None, (name, arguments.device and f"--device={arguments.device}")))
    if name and not nodeids:
        # ``name`` is a file without a history: look for similar names in all files.
        read_history(directory, accept=accepts)
    tests = {nodeid.partition("::")[2] for nodeid in nodeids}
    similar = get_close_matches(name, nodeids, MAX_NAMES) or get_close_matches(
        name, tests, MAX_NAMES
    )
    folder = arguments.baseline_dir
    options = [] if folder == FOLDER else [f"--baseline-dir={folder}"]
    remedy = f"{shlex.join(['gpumem', 'history', *options])} lists all"
    remedy = f"these do: {', '.join(similar)}" if similar else remedy
    raise BaselineError(words, "no baseline with this name has a history", remedy)
