"""The gpumem command: run measures any program; compare, show and prune are about baselines."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Final

from pytest_gpumem.cli import compare, fit, prune, version_info
from pytest_gpumem.cli import show as listing
from pytest_gpumem.cli.cards import cards_table
from pytest_gpumem.cli.run import INTERRUPTED, run_program
from pytest_gpumem.devices.select import DEFAULT_CARD
from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.report.text import can_encode, encodable, printable
from pytest_gpumem.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.cli.outcome import Outcome


USAGE_ERROR: Final = 2
COMMANDS: Final = {
    "fit": fit,
    "compare": compare,
    "show": listing,
    "prune": prune,
    "version": version_info,
}


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
        return run_program(arguments)
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
    parser.add_argument("--version", action="version", version=f"pytest-gpumem {__version__}")
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


if __name__ == "__main__":
    sys.exit(main())
