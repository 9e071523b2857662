"""What the ``gpumem`` command does besides running programs: one module a subcommand.

None of them needs a device, and none imports torch. Each adds its arguments to the command's
parser, and returns an :class:`Outcome` of what to print.
"""

from __future__ import annotations

import runpy
import traceback
from pathlib import Path
from typing import Final, NamedTuple

from pytest_gpumem.errors import SpecError
from pytest_gpumem.sizes import gib

OK: Final = 0
FOUND: Final = 1
"""what was looked for is there: growth, or stale baselines"""
BAD_INPUT: Final = 2


MOST_GIB: Final = 1e9


def read_max_gib(value: float | None) -> int | None:
    """Return the bytes of ``--max-gib``; None where it was not given.

    Raises:
        SpecError: it is no size.
    """
    if value is None:
        return None
    if not 0 < value < MOST_GIB:  # also refuses NaN
        raise SpecError(f"--max-gib={value}", "that is no size", "write GiB, as --max-gib=8")
    return gib(value)


class Outcome(NamedTuple):
    """What a subcommand has to say."""

    text: str
    """for the standard output"""
    status: int = OK
    trouble: tuple[str, ...] = ()
    """for the standard error, a line each"""


_OWN: Final = Path(__file__).parents[1]


def show_error(error: BaseException) -> None:
    """Print a user's error as Python would, without the frames that ran what raised it."""
    frames = error.__traceback__
    while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _is_ours(filename: str) -> bool:
    return filename in {"<frozen runpy>", runpy.__file__} or _OWN in Path(filename).parents
