"""``gpumem completion``: a script by which a shell completes the command's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.cli.outcome import Outcome
from pytest_gpumem.errors import SpecError

if TYPE_CHECKING:
    import argparse

SHELLS: Final = ("bash", "zsh", "tcsh")
HELP: Final = "print a script by which a shell completes this command"
DESCRIPTION: Final = (
    "Print a script by which a shell completes the words of gpumem: "
    'eval "$(gpumem completion bash)" in ~/.bashrc.'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of ``gpumem completion``."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to read the script")


def run(arguments: argparse.Namespace) -> Outcome:
    """Return the script.

    Raises:
        SpecError: shtab, which writes it, is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise SpecError(
            f"gpumem completion {arguments.shell}",
            "the script is made by shtab, which is not installed",
            "run pip install 'pytest-gpumem[completion]'",
        ) from None
    from pytest_gpumem.cli.main import COMMANDS, parser_of, subcommand

    parser = parser_of({name: subcommand(name) for name in COMMANDS})
    script: str = shtab.complete(parser, arguments.shell)
    return Outcome(script)
