"""``gpumem compare``: what became of the figures between two sets of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.changes import Changes, pair_entries
from pytest_gpumem.baselines.paths import baseline_path
from pytest_gpumem.cli.outcome import BAD_INPUT, FOUND, OK, Outcome
from pytest_gpumem.cli.sources import SourceError, read_directory, read_source
from pytest_gpumem.errors import SpecError
from pytest_gpumem.report import changes as rendering
from pytest_gpumem.sizes import parse_tolerance

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from pytest_gpumem.baselines.changes import EntryChange
    from pytest_gpumem.cli.sources import Source
    from pytest_gpumem.sizes import Tolerance

HELP = "say what grew, shrank, appeared and vanished between two sets of figures"
DESCRIPTION = f"""{HELP.capitalize()}: two reports (.json), two folders of baselines, two git
revisions of one folder, or one of each. The exit status is 1 with --fail-on-growth if a peak grew
by more than that, 2 if something could not be read, else 0."""
FOLDER = "baselines"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the subcommand takes."""
    parser.add_argument("before", metavar="A", help="a report, a folder, or a git revision")
    parser.add_argument(
        "after", metavar="B", nargs="?", help="another (the baselines of the working tree)"
    )
    parser.add_argument(
        "--format", choices=tuple(rendering.RENDERERS), default="table", help="of what is printed"
    )
    parser.add_argument(
        "--fail-on-growth",
        metavar="SIZE",
        help='exit with status 1 if a peak grew by more: "2%%", "64MiB" or "2%%, 64MiB" (the '
        "larger), of either peak",
    )
    parser.add_argument(
        "--across",
        action="store_true",
        help="tell what moved together with torch, CUDA or the driver as one",
    )
    add_folder(parser)


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the folder of the baselines."""
    parser.add_argument(
        "--baseline-dir",
        metavar="DIR",
        default=FOLDER,
        help=f"folder of the baselines, from here ({FOLDER})",
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Compare, and say what became of the figures.

    Raises:
        GpuMemError: an argument that cannot be understood, or that nothing can be read of.
    """
    limit = _limit(arguments.fail_on_growth)
    folder = Path(arguments.baseline_dir)
    before = read_source(arguments.before, folder)
    if arguments.after is not None:
        after = read_source(arguments.after, folder)
    elif before.of_report:
        problem = "a report is compared with another one"
        raise SourceError(arguments.before, problem, "name that, or a folder or a git revision")
    else:
        after = read_directory(folder, arguments.baseline_dir)
    sides = before, after
    trouble = [f"gpumem: {error}" for side in sides for error in side.figures.errors]
    if not any(side.figures.files for side in sides):
        problem = "neither has a baseline to compare"
        raise SourceError(f"{before.name}, {after.name}", problem, "look at --baseline-dir")
    moves = _moves(before, after)
    remarks = tuple(text for side in sides for text in side.remarks)
    changes = Changes(before.name, after.name, tuple(moves), remarks, across=arguments.across)
    status = BAD_INPUT if trouble else _status(moves, limit)
    return Outcome(_rendered(changes, arguments.format), status, tuple(trouble))


def _moves(before: Source, after: Source) -> list[EntryChange]:
    """Pair what could be read: what is of a file that could not did not appear, or vanish."""
    moves = pair_entries(
        before.figures.entries,
        after.figures.entries,
        old_oom=before.out_of_memory,
        new_oom=after.out_of_memory,
    )
    unread = before.figures.unread | after.figures.unread
    if not unread:
        return moves
    return [it for it in moves if baseline_path(Path(), it.key.device, it.key.module) not in unread]


def _limit(text: str | None) -> Tolerance | None:
    if text is None:
        return None
    try:
        return parse_tolerance(text)
    except SpecError as error:
        raise SpecError(f"--fail-on-growth={text}", error.problem, error.remedy) from error


def _status(moves: Sequence[EntryChange], limit: Tolerance | None) -> int:
    return FOUND if limit is not None and any(it.grew_beyond(limit) for it in moves) else OK


def _rendered(changes: Changes, form: str) -> str:
    if form == "table":
        return rendering.table(changes, shutil.get_terminal_size().columns)
    return rendering.RENDERERS[form](changes)
