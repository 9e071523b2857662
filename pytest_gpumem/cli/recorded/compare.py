"""``gpumem compare``: show the changes between two sets of figures."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.paths import baseline_path, folder_of_torch
from pytest_gpumem.cli.outcome import BAD_INPUT, FOUND, OK, Outcome
from pytest_gpumem.cli.recorded import change_list as rendering
from pytest_gpumem.cli.recorded.base_commit import compare_with_commit
from pytest_gpumem.cli.recorded.changes import Changes, pair_entries
from pytest_gpumem.cli.recorded.sources import SourceError, read_directory, read_source
from pytest_gpumem.errors import SpecError
from pytest_gpumem.sizes import parse_tolerance

if TYPE_CHECKING:
    import argparse

    from pytest_gpumem.sizes import Tolerance

HELP = "print what grew, shrank, appeared and disappeared between two sets of figures"
DESCRIPTION = f"""{HELP[0].upper()}{HELP[1:]}: two
reports (.json), two folders of baselines, two git revisions of one folder, or one of each. Or,
with --git, measure the tests of a commit and of the working tree, and fail on growth. Exit status
1: with --fail-on-growth, a peak grew by more than that; 2: an input could not be read."""
FOLDER = "baselines"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpumem compare``."""
    parser.add_argument("old", metavar="A", nargs="?", help="a report, a folder, or a git revision")
    parser.add_argument(
        "new",
        metavar="B",
        nargs="?",
        help="a second report, folder or revision (default: the baselines of the working tree)",
    )
    parser.add_argument(
        "--git",
        metavar="REV",
        help="run pytest in a worktree of this commit, and then here; growth fails, with its "
        "cause. Arguments of pytest stand behind --",
    )
    parser.add_argument(
        "pytest", metavar="PYTEST", nargs="*", help="with --git: pytest's arguments"
    )
    parser.add_argument(
        "--format", choices=("table", "markdown"), default="table", help="format of the output"
    )
    parser.add_argument(
        "--fail-on-growth",
        metavar="SIZE",
        help="exit with status 1 if peak allocated or peak reserved grew, by more than this: "
        '"2%%", "64MiB" or "2%%, 64MiB" (the larger)',
    )
    parser.add_argument(
        "--across",
        action="store_true",
        help="show all changes from one update of torch, CUDA or the driver as one change",
    )
    add_folder(parser)


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the baselines' folder."""
    parser.add_argument(
        "--baseline-dir",
        metavar="DIR",
        default=FOLDER,
        type=folder_of_torch,
        help=f"folder of the baselines, relative to the current folder (default: {FOLDER}); if "
        "this folder has a subfolder for each version of torch (torch-2.15), the "
        "subfolder of the installed torch is used",
    )


def growth_limit(arguments: argparse.Namespace) -> Tolerance | None:
    """Parse ``--fail-on-growth``; None if it is not given."""
    if arguments.fail_on_growth is None:
        return None
    try:
        return parse_tolerance(arguments.fail_on_growth)
    except SpecError as error:
        option = f"--fail-on-growth={arguments.fail_on_growth}"
        raise SpecError(option, error.problem, error.remedy) from error


def run(arguments: argparse.Namespace) -> Outcome:
    """Compare, and return the changes in the chosen format."""
    words = [arguments.old, arguments.new, *arguments.pytest]
    if arguments.git is not None:
        return compare_with_commit(arguments.git, [word for word in words if word is not None])
    if arguments.old is None or arguments.pytest:
        problem = "this compares two sets of figures"
        raise SpecError("gpumem compare", problem, "name one or two, or write --git=origin/main")
    limit = growth_limit(arguments)
    folder = Path(arguments.baseline_dir)
    old = read_source(arguments.old, folder)
    if arguments.new is not None:
        new = read_source(arguments.new, folder)
    elif old.of_report:
        problem = "a report needs a second input to compare with"
        raise SourceError(arguments.old, problem, "name another report, a folder or a git revision")
    else:
        new = read_directory(folder, arguments.baseline_dir)
    sides = old, new
    trouble = [f"gpumem: {error}" for side in sides for error in side.figures.errors]
    if not any(side.figures.files for side in sides):
        problem = "neither input has a baseline to compare"
        raise SourceError(f"{old.name}, {new.name}", problem, "look at --baseline-dir")
    entries = pair_entries(
        old.figures.entries,
        new.figures.entries,
        old_oom=old.out_of_memory,
        new_oom=new.out_of_memory,
    )
    # If a file could not be read on one side, its tests did not appear or vanish: skip them.
    unread = old.figures.unread | new.figures.unread
    entries = [
        change
        for change in entries
        if not unread or baseline_path(Path(), change.key.device, change.key.module) not in unread
    ]
    remarks = tuple(remark for side in sides for remark in side.remarks)
    changes = Changes(old.name, new.name, tuple(entries), remarks, across=arguments.across)
    if arguments.format == "table":
        rendered = rendering.table(changes, shutil.get_terminal_size().columns)
    else:
        rendered = rendering.changes_markdown(changes)
    status = OK
    if trouble:
        status = BAD_INPUT
    elif limit is not None and any(entry.grew_beyond(limit) for entry in entries):
        status = FOUND
    return Outcome(rendered, status, tuple(trouble))
