"""``gpumem diff``: the growth from one snapshot of PyTorch's allocator to another."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from pytest_gpumem.attribution.dumps.growth import growth_by_device
from pytest_gpumem.attribution.dumps.held import held_memory
from pytest_gpumem.attribution.dumps.reading import read_dump
from pytest_gpumem.cli.compare import add_growth_limit, growth_limit
from pytest_gpumem.cli.outcome import FOUND, OK, Outcome
from pytest_gpumem.report.dumps import growth_text as rendering

if TYPE_CHECKING:
    import argparse

HELP = "print what grew between two snapshots of PyTorch's allocator, by source line"
DESCRIPTION = f"""{HELP[0].upper()}{HELP[1:]}: at the peak of the recorded history, or, with
--at-end, at the time of the snapshot. A snapshot is a file of --gpumem-snapshots or of
torch.cuda.memory._dump_snapshot. The file is read as plain containers only: a pickle with any other
object is refused, and no code of the pickle runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpumem diff``."""
    parser.add_argument("old", metavar="A.pickle", help="a snapshot")
    parser.add_argument("new", metavar="B.pickle", help="another")
    parser.add_argument(
        "--at-end", action="store_true", help="compare the memory at the time of each snapshot"
    )
    parser.add_argument("--all", action="store_true", help="list every line")
    parser.add_argument(
        "--format", choices=tuple(rendering.RENDERERS), default="table", help="format of the output"
    )
    add_growth_limit(parser, "a device's allocated memory grew")


def run(arguments: argparse.Namespace) -> Outcome:
    """Return the growth."""
    limit = growth_limit(arguments)
    old, new = (
        held_memory(read_dump(name), at_end=arguments.at_end)
        for name in (arguments.old, arguments.new)
    )
    devices = tuple(growth_by_device(old, new))
    changes = rendering.DumpChanges(arguments.old, arguments.new, devices, arguments.all)
    if arguments.format == "table":
        rendered = rendering.growth_table(changes, shutil.get_terminal_size().columns)
    else:
        rendered = rendering.RENDERERS[arguments.format](changes)
    if not devices:
        rendered = f"{rendered}\n\nneither snapshot has memory of any device"
    grew = limit is not None and any(
        device.difference > limit.allowance(device.old.allocated) for device in devices
    )
    return Outcome(rendered, FOUND if grew else OK)
