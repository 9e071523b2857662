"""Measure GPU memory outside pytest, and work with baselines and reports."""

from __future__ import annotations

import argparse
import sys
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Final

from pytest_gpumem.cli.outcome import INTERRUPTED, show
from pytest_gpumem.errors import GpuMemError, SpecError
from pytest_gpumem.report.text import printable
from pytest_gpumem.sizes import shown
from pytest_gpumem.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from pytest_gpumem.cli.outcome import Outcome


USAGE_ERROR: Final = 2
COMMANDS: Final = {
    "cards": "card_table",
    "version": "version_info",
    "run": "run_program",
    "model": "config_model",
    "verify": "verify.verify",
    "history": "recorded.history",
    "compare": "recorded.compare",
    "accept": "accept.accept",
    "report": "recorded.report",
    "bisect": "bisect.bisect",
    "blame": "bisect.blame",
    "light": "light",
}
"""the subcommands in the order of the help, each with its module in this folder. Only the module
that runs is imported: ``light`` runs without the others' dependencies"""


def subcommand(name: str) -> ModuleType:
    """Import a subcommand's module, which has HELP, DESCRIPTION, ``add_arguments`` and ``run``."""
    return import_module(f"pytest_gpumem.cli.{COMMANDS[name]}")


def parser_of(modules: Mapping[str, ModuleType]) -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    epilog = "gpumem COMMAND --help explains a command."
    parser = argparse.ArgumentParser(prog="gpumem", description=__doc__, epilog=epilog)
    parser.add_argument("--version", action="version", version=f"pytest-gpumem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in modules.items():
        command = commands.add_parser(name, help=module.HELP, description=module.DESCRIPTION)
        module.add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the command line names; return its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        similar = get_close_matches(words[0], COMMANDS, n=1)
        lists = "gpumem --help lists all commands"
        remedy = f"did you mean {similar[0]}? {lists}" if similar else lists
        error = SpecError(shown(words[0]), "there is no such command", remedy)
        print(f"gpumem: {error}", file=sys.stderr)
        return USAGE_ERROR
    names = words[:1] if words and words[0] in COMMANDS else list(COMMANDS)
    modules = {name: subcommand(name) for name in names}
    parser = parser_of(modules)
    if not words:
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    behind: list[str] = []
    if names in (["bisect"], ["blame"]) and "--" in words:
        separator = words.index("--")
        words, behind = words[:separator], words[separator + 1 :]
    arguments = parser.parse_args(words)
    arguments.pytest_arguments = behind
    try:
        outcome: Outcome = modules[arguments.command].run(arguments)
        show(outcome)
    except GpuMemError as error:
        print(f"gpumem: {printable(str(error))}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())
