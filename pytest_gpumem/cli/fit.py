"""``gpumem fit``: whether a plain step function fits on cards, and the largest size that does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.cli.outcome import (
    BAD_INPUT,
    FOUND,
    OK,
    PREDICTED,
    Outcome,
    add_device_argument,
    add_values_argument,
    read_max_gib,
    show_error,
)
from pytest_gpumem.cli.step_function import find_function, takes_size
from pytest_gpumem.devices import virtual
from pytest_gpumem.devices.cards import find_card
from pytest_gpumem.devices.select import DEFAULT_CARD, choose
from pytest_gpumem.errors import DeviceError, GpuMemError, SpecError
from pytest_gpumem.report.text import aligned_table, printable
from pytest_gpumem.sizes import format_size
from pytest_gpumem.spec_fields import MAX_BATCH

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from pytest_gpumem.devices.base import Device
    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.fit.search import Largest, Probe
    from pytest_gpumem.notes import Note

DESCRIPTION: Final = (
    "Find whether a step function fits on each card, and the largest size that fits. Exit "
    "status 1: a card is too small; 2: bad input, or the step failed."
)
HELP: Final = "find whether a step function fits on cards, and the largest size that fits"


class CardFit(NamedTuple):
    """The answer for one card."""

    card: str
    capacity: int
    asked: Probe | None
    """the run with ``--size``, or without any size"""
    largest: Largest | None
    notes: tuple[Note, ...] = ()
    """sentences that a reader of these figures should know"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpumem fit``."""
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="a step function: train:step or train.py:step; the function gets a size if it "
        "takes an argument",
    )
    parser.add_argument(
        "--card",
        action="append",
        default=[],
        metavar="NAME",
        help=f"a card, or several cards separated by commas; repeatable (default: {DEFAULT_CARD})",
    )
    parser.add_argument("--size", type=int, metavar="N", help="the size that must fit")
    parser.add_argument("--start", type=int, default=1, metavar="N", help="the first size to try")
    parser.add_argument("--limit", type=int, metavar="N", help="the largest size to try")
    parser.add_argument(
        "--multiple", type=int, default=1, metavar="N", help="try only multiples of this number"
    )
    parser.add_argument(
        "--max-gib",
        type=float,
        metavar="GIB",
        help="fit into this much memory instead of the card's",
    )
    add_device_argument(
        parser, "the virtual GPU, or a real GPU capped to the memory of each card", "virtual"
    )
    add_values_argument(parser)


def run(arguments: argparse.Namespace) -> Outcome:
    """Try the function on every card; return the table."""
    for name in ("size", "start", "limit", "multiple"):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= MAX_BATCH:
            problem = f"{name} must be a whole number from 1 to {MAX_BATCH:,}"
            raise SpecError(f"--{name}={value}", problem, f"write for example --{name}=8")
    names = [name.strip() for names in arguments.card for name in names.split(",")]
    cards = list(dict.fromkeys(map(find_card, filter(None, names)))) or [find_card(DEFAULT_CARD)]
    read_max_gib(arguments.max_gib)  # refuse it before anything runs
    choice = choose(arguments.device, cards[0])  # before the module imports torch
    if choice.device is None:
        raise DeviceError(f"--device={arguments.device}", choice.reason, "use another machine")
    if len(cards) > 1:
        virtual.prepare_many_cards()  # cuDNN's choices for one card are not those for the next
    target = arguments.function
    step = find_function(target)
    sized = takes_size(target, step)
    if not sized and arguments.size is not None:
        remedy = "leave out the option, or let the function take a size"
        raise SpecError(f"--size={arguments.size}", f"{target} takes no argument", remedy)
    try:
        answers = [_answer(arguments, step, choice.device, card, sized=sized) for card in cards]
    except GpuMemError:
        raise
    except Exception as error:  # noqa: BLE001 - the step's own, recorded
        show_error(error)
        trouble = f"gpumem: {target} failed, so its memory is unknown"
        return Outcome("", BAD_INPUT, (trouble,))
    fits = all(
        answer.asked.fits if answer.asked else answer.largest and answer.largest.value
        for answer in answers
    )
    rendered = fit_table(answers)
    if not choice.device.values.all_computed:
        rendered += f"\n{PREDICTED}"
    return Outcome(rendered, OK if fits else FOUND)


def _answer(
    arguments: argparse.Namespace,
    step: Callable[..., object],
    device: Device,
    card: Card,
    *,
    sized: bool,
) -> CardFit:
    """Answer for one card, or raise a DeviceError where the step's figures are worthless.

    The step's own errors pass, but for those of running out of memory.
    """
    from pytest_gpumem.fit.prober import Prober
    from pytest_gpumem.meter.meter import Meter

    def show(line: str) -> None:
        sys.stderr.write(f"gpumem: {card.name}: {printable(line)}\n")
        sys.stderr.flush()

    target, size = arguments.function, arguments.size
    meter = Meter(device, device.open(card, 1), 1)
    try:
        device.values.compute(arguments.values)
        meter.start(count_held=True)
        max_bytes = read_max_gib(arguments.max_gib)
        meter.cap(min(card.usable_memory, max_bytes or card.usable_memory))
        prober = Prober(meter, show, patience=1.0)
        asked: Probe | None = None
        largest: Largest | None = None
        if not sized:
            asked = prober.probe(lambda _: step(), 1)
        elif size is not None:
            asked = prober.probe(step, size)
        if sized and (asked is None or (not asked.fits and size > 1)):
            limit = arguments.limit if asked is None else size - 1
            largest = prober.largest(step, arguments.start, limit, multiple=arguments.multiple)
        if trouble := device.trouble():
            raise DeviceError(target, trouble, "run it on a real GPU (--device=cuda)")
        probes = (*([asked] if asked else ()), *(largest.probes if largest else ()))
        if all(probe.fits and not probe.peak.reserved for probe in probes):
            raise DeviceError(
                target,
                f"this function allocated no memory on {meter.info.name}",
                "name a function that creates the model and its data on the GPU "
                '(.cuda(), device="cuda") and takes one step',
            )
        notes = tuple(device.notes(Path.cwd()))
        return CardFit(card.name, meter.capacity, asked, largest, notes)
    finally:
        meter.stop()


def fit_table(answers: Sequence[CardFit]) -> str:
    """Return the answers as a table, a line a card."""
    titles = ["card", "for a step", "fits", "allocated", "reserved", "left", "largest", "probes"]
    lines = []
    for answer in answers:
        asked, largest = answer.asked, answer.largest
        peak = asked.peak if asked and asked.fits else largest.peak if largest else None
        sizes = ["", "", ""]
        if peak and peak.reserved:
            left = answer.capacity - peak.reserved
            sizes = [format_size(nbytes) for nbytes in (peak.allocated, peak.reserved, left)]
        fits = ("yes" if asked.fits else "no") if asked else ""
        search = (str(largest.value or "none"), str(len(largest.probes))) if largest else ("", "")
        lines.append((answer.card, format_size(answer.capacity), fits, *sizes, *search))
    filled = [column for column in range(len(titles)) if any(line[column] for line in lines)]
    table = aligned_table(
        [[line[column] for column in filled] for line in (titles, *lines)],
        ["left", *("right" for _ in filled[1:])],
    )
    doubts = [
        f"{answer.card}: {answer.largest}"
        for answer in answers
        if answer.largest
        and (not answer.largest.monotonic or answer.largest.stopped == "no growth")
    ]
    notes = []
    for note in dict.fromkeys(note for answer in answers for note in answer.notes):
        cards = [answer.card for answer in answers if note in answer.notes]
        prefix = "" if len(cards) == len(answers) else f"{', '.join(cards)}: "
        notes.append(f"note: {prefix}{note}")
    return "\n".join([table, *doubts, *notes])
