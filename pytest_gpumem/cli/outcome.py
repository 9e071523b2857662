"""The outcome of a subcommand of ``gpumem``, and helpers of several subcommands.

Each subcommand is a module with HELP, DESCRIPTION, ``add_arguments`` and ``run``. That returns an
:class:`Outcome` to print, or raises a GpuMemError for bad input, which ``main`` prints. Those about
baselines need no device and import no torch.
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
"""growth or a misfit, as a CI job asks for them"""
BAD_INPUT: Final = 2  # as argparse has it
INTERRUPTED: Final = 130
"""as a shell has it: 128 and the number of SIGINT"""

DEVICES: Final = ("auto", "cuda", "virtual")
"""those of ``--gpumem-device`` but none: the plugin is not imported for them"""
PREDICTED: Final = "memory is predicted; kernels did not run"
"""below figures of the virtual GPU"""


def add_device_argument(
    parser: argparse.ArgumentParser, meaning: str, default: str | None = None
) -> None:
    """Add the argument that says where steps run."""
    parser.add_argument("--device", choices=DEVICES, default=default, help=meaning)


def read_max_gib(value: float | None, flag: str = "--max-gib") -> int | None:
    """Return the bytes of a limit in GiB; None without it."""
    if value is None:
        return None
    if not 0 < value < MAX_GIB:  # also refuses NaN
        raise SpecError(f"{flag}={value}", "this is not a size", f"write GiB, as {flag}=8")
    return gib(value)


class Outcome(NamedTuple):
    """The output of a subcommand, and its exit status."""

    text: str
    """for the standard output"""
    status: int = OK
    trouble: tuple[str, ...] = ()
    """for the standard error, a line each"""


def confirmed(question: str) -> bool:
    """Return whether the user says yes; without a terminal the answer is no."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:
        print()
        return False
    return answer.strip().lower() in {"y", "yes"}


def show(outcome: Outcome) -> None:
    """Print a subcommand's outcome, in the characters that the terminal has."""
    for line in outcome.trouble:
        print(printable(line), file=sys.stderr, flush=True)
    if not outcome.text:
        return
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(encodable(outcome.text, encoding), flush=True)
    except BrokenPipeError:  # of a reader that has seen enough
        # Python flushes what is left at its end, as its signal module's documentation says.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write an answer as a file of JSON."""
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
