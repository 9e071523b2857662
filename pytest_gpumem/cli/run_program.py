"""``gpumem run``: measure the peaks of an unmodified program."""

from __future__ import annotations

import argparse
import gc
import os
import runpy
import shlex
import shutil
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tabulate import tabulate

from pytest_gpumem.cli.judged_program import (
    LIMITS,
    SETTINGS,
    JudgedProgram,
    ProgramItem,
    add_test_arguments,
    flag_of,
    option_words,
    program_words,
)
from pytest_gpumem.cli.outcome import (
    FOUND,
    INTERRUPTED,
    OK,
    PREDICTED,
    Outcome,
    add_device_argument,
    read_max_gib,
    show_error,
)
from pytest_gpumem.cli.program_trials import ProgramTrials, read_range, read_rank_list, starts_of
from pytest_gpumem.cli.server_search import ServerSearch
from pytest_gpumem.devices.cards import card_names, find_card
from pytest_gpumem.devices.children import ChildWatch, process_notes
from pytest_gpumem.devices.select import DEFAULT_CARD, RUN_CARD, RUN_DEVICE, choose
from pytest_gpumem.devices.variables import UNTIL_STARTED
from pytest_gpumem.errors import DeviceError, GpuMemError, SpecError
from pytest_gpumem.judge.server_start import shortage, why_not_started
from pytest_gpumem.report.parts.server_text import server_tables
from pytest_gpumem.sizes import format_size
from pytest_gpumem.spec import MAX_DEVICES
from pytest_gpumem.spec_fields import MAX_RANKS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.devices.children import Child
    from pytest_gpumem.devices.select import Choice
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import Measurement

HELP: Final = "run a program on a virtual GPU (or on a real GPU) and print its peaks"
DESCRIPTION: Final = f"{HELP[0].upper()}{HELP[1:]}."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpumem run``."""
    parser.usage = "gpumem run [options] (SCRIPT | -m MODULE) [argument ...]"
    parser.add_argument("--card", metavar="NAME", help=f"card of the virtual GPU ({DEFAULT_CARD})")
    add_device_argument(
        parser,
        "auto (a real GPU if there is one, else the virtual GPU; with --card, the virtual GPU), "
        "cuda, accelerator (XPU, MPS, NPU), virtual",
    )
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="number of GPUs (1)")
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="run the program once, as one of N ranks that torchrun would start",
    )
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="that rank (0)")
    parser.add_argument("--ranks", metavar="R,R", help="run it as each of these ranks: a row each")
    parser.add_argument(
        "--values",
        choices=("auto", "full", "off"),
        default="auto",
        help="values that the virtual GPU computes: auto (within a budget of work and memory; "
        "the default), full (all), off (none: a step takes about half of the time)",
    )
    parser.add_argument(
        "--max-gib", type=float, metavar="GIB", help="limit of the memory that each GPU may reserve"
    )
    parser.add_argument(
        "--cards", metavar="NAME,NAME", help="run the program on each of these cards, or on all"
    )
    parser.add_argument(
        "--largest",
        metavar="ARGUMENT:N..M",
        help="run the program with values from N on for this argument of it, and find the largest "
        "that fits: --largest=--batch-size:1..64",
    )
    parser.add_argument(
        "--until-started",
        action="store_true",
        help="end an inference server (vLLM) once it has started; if it refuses to start, do not "
        "search for what would let it start",
    )
    add_test_arguments(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", metavar="SCRIPT", help="the program: train.py")
    program_arguments = parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="argument", help="an argument of it"
    )
    program_arguments.required = False  # else argparse reports these too if SCRIPT is missing


def run(arguments: argparse.Namespace) -> Outcome:
    """Run a program with the options of ``gpumem run``; print its peaks to standard error."""
    for name in LIMITS:
        read_max_gib(getattr(arguments, name), flag_of(name))
    if not 1 <= arguments.devices <= MAX_DEVICES:
        remedy = f"write a number from 1 to {MAX_DEVICES}"
        raise SpecError(f"--devices={arguments.devices}", "this is not a number of devices", remedy)
    ranks: Sequence[int] = ()
    if arguments.ranks is not None:
        ranks = read_rank_list(arguments.ranks, arguments.world_size or 0)
    if arguments.world_size is None or ranks:
        arguments.rank = None
    elif not 0 <= arguments.rank < arguments.world_size <= MAX_RANKS:
        raise SpecError(
            f"--world-size={arguments.world_size} --rank={arguments.rank}",
            "there is no such rank",
            "write for example --world-size=8 --rank=7",
        )
    card = find_card(arguments.card or DEFAULT_CARD)
    kind = arguments.device or ("virtual" if arguments.card else "auto")
    choice = choose(kind, card)
    if choice.device is None:
        raise DeviceError(f"--device={kind}", choice.reason, "run it on another machine")
    program = UserProgram(arguments.script, arguments.args, module=arguments.module)
    outcome = run_several(arguments, ranks, choice.card)
    if outcome is not None:
        return outcome
    # A pytest session in the program uses this device and card for its marked tests.
    os.environ[RUN_DEVICE] = choice.device.option
    os.environ[RUN_CARD] = card.name
    if arguments.until_started:
        os.environ[UNTIL_STARTED] = "1"
    status, results = measure_program(program, choice, arguments)
    starts = starts_of(results)
    if not why_not_started(starts) or arguments.until_started or choice.card is None:
        return Outcome("", status)
    options = [word for word in option_words(arguments) if not word.startswith("--card=")]
    search = ServerSearch(options, program_words(arguments), card)
    return Outcome(search.table(max(starts, key=shortage)), status)


def run_several(
    arguments: argparse.Namespace, ranks: Sequence[int], card: Card | None
) -> Outcome | None:
    """Run a program on several cards, with several values of an argument, or as several ranks.

    Return None if no option requests several runs.
    """
    values = None if arguments.largest is None else read_range(arguments.largest)
    trials = ProgramTrials(option_words(arguments), program_words(arguments))
    given = [name for name in ("cards", "largest", "ranks") if getattr(arguments, name) is not None]
    told = {*SETTINGS.values(), "phases"}
    if ranks:  # baselines are allowed, as each rank has its own
        told = {"json", "html", "markdown", "cards", "largest"}
    if given and any(getattr(arguments, name) for name in told):
        problem = "a program that runs several times has no report, and a baseline as ranks alone"
        remedy = f"leave out {', '.join(f'--{name}' for name in sorted(told))}"
        raise SpecError(f"--{given[-1]}", problem, remedy)
    if ranks:
        return trials.as_ranks(ranks, update=arguments.update)
    if arguments.cards is not None:
        names = card_names() if arguments.cards == "all" else arguments.cards.split(",")
        return trials.on_cards([find_card(name) for name in names], values)
    if values is not None:
        limits = [read_max_gib(arguments.max_gib), card.usable_memory if card else None]
        known = [limit for limit in limits if limit is not None]
        largest = trials.largest(values, min(known) if known else None)
        return Outcome(f"{values.flag} {largest}", OK if largest.value else FOUND)
    return None


class UserProgram:
    """A Python program to run in this process, like ``python SCRIPT`` or ``python -m MODULE``.

    Raises:
        SpecError: no such script exists.
    """

    def __init__(self, target: str, arguments: Sequence[str], *, module: bool) -> None:
        if not module and not Path(target).exists():
            command = find_command(target)
            if command is None:
                raise SpecError(
                    target, "there is no such file", "name a script, or -m and a module"
                )
            target = command
        self.target = target
        self._arguments = list(arguments)
        self._module = module

    def name(self, given: str | None) -> str:
        """Return the program's name in baselines: its file, and its arguments or a given name."""
        script = Path(self.target)
        module = self.target
        if not self._module:
            inside = script.resolve().is_relative_to(Path.cwd())
            module = script.resolve().relative_to(Path.cwd()).as_posix() if inside else script.name
        words = shlex.join(self._arguments) if given is None else given
        return f"{module}::{words}" if words else module

    def run(self, at_end: Callable[[], object]) -> int:
        """Run the program; call ``at_end`` before its variables are deleted. Return its status."""
        sys.argv = [self.target, *self._arguments]
        sys.path[0] = str(Path.cwd()) if self._module else str(Path(self.target).resolve().parent)
        try:
            run = partial(runpy.run_module, alter_sys=True) if self._module else runpy.run_path
            _variables = run(self.target, run_name="__main__")
            at_end()
        except SystemExit as end:  # Python turns it into an exit status
            at_end()
            if end.code is None or isinstance(end.code, int):
                return end.code or 0
            print(end.code, file=sys.stderr)
            return 1
        return 0


def find_command(name: str) -> str | None:
    """Return the path of a command that is a Python script, such as torchrun; None without one.

    Commands next to this interpreter come first, as its environment may not be activated.
    """
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    path = shutil.which(name, path=folders)
    if path is None:
        return None
    with Path(path).open("rb") as script:
        first_lines = script.read(512)
    return path if first_lines.startswith(b"#!") and b"python" in first_lines else None


def measure_program(
    program: UserProgram, choice: Choice, arguments: argparse.Namespace
) -> tuple[int, Sequence[Result]]:
    """Run a program on the chosen devices, print its peaks; return its exit status and results."""
    device, count = choice.device, arguments.devices
    assert device is not None  # noqa: S101 - for the type checker
    watch, status, error = ChildWatch(), 1, None

    def execute() -> None:
        nonlocal status
        status = program.run(test.end_step)
        gc.collect()  # frees servers in reference cycles: their processes then end and report

    name, size, rank = program.name(arguments.name), arguments.world_size, arguments.rank
    if size is not None:
        name = f"{name}{'' if '::' in name else '::'}[rank {rank} of {size}]"
    item = ProgramItem(name, program.target, execute)
    test = JudgedProgram(item, arguments, choice, watch)
    device.await_use(count, test.begin)
    device.values.compute(arguments.values)
    try:
        with ExitStack() as stack:
            test.refuse_replacement()
            stack.enter_context(watch.watching(arguments.values, test.explainer))
            if size is not None:
                stack.enter_context(device.join_alone(rank, size, by_program=True))
            item.runtest()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BaseException as caught:  # noqa: BLE001 - the program's own; shown as Python shows it
        error = caught
    if test.is_fork:  # the main process reports this fork's peaks
        if error is not None:
            show_error(error)
        return status, ()
    run = test.run
    try:
        results, lines, failed = test.finish(error, passed=not status)
    except GpuMemError as worthless:
        results, lines, failed = [], [f"gpumem: {worthless}"], True
    if error is not None:  # print it only now: finish() may have added a note to it
        show_error(error)
    limit = run.spec.bytes_of("max_gib")
    # Judging replays requests on the device, and a measurement taken now would count them.
    measurement = (results[0].measurement if results else None) or run.measurement()
    lines = [*server_tables(results), *lines]
    told = any(result.verdict.failed for result in results)  # ``lines`` then contain the notes
    children = watch.children()
    # If the program raised, the measurement has no notes on its child processes yet.
    notes = dict.fromkeys((*measurement.notes, *process_notes(children, Path.cwd())))
    measurement = replace(measurement, notes=() if told else tuple(notes))
    print(summary(measurement, limit, children), *lines, sep="\n", file=sys.stderr)
    device.open(None, count)  # a pytest session in the program may have closed it
    run.meter.stop()
    return status or int(failed), results


def summary(measurement: Measurement, limit: int | None, children: Sequence[Child] = ()) -> str:
    """Format the peaks that ``gpumem run`` prints at the end.

    The last column is the share of ``limit`` bytes, or of the device's memory if it is None. A
    launcher's own process gets no row if only its child processes used a GPU.
    """
    info = measurement.device
    virtual = "virtual GPU " if info.is_predicted else ""
    room = info.usable_memory if limit is None else limit
    peaks = [("program", index, peak) for index, peak in enumerate(measurement.peaks)]
    if children and not measurement.peak_reserved:
        peaks = []
    peaks += [(child.name, *entry) for child in children for entry in child.peaks.items()]
    rows = []
    for name, index, peak in peaks:
        sizes = format_size(peak.allocated), format_size(peak.reserved)
        share = f"{peak.reserved / room:.0%}" if room else ""
        rows.append((name, f"{info.device_type}:{index}", *sizes, share))
    titles = ("process", "device", "peak allocated", "peak reserved", f"of {format_size(room)}")
    first = 0 if children else 1  # a single process needs no name
    last = 5 if room else 4  # the last column needs a known memory size
    lines = [f"gpumem: {virtual}{info.name}"]
    if rows:
        lines.append(
            tabulate(
                [row[first:last] for row in rows],
                titles[first:last],
                disable_numparse=True,
                colalign=("left", "right", "right", "right", "right")[first:last],
            )
        )
    if info.is_predicted:
        lines.append(PREDICTED)
    lines += [f"note: {note}" for note in measurement.notes]
    lines += [
        f"note: {child.name} {child.use} and was killed before it reported its peaks"
        for child in children
        if not child.ended
    ]
    return "\n".join(lines)
