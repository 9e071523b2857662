"""``gpumem run``: a program's peaks, as it stands."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tabulate import tabulate

from pytest_gpumem.cli.outcome import read_max_gib, show_error
from pytest_gpumem.devices.cards import find_card
from pytest_gpumem.devices.select import DEFAULT_CARD, choose
from pytest_gpumem.errors import DeviceError, SpecError
from pytest_gpumem.measurement import OutOfMemory, Peak
from pytest_gpumem.meter.meter import Meter
from pytest_gpumem.meter.out_of_memory import WATCH, find_out_of_memory, site_of
from pytest_gpumem.sizes import format_size
from pytest_gpumem.spec import MOST_DEVICES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from pytest_gpumem.devices.base import Device
    from pytest_gpumem.measurement import Measurement


def run_program(arguments: argparse.Namespace) -> int:
    """Run a program as the command line says; return its exit status."""
    limit = read_max_gib(arguments.max_gib)
    if not 1 <= arguments.devices <= MOST_DEVICES:
        raise SpecError(
            f"--devices={arguments.devices}",
            "there is no such number",
            f"write 1 to {MOST_DEVICES}",
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


INTERRUPTED: Final = 130
"""128 and the number of SIGINT, as shells have it"""
