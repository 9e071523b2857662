"""``gpumem init``: the lines of a project's settings, a CI job, and a first test."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.atomic_file import TEMPORARY, write_whole
from pytest_gpumem.cli.outcome import BAD_INPUT, OK, Outcome
from pytest_gpumem.cli.project.ci_jobs import CI_JOBS, ci_of
from pytest_gpumem.cli.project.first_test import first_test
from pytest_gpumem.cli.project.settings_file import with_card
from pytest_gpumem.devices.cards import find_card
from pytest_gpumem.errors import SpecError

if TYPE_CHECKING:
    import argparse

    from pytest_gpumem.cli.project.settings_file import NewFile

HELP: Final = "set up a project: settings, a CI job, a first test"
DESCRIPTION: Final = (
    "Write the card into pyproject.toml, a job for GitHub or GitLab, and a first test of a "
    "model or a step. An existing file is replaced only if you agree; the old file is kept "
    "as NAME.bak. Exit status 2: bad input, or an existing file was not changed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpumem init``."""
    parser.add_argument(
        "module",
        nargs="?",
        metavar="MODULE[:NAME]",
        help=(
            "what the first test runs: models.py:Net (a torch.nn.Module), train.py:step (a "
            "step function)"
        ),
    )
    parser.add_argument(
        "--card", default="T4", metavar="NAME", help="the GPU model of the tests (default: T4)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=8,
        metavar="N",
        help="batch size of the first test (default: 8)",
    )
    parser.add_argument(
        "--ci",
        choices=("auto", *CI_JOBS, "none"),
        default="auto",
        help="the CI service of the job: auto (read from the project's files and its git "
        "remote), github, gitlab, none",
    )
    parser.add_argument("--yes", action="store_true", help="replace files without asking")


def run(arguments: argparse.Namespace) -> Outcome:
    """Write the files; return their names, and the next step.

    Raises:
        SpecError: an argument that cannot be used; nothing was written.
    """
    if arguments.batch_size < 1:
        raise SpecError(
            f"--batch-size={arguments.batch_size}",
            "this is not a batch size",
            "write a whole number from 1, such as --batch-size=8",
        )
    root = Path.cwd()
    files = [with_card(root, find_card(arguments.card).name)]
    ci = ci_of(root) if arguments.ci == "auto" else arguments.ci
    if ci != "none":
        files += CI_JOBS[ci](root, _torch_version())
    advice: list[str] = []
    if arguments.module is not None:
        test, advice = first_test(root, arguments.module, arguments.batch_size)
        files.append(test)
    lines, left = [], []
    for file in files:
        line, written = _put(file, root, replace=arguments.yes)
        lines.append(line)
        if not written:
            left.append(f"gpumem: {line}")
    lines += advice
    if arguments.module is None:
        lines.append(
            "no test was written: name a model or a step for a first test: gpumem init models.py"
        )
    lines.append("next: pytest --gpumem-update-baselines, then commit these files and baselines/")
    return Outcome("\n".join(lines), BAD_INPUT if left else OK, tuple(left))


def _torch_version() -> str:
    """Return the version of the installed torch: "2.15.0"; "" where none is installed."""
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return ""


def _put(file: NewFile, root: Path, *, replace: bool) -> tuple[str, bool]:
    """Write a file; return what became of it in words, and whether its content is there now."""
    name = file.path.relative_to(root)
    if file.content is None:
        return f"{name} not changed: {file.note}", False
    old = file.path.read_bytes() if file.path.exists() else None
    new = file.content.encode("utf-8", "surrogateescape")
    if old == new:
        return f"{name} needs no change", True
    if old is not None and not file.edited and not (replace or _agreed(f"replace {name}?")):
        return f"{name} not changed: the file exists (--yes replaces it)", False
    try:
        backup = ""
        if old is not None and not file.edited:
            backup = f"; the old file is {_keep_old(file.path, old)}"
        write_whole(file.path, new, f"{TEMPORARY}-{os.getpid()}")
    except OSError as error:
        return f"{name} not written: {error.strerror or error}", False
    note = f": {file.note}" if file.note else ""
    verb = "changed" if file.edited and old is not None else "wrote"
    return f"{verb} {name}{note}{backup}", True


def _agreed(question: str) -> bool:
    """Ask the user; without a terminal the answer is no."""
    if not sys.stdin.isatty():
        return False
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _keep_old(path: Path, content: bytes) -> str:
    """Write a file's content beside it under a name that is free; return that name."""
    number = 0
    while True:
        backup = path.with_name(f"{path.name}.bak{number or ''}")
        try:
            with backup.open("xb") as stream:
                stream.write(content)
        except FileExistsError:
            number += 1
        else:
            return backup.name
