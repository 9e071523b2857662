"""The gpumem command: run measures any program; compare, show and prune are about baselines."""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tabulate import tabulate

from pytest_gpumem.commands import Outcome, compare, fit, prune, read_max_gib, show_error
from pytest_gpumem.commands import show as listing
from pytest_gpumem.devices.cards import CARDS, Card, find_card
from pytest_gpumem.devices.choose import DEFAULT_CARD, choose
from pytest_gpumem.errors import DeviceError, GpuMemError, SpecError
from pytest_gpumem.meter import Meter
from pytest_gpumem.oom import WATCH, find_out_of_memory, site_of
from pytest_gpumem.records import OutOfMemory, Peak
from pytest_gpumem.report.text import can_encode, encodable, printable
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.devices.base import Device
    from pytest_gpumem.records import Measurement

USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130
"""128 and the number of SIGINT, as shells have it"""
MOST_DEVICES: Final = 16
COMMANDS: Final = {"fit": fit, "compare": compare, "show": listing, "prune": prune}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command != "prune":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest  # for pytest
    try:
        if arguments.command == "cards":
            print(cards_table())
            return 0
        if arguments.command in COMMANDS:
            return _tell(COMMANDS[arguments.command].run(arguments))
        return _run(arguments)
    except GpuMemError as error:
        print(f"gpumem: {printable(str(error))}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def _tell(outcome: Outcome) -> int:
    """Print what a subcommand has to say; return its status."""
    for line in outcome.trouble:
        print(printable(line), file=sys.stderr)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if outcome.text:
        with contextlib.suppress(BrokenPipeError):  # of a reader that has seen enough
            print(encodable(outcome.text, ascii_only=not can_encode("…→", encoding)), flush=True)
    return outcome.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpumem", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("cards", help="list the cards that the virtual GPU can be")
    for name, module in COMMANDS.items():
        more = commands.add_parser(name, help=module.HELP, description=module.DESCRIPTION)
        module.add_arguments(more)
    run = commands.add_parser(
        "run",
        help="run a program on a virtual GPU (or a real one) and say its peaks",
        usage="gpumem run [options] (SCRIPT | -m MODULE) [argument ...]",
    )
    run.add_argument("--card", metavar="NAME", help=f"card of the virtual GPU ({DEFAULT_CARD})")
    run.add_argument(
        "--device",
        choices=("auto", "cuda", "virtual"),
        help="auto (a real GPU, else the virtual one; virtual if --card is given), cuda, virtual",
    )
    run.add_argument("--devices", type=int, default=1, metavar="N", help="how many of them (1)")
    run.add_argument("--max-gib", type=float, metavar="GIB", help="cap what each may reserve")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("args", nargs=argparse.REMAINDER, metavar="argument")
    return parser


def cards_table() -> str:
    """Return the table of ``gpumem cards``."""
    titles = ("card", "memory", "for a step", "capability", "SMs", "CUDA's name")
    return tabulate([_card_row(card) for card in CARDS.values()], titles, disable_numparse=True)


def _card_row(card: Card) -> tuple[str, ...]:
    major, minor = card.capability
    return (
        card.name,
        format_size(card.total_memory),
        format_size(card.usable_memory),
        f"{major}.{minor}",
        str(card.sm_count),
        card.device_name,
    )


def _run(arguments: argparse.Namespace) -> int:
    limit = read_max_gib(arguments.max_gib)
    if not 1 <= arguments.devices <= MOST_DEVICES:
        raise SpecError(
            f"--devices={arguments.devices}", "there is no such number", "write 1 to 16"
        )
    card = find_card(arguments.card or DEFAULT_CARD)
    wanted = arguments.device or ("virtual" if arguments.card else "auto")
    choice = choose(wanted, card)
    if choice.device is None:
        raise DeviceError(f"--device={wanted}", choice.reason, "run it on another machine")
    program = Program(arguments.script, arguments.args, module=arguments.module)
    return measured(program, choice.device, arguments.devices, limit)


class Program:
    """A Python program to run in this process, as ``python SCRIPT`` or ``python -m MODULE`` would.

    Raises:
        SpecError: there is no such script.
    """

    def __init__(self, target: str, arguments: Sequence[str], *, module: bool) -> None:
        if not module and not Path(target).exists():
            raise SpecError(target, "there is no such file", "name a script, or -m and a module")
        self._target = target
        self._arguments = list(arguments)
        self._module = module

    def run(self) -> int:
        """Run it; return its exit status. Out-of-memory errors and all others pass through."""
        sys.argv = [self._target, *self._arguments]
        sys.path[0] = str(Path.cwd()) if self._module else str(Path(self._target).resolve().parent)
        try:
            if self._module:
                runpy.run_module(self._target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self._target, run_name="__main__")
        except SystemExit as end:
            return _exit_status(end)
        return 0


def _exit_status(end: SystemExit) -> int:
    """Return the status that Python would exit with, after printing what it would print."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr)
    return 1


def measured(program: Program, device: Device, count: int, limit: int | None) -> int:
    """Run a program on ``count`` devices, print its peaks, return its exit status."""
    info = device.open(None, count)
    meter = Meter(device, info, count)
    meter.start(count_held=True)
    meter.cap(limit)
    status, shortage = 1, None
    try:
        status = program.run()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BaseException as error:  # noqa: BLE001 - the program's own; shown as Python shows it
        show_error(error)
        shortage = _shortage(error)
    finally:
        notes = device.notes(Path.cwd())
        measurement = meter.result(out_of_memory=shortage, notes=notes)
        trouble = device.trouble()
        meter.stop()
    if shortage is not None:
        print(_shortage_text(shortage), file=sys.stderr)
    print(summary(measurement, limit), file=sys.stderr)
    if trouble is not None:
        print(f"gpumem: {trouble}: these figures mean nothing", file=sys.stderr)
        return status or 1
    return status


def _shortage(error: BaseException) -> OutOfMemory | None:
    cause = find_out_of_memory(error)
    if cause is None:
        return None
    refusal = WATCH.last(cause)
    held = refusal.held or Peak(0, 0)
    where = site_of(cause.__traceback__, Path.cwd())
    return OutOfMemory(refusal.requested, held.allocated, held.reserved, where, refusal.device)


def _shortage_text(shortage: OutOfMemory) -> str:
    asked = format_size(shortage.requested) if shortage.requested else "memory"
    where = f", at {shortage.site}" if shortage.site else ""
    return (
        f"gpumem: out of memory on cuda:{shortage.device_index}: {asked} more asked for with "
        f"{format_size(shortage.allocated)} allocated, {format_size(shortage.reserved)} reserved"
        f"{where}"
    )


def summary(measurement: Measurement, limit: int | None) -> str:
    """Return what ``gpumem run`` prints at the end."""
    info = measurement.device
    virtual = "virtual GPU " if info.kind == "virtual" else ""
    room = info.total_memory - info.context if limit is None else limit
    rows = [
        (
            f"cuda:{index}",
            format_size(peak.allocated),
            format_size(peak.reserved),
            f"{peak.reserved / room:.0%}" if room else "",
        )
        for index, peak in enumerate(measurement.peaks)
    ]
    titles = ("device", "peak allocated", "peak reserved", f"of {format_size(room)}")
    table = tabulate(rows, titles, disable_numparse=True, stralign="right")
    lines = [f"gpumem: {virtual}{info.name}", table]
    if info.kind == "virtual":
        lines.append("memory is predicted, kernels did not run")
    lines += [f"note: {note}" for note in measurement.notes]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
