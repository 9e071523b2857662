"""``gpumem model``: find the cards that a language model trains and runs on."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Final

from pytest_gpumem.breakdowns import category_rows, site_name
from pytest_gpumem.cli import config_step
from pytest_gpumem.cli.outcome import FOUND, OK, PREDICTED, Outcome
from pytest_gpumem.cli.program_trials import ProgramTrials, measured, read_range
from pytest_gpumem.devices.cards import card_file_text, card_names, find_card
from pytest_gpumem.devices.select import DEFAULT_CARD
from pytest_gpumem.errors import GpuMemError, SpecError
from pytest_gpumem.report.text import aligned_table
from pytest_gpumem.sizes import format_size
from pytest_gpumem.testrun.rerun import MAX_ERROR_LENGTH
from pytest_gpumem.testrun.run import BOUNDLESS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.judge.result import Result

HELP: Final = "say which cards a language model trains and runs on, by its configuration alone"
DESCRIPTION: Final = (
    "Train a causal language model of transformers for two steps, and let it write text, on "
    "virtual GPUs: its weights are made empty, and never loaded."
)
STEPS: Final = ("training", "inference")
PROGRAM: Final = config_step.__name__
MAX_CATEGORIES: Final = 5
MAX_LINES: Final = 3
SAVERS: Final = {"checkpointing": "--checkpointing", "lora": "--lora=16"}
"""training options that save memory, tried if the command line does not have them"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpumem model``."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="a config.json, its folder, or a model's name that transformers finds",
    )
    parser.add_argument(
        "--cards",
        metavar="NAME,NAME",
        default=DEFAULT_CARD,
        help=f"the cards to run on, or all ({DEFAULT_CARD})",
    )
    parser.add_argument("--only", choices=STEPS, help="training or inference, in place of both")
    parser.add_argument(
        "--largest",
        metavar="ARGUMENT:N..M",
        help="find the largest value that fits on each card: --largest=--batch:1..64",
    )
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="train as one of N ranks, sharded by FSDP2"
    )
    config_step.add_step_arguments(parser.add_argument_group("the step"))


def run(arguments: argparse.Namespace) -> Outcome:
    """Run the steps on each card; return the table, and what the peaks consist of."""
    names = card_names() if arguments.cards == "all" else arguments.cards.split(",")
    cards = [find_card(name) for name in names]
    for module in ("transformers", *["peft"] * (arguments.lora is not None)):
        if find_spec(module) is None:
            raise SpecError(arguments.config, f"{module} is not installed", f"pip install {module}")
    steps = [arguments.only] if arguments.only else list(STEPS)
    if arguments.world_size is not None:
        if arguments.only == "inference":
            problem, remedy = "ranks are for training", "leave out one of the two"
            raise SpecError("--world-size with --only=inference", problem, remedy)
        steps = ["training"]
    plans = [Plan(arguments, step) for step in steps]
    try:
        if arguments.largest is not None:
            return _largest(plans, cards, arguments.largest)
        return _table(plans, cards)
    except GpuMemError as error:
        if isinstance(error, SpecError):
            raise
        remedy = "name the configuration of a causal language model that transformers has"
        problem = shorten(error.problem, MAX_ERROR_LENGTH, placeholder=" ...")
        raise SpecError(arguments.config, problem, remedy) from error


class Plan:
    """One step to run: options of ``gpumem run``, and its program with arguments."""

    def __init__(self, arguments: argparse.Namespace, step: str) -> None:
        self.step, self._arguments = step, arguments
        size = arguments.world_size
        self.options = [] if size is None else [f"--world-size={size}"]
        self.program = ["-m", PROGRAM, arguments.config, *["--fsdp"] * (size is not None)]
        self.program += ["--inference"] * (step == "inference")
        for name in ("batch", "length", "dtype", "new_tokens", "optimizer", "lora"):
            value = getattr(arguments, name)
            if value is not None:
                self.program.append(f"--{name.replace('_', '-')}={value}")
        self.program += ["--checkpointing"] * arguments.checkpointing

    def on(self, card: str, *more: str) -> Result:
        """Run the step on a card, with further options of the program."""
        sys.stderr.write(f"gpumem: {' '.join([self.step, 'on', Path(card).stem, *more])}\n")
        return measured([*self.options, f"--card={card}"], [*self.program, *more])[0]

    def savers(self) -> Iterator[str]:
        """Yield the options that may save memory and are not on the command line."""
        for name, option in SAVERS.items():
            given = getattr(self._arguments, name)
            missing = name == "lora" and find_spec("peft") is None
            if self.step == "training" and not (given or missing):
                yield option


def _largest(plans: Sequence[Plan], cards: Sequence[Card], text: str) -> Outcome:
    """Return a table per step of the largest value that fits on each card."""
    values, lines, status = read_range(text), [], OK
    for plan in plans:
        outcome = ProgramTrials(plan.options, plan.program).on_cards(cards, values)
        lines += [f"{plan.step}:", outcome.text]
        status = max(status, outcome.status)
    return Outcome("\n".join([*lines, PREDICTED]), status)


def _table(plans: Sequence[Plan], cards: Sequence[Card]) -> Outcome:
    """Return a table of all cards, and what the peaks consist of on the card with most memory."""
    rows, status = [("card", "for a step", *(plan.step for plan in plans))], OK
    largest = max(cards, key=lambda card: card.usable_memory)
    described = []
    for card in cards:
        cells = []
        for plan in plans:
            result = plan.on(card.name)
            peak = result.measurement.peak_reserved if result.measurement else 0
            cells.append("no" if result.verdict.does_not_fit else format_size(peak))
            status = FOUND if result.verdict.does_not_fit else status
            if card is largest:
                described += ["", *_described(plan, card, result)]
        rows.append((card.name, format_size(card.usable_memory), *cells))
    table = aligned_table(rows, ("left", *["right"] * (len(rows[0]) - 1)))
    return Outcome("\n".join([table, *described, "", PREDICTED]), status)


def _described(plan: Plan, card: Card, result: Result) -> Iterator[str]:
    """Yield lines on what a step's peak consists of, and what would lower it."""
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        name = card.name
        if result.verdict.does_not_fit:  # the same card, with as much memory as the step needs
            path = Path(folder) / f"larger-{name}.toml"
            fields = asdict(card) | {"total_memory": card.total_memory + BOUNDLESS}
            del fields["name"]
            path.write_text(card_file_text(fields), encoding="utf-8")
            name = str(path)
            result = plan.on(name)
        measurement = result.measurement
        if measurement is None or not measurement.attributions:
            return
        needs = "needs" if name != card.name else "takes"
        yield (
            f"{plan.step} on {card.name} {needs} {format_size(measurement.peak_reserved)}, "
            f"{format_size(measurement.peak_allocated)} of it in tensors:"
        )
        breakdown = measurement.attributions[0].breakdown
        *categories, _cached = category_rows(breakdown)
        largest = sorted(categories, key=lambda row: -row.nbytes)[:MAX_CATEGORIES]
        yield "  " + ", ".join(f"{row.name} {format_size(row.nbytes)}" for row in largest)
        # Show only lines inside a module: lines of config_step.py, such as the optimizer's step, do
        # not help with the model.
        lines = [site for site in breakdown.sites if site.module and site.path]
        for site in sorted(lines, key=lambda site: -site.nbytes)[:MAX_LINES]:
            yield f"  {format_size(site.nbytes)} {site.category} at {site_name(site)}: {site.code}"
        for option in plan.savers():
            peak = plan.on(name, option).measurement
            if peak is not None:
                yield f"  with {option} {format_size(peak.peak_reserved)}"
        for note in (*measurement.hints, *measurement.attributions[0].hints, *measurement.notes):
            yield f"  {note}"
