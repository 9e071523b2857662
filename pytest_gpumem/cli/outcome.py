"""Define the outcome of a ``gpumem`` subcommand, and helpers that several subcommands use.

Each subcommand is a module with HELP, DESCRIPTION, ``add_arguments`` and ``run``. ``run`` returns
an :class:`Outcome` to print, or raises a GpuMemError for bad input, which ``main`` prints.
Subcommands on baselines need no device and import no torch.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.errors import ReportError, SpecError
from pytest_gpumem.files.atomic_file import write_whole
from pytest_gpumem.report.text import encodable, printable
from pytest_gpumem.sizes import gib
from pytest_gpumem.source_lines import OWN_FOLDER
from pytest_gpumem.spec_fields import MAX_GIB

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from pathlib import Path

OK: Final = 0
FOUND: Final = 1
"""exit status for a result that should fail a CI job: growth, no fit, nothing found or written"""
BAD_INPUT: Final = 2  # argparse's exit status for a usage error
INTERRUPTED: Final = 130
"""exit status after Ctrl-C, as a shell reports it: 128 plus the number of SIGINT"""

DEVICES: Final = ("auto", "cuda", "accelerator", "virtual")
"""values of ``--gpumem-device`` except none; repeated here so as not to import the plugin"""
PREDICTED: Final = "memory is predicted; kernels did not run"
"""printed below figures of the virtual GPU"""


def add_device_argument(
    parser: argparse.ArgumentParser, meaning: str, default: str | None = None
) -> None:
    """Add the option that selects where steps run."""
    parser.add_argument("--device", choices=DEVICES, default=default, help=meaning)


def read_max_gib(value: float | None, flag: str = "--max-gib") -> int | None:
    """Convert a limit in GiB to bytes; None without a limit."""
    if value is None:
        return None
    if not 0 < value < MAX_GIB:  # also refuses NaN
        raise SpecError(f"{flag}={value}", "this is not a size", f"write GiB, as {flag}=8")
    return gib(value)


class Outcome(NamedTuple):
    """A subcommand's output and exit status."""

    text: str
    """goes to standard output"""
    status: int = OK
    trouble: tuple[str, ...] = ()
    """lines for standard error"""


def confirmed(question: str) -> bool:
    """Ask the user a yes/no question; return False without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:
        print()
        return False
    return answer.strip().lower() in {"y", "yes"}


def show(outcome: Outcome) -> None:
    """Print a subcommand's outcome, in characters of the terminal's encoding."""
    for line in outcome.trouble:
        print(printable(line), file=sys.stderr, flush=True)
    if not outcome.text:
        return
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(encodable(outcome.text, encoding), flush=True)
    except BrokenPipeError:  # the reading process ended early, as ``head`` does
        # Python flushes stdout again at exit: the signal module's documentation suggests this.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a result to a JSON file."""
    try:
        encoded = json.dumps(document, indent=1) + "\n"
        write_whole(path.absolute(), encoded.encode(), f".{path.name}.new")
    except OSError as error:
        raise ReportError(
            f"--json={path}", f"cannot be written ({error.strerror})", "name another file"
        ) from error


def show_error(error: BaseException) -> None:
    """Print an error of the user's program as Python would, without this package's frames."""
    frames = error.__traceback__
    while frames is not None:
        filename = frames.tb_frame.f_code.co_filename
        starts_program = filename in {"<frozen runpy>", runpy.__file__}
        if not starts_program and not filename.startswith(OWN_FOLDER):
            break
        frames = frames.tb_next
    shown = traceback.TracebackException(type(error), error, frames)
    chain = [shown]
    for part in chain:
        own = [frame for frame in part.stack if not frame.filename.startswith(OWN_FOLDER)]
        part.stack = traceback.StackSummary.from_list(own)
        chain += [former for former in (part.__cause__, part.__context__) if former is not None]
    sys.stderr.write("".join(shown.format()))
