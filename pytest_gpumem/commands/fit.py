"""``gpumem fit``: whether a plain step function fits on cards, and the largest size that does."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.commands import FOUND, OK, Outcome, read_max_gib
from pytest_gpumem.devices.cards import find_card
from pytest_gpumem.devices.choose import DEFAULT_CARD, choose
from pytest_gpumem.errors import DeviceError, SpecError
from pytest_gpumem.report.text import drawn, printable
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from pytest_gpumem.devices.base import Device
    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.fit import Largest, Probe
    from pytest_gpumem.meter import Meter

DESCRIPTION: Final = (
    "Say whether a step function fits on each card, and the largest size that does. Exit status 1: "
    "something does not fit."
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
    cards = _cards(arguments.card)
    limit = read_max_gib(arguments.max_gib)
    choice = choose(arguments.device, cards[0])  # before the module imports torch
    if choice.device is None:
        raise DeviceError(f"--device={arguments.device}", choice.reason, "use another machine")
    step = _function(arguments.function)
    sized = _takes_size(arguments.function, step)
    if not sized and arguments.size is not None:
        raise SpecError(
            f"--size={arguments.size}",
            f"{arguments.function} takes no argument",
            "leave it out, or have the function take a size",
        )
    _check_sizes(arguments)
    rows = [_row(choice.device, card, step, sized, arguments, limit) for card in cards]
    fits = all(row.asked.fits if row.asked else row.largest and row.largest.value for row in rows)
    return Outcome(table(rows), OK if fits else FOUND)


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
    return [find_card(name) for name in dict.fromkeys(given or [DEFAULT_CARD])]


def _function(text: str) -> Callable[..., object]:
    """Return the function that "train:step" or "src/train.py:step" names."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise SpecError(text, "this is no MODULE:FUNCTION", "write for example train.py:step")
    module = _from_file(text, Path(where)) if where.endswith(".py") else _from_name(text, where)
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise SpecError(text, f"there is no function {name} in it", "name a function of the module")
    return found  # type: ignore[no-any-return] # it is callable


def _from_file(text: str, path: Path) -> Any:  # noqa: ANN401 - a module
    if not path.is_file():
        raise SpecError(text, f"there is no file {path}", "name a Python file, or a module")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SpecError(text, f"{path} cannot be imported", "name a Python file")
    sys.path.insert(0, str(path.resolve().parent))
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _from_name(text: str, name: str) -> Any:  # noqa: ANN401 - a module
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise SpecError(
            text, f"there is no module {error.name}", "name one that lies here"
        ) from None


def _takes_size(text: str, step: Callable[..., object]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        it
        for it in inspect.signature(step).parameters.values()
        if it.default is it.empty and it.kind not in {it.VAR_POSITIONAL, it.VAR_KEYWORD}
    ]
    if len(needed) > 1 or any(it.kind not in positional for it in needed):
        names = ", ".join(it.name for it in needed)
        raise SpecError(
            text,
            f"it needs the arguments {names}",
            "give a function of a size (a batch size, say), or of nothing",
        )
    return bool(needed)


def _row(  # noqa: PLR0913, PLR0917 - all that the command was told
    device: Device,
    card: Card,
    step: Callable[..., object],
    sized: bool,  # noqa: FBT001
    arguments: argparse.Namespace,
    limit: int | None,
) -> Row:
    from pytest_gpumem.meter import Meter
    from pytest_gpumem.probing import Prober

    info = device.open(card, 1)
    meter = Meter(device, info, 1)
    try:
        meter.start(count_held=True)
        meter.cap(min(card.usable_memory, limit or card.usable_memory))
        prober = Prober(meter, Path.cwd(), lambda line: _tell(card, line), patience=1.0)
        return _found(prober, meter, card, step, sized, arguments)
    finally:
        meter.stop()


def _found(prober: Any, meter: Meter, card: Card, step: Any, sized: bool, arguments: Any) -> Row:  # noqa: ANN401, FBT001, PLR0913, PLR0917
    if not sized:
        return Row(card.name, meter.capacity, prober.probe(lambda _: step(), 1), None)
    asked = None if arguments.size is None else prober.probe(step, arguments.size)
    if asked is not None and asked.fits:
        return Row(card.name, meter.capacity, asked, None)
    limit = arguments.limit if arguments.size is None else arguments.size - 1 or None
    if arguments.size == 1:  # nothing smaller is left
        return Row(card.name, meter.capacity, asked, None)
    largest = prober.largest(step, arguments.start, limit, multiple=arguments.multiple)
    return Row(card.name, meter.capacity, asked, largest)


def _tell(card: Card, line: str) -> None:
    sys.stderr.write(f"gpumem: {card.name}: {printable(line)}\n")
    sys.stderr.flush()


def table(rows: list[Row]) -> str:
    """Return the answer, a line a card."""
    titles = ["card", "for a step", "fits", "allocated", "reserved", "left", "largest", "probes"]
    lines = [list(_cells(row)) for row in rows]
    kept = [i for i in range(len(titles)) if any(line[i] for line in lines)]
    text = drawn(
        [[line[i] for i in kept] for line in (titles, *lines)],
        ["left", *("right" for _ in kept[1:])],
    )
    said = [
        f"{row.card}: {row.largest}" for row in rows if row.largest and not row.largest.monotonic
    ]
    return "\n".join([text, *said])


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
