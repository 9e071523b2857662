"""``gpumem completion``: a script by which a shell completes the command's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.cli.outcome import Outcome
from pytest_gpumem.errors import SpecError

if TYPE_CHECKING:
    import argparse

SHELLS: Final = ("bash", "zsh", "tcsh")
HELP: Final = "print a shell's completion script for this command"
DESCRIPTION: Final = (
    "Print a shell's completion script for gpumem. For bash, add this line to ~/.bashrc: "
    'eval "$(gpumem completion bash)"'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of ``gpumem completion``."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that will read the script")


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
            "the script needs shtab, which is not installed",
            "run pip install 'pytest-gpumem[completion]'",
        ) from None
    from pytest_gpumem.cli.main import COMMANDS, parser_of, subcommand

    parser = parser_of({name: subcommand(name) for name in COMMANDS})
    script: str = shtab.complete(parser, arguments.shell)
    return Outcome(script)
