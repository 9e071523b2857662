"""What the ``gpumem`` command does besides running programs: one module a subcommand.

None of them needs a device, and none imports torch. Each adds its arguments to the command's
parser, and returns an :class:`Outcome` of what to print.
"""

from __future__ import annotations

from typing import Final, NamedTuple

OK: Final = 0
FOUND: Final = 1
"""what was looked for is there: growth, or stale baselines"""
BAD_INPUT: Final = 2


class Outcome(NamedTuple):
    """What a subcommand has to say."""

    text: str
    """for the standard output"""
    status: int = OK
    trouble: tuple[str, ...] = ()
    """for the standard error, a line each"""
