"""``gpumem fit``: whether a plain step function fits on cards, and the largest size that does."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.cli.outcome import BAD_INPUT, FOUND, OK, Outcome, read_max_gib, show_error
from pytest_gpumem.cli.step_function import find_function, takes_size
from pytest_gpumem.devices.cards import find_card
from pytest_gpumem.devices.select import DEFAULT_CARD, choose
from pytest_gpumem.devices.virtual.cudnn_notes import keep_no_plans
from pytest_gpumem.errors import DeviceError, GpuMemError, SpecError
from pytest_gpumem.report.text import aligned_table, printable
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.devices.base import Device
    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.fit.prober import Prober
    from pytest_gpumem.fit.search import Largest, Probe

DESCRIPTION: Final = (
    "Say whether a step function fits on each card, and the largest size that does. Exit status 1: "
    "something does not fit; 2: bad input, or the step failed."
)
HELP: Final = "say whether a step function fits on cards, and the largest size that does"
MOST: Final = 10**9


class Row(NamedTuple):
    """What became of one card."""

    card: str
    capacity: int
    asked: Probe | None
    """the run with the size that was asked for, or with none"""
    largest: Largest | None
    notes: tuple[str, ...] = ()
    """what a reader of these figures should know"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``gpumem fit`` takes."""
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="a step: train:step or train.py:step; called with a size if it takes an argument",
    )
    parser.add_argument(
        "--card",
        action="append",
        default=[],
        metavar="NAME",
        help=f"a card, or several with commas; may be given again ({DEFAULT_CARD})",
    )
    parser.add_argument("--size", type=int, metavar="N", help="the size that is to fit")
    parser.add_argument("--start", type=int, default=1, metavar="N", help="begin with this size")
    parser.add_argument("--limit", type=int, metavar="N", help="the largest size of interest")
    parser.add_argument("--multiple", type=int, default=1, metavar="N", help="try multiples only")
    parser.add_argument("--max-gib", type=float, metavar="GIB", help="fit in this much instead")
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "virtual"),
        default="virtual",
        help="virtual, or a real GPU, capped to what each card has",
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Find out and return the table.

    Raises:
        SpecError: an argument that is no good.
        DeviceError: there is no device.
    """
    _check_sizes(arguments)
    cards = _cards(arguments.card)
    room = read_max_gib(arguments.max_gib)
    choice = choose(arguments.device, cards[0])  # before the module imports torch
    if choice.device is None:
        raise DeviceError(f"--device={arguments.device}", choice.reason, "use another machine")
    if len(cards) > 1:
        keep_no_plans()
    text = arguments.function
    step = find_function(text)
    sized = takes_size(text, step)
    if not sized and arguments.size is not None:
        raise SpecError(
            f"--size={arguments.size}",
            f"{text} takes no argument",
            "leave it out, or have the function take a size",
        )
    given = {name: getattr(arguments, name) for name in ("size", "start", "limit", "multiple")}
    asked = _Asked(text, step, sized, **given, room=room)
    try:
        rows = [asked.of(choice.device, card) for card in cards]
    except GpuMemError:
        raise
    except Exception as error:  # noqa: BLE001 - the step's own, recorded
        show_error(error)
        return Outcome(
            "", BAD_INPUT, (f"gpumem: {text} failed: nothing is known of what it takes",)
        )
    fits = all(row.asked.fits if row.asked else row.largest and row.largest.value for row in rows)
    answer = table(rows)
    if not choice.device.computes:
        answer += "\nmemory is predicted, kernels did not run"
    return Outcome(answer, OK if fits else FOUND)


def _check_sizes(arguments: argparse.Namespace) -> None:
    for name in ("size", "start", "limit", "multiple"):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= MOST:
            raise SpecError(
                f"--{name}={value}",
                f"{name} must be a whole number from 1 to {MOST:,}",
                f"write for example --{name}=8",
            )


def _cards(names: list[str]) -> list[Card]:
    given = [name.strip() for text in names for name in text.split(",") if name.strip()]
    cards = [find_card(name) for name in given or [DEFAULT_CARD]]
    return list({card.name: card for card in cards}.values())


@dataclass(frozen=True)
class _Asked:
    """What is asked of each card."""

    text: str
    """the function, as it was given"""
    step: Callable[..., object]
    sized: bool
    """whether it takes a size"""
    size: int | None
    start: int
    limit: int | None
    multiple: int
    room: int | None
    """bytes that it is to fit in; None: the card's"""

    def of(self, device: Device, card: Card) -> Row:
        """Answer for one card.

        Raises:
            DeviceError: the step did what makes its figures worthless.
            whatever the step raises, but for out-of-memory errors.
        """
        from pytest_gpumem.fit.prober import Prober
        from pytest_gpumem.meter.meter import Meter

        meter = Meter(device, device.open(card, 1), 1)
        try:
            meter.start(count_held=True)
            meter.cap(min(card.usable_memory, self.room or card.usable_memory))
            prober = Prober(meter, Path.cwd(), lambda line: _tell(card, line), patience=1.0)
            asked, largest = self._found(prober)
            if trouble := device.trouble():
                raise DeviceError(self.text, trouble, "run it on a real GPU (--device=cuda)")
            notes = tuple(device.notes(Path.cwd()))
            return Row(card.name, meter.capacity, asked, largest, notes)
        finally:
            meter.stop()

    def _found(self, prober: Prober) -> tuple[Probe | None, Largest | None]:
        if not self.sized:
            return prober.probe(lambda _: self.step(), 1), None
        if self.size is None:
            return None, self._largest(prober, self.limit)
        asked = prober.probe(self.step, self.size)
        if asked.fits or self.size == 1:  # nothing smaller is left
            return asked, None
        return asked, self._largest(prober, self.size - 1)

    def _largest(self, prober: Prober, limit: int | None) -> Largest:
        return prober.largest(self.step, self.start, limit, multiple=self.multiple)


def _tell(card: Card, line: str) -> None:
    sys.stderr.write(f"gpumem: {card.name}: {printable(line)}\n")
    sys.stderr.flush()


def table(rows: list[Row]) -> str:
    """Return the answer, a line a card."""
    titles = ["card", "for a step", "fits", "allocated", "reserved", "left", "largest", "probes"]
    lines = [list(_cells(row)) for row in rows]
    kept = [i for i in range(len(titles)) if any(line[i] for line in lines)]
    text = aligned_table(
        [[line[i] for i in kept] for line in (titles, *lines)],
        ["left", *("right" for _ in kept[1:])],
    )
    said = [
        f"{row.card}: {row.largest}" for row in rows if row.largest and not row.largest.monotonic
    ]
    return "\n".join([text, *said, *_notes(rows)])


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what is to be said, once where it is the same of all cards."""
    for note in dict.fromkeys(note for row in rows for note in row.notes):
        cards = [row.card for row in rows if note in row.notes]
        where = "" if len(cards) == len(rows) else f"{', '.join(cards)}: "
        yield f"note: {where}{note}"


def _cells(row: Row) -> tuple[str, ...]:
    largest = row.largest
    taken = row.asked.peak if row.asked and row.asked.fits else largest.peak if largest else None
    shown = taken if taken and taken.reserved else None
    return (
        row.card,
        format_size(row.capacity),
        ("yes" if row.asked.fits else "no") if row.asked else "",
        format_size(shown.allocated) if shown else "",
        format_size(shown.reserved) if shown else "",
        format_size(row.capacity - shown.reserved) if shown else "",
        str(largest.value or "none") if largest else "",
        str(len(largest.probes)) if largest else "",
    )
