"""``gpumem report``: convert JSON reports to another format, or merge several."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.cli.outcome import FOUND, OK, Outcome
from pytest_gpumem.errors import ReportError, SpecError
from pytest_gpumem.files.atomic_file import TEMPORARY, NewContent
from pytest_gpumem.report.github import SUMMARY_LIMIT, cause_warnings, error_lines
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.report.markdown import markdown
from pytest_gpumem.report.merge import merge
from pytest_gpumem.report.model import MAX_SHARDS
from pytest_gpumem.session.origin import accept_command
from pytest_gpumem.session.output_files import require_replaceable
from pytest_gpumem.session.settings import OUTPUTS
from pytest_gpumem.tracebacks import without_collections

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping

    from pytest_gpumem.report.merge import Merged

HELP = "print or write JSON reports as Markdown, or merge several reports into one"
DESCRIPTION = f"""{HELP[0].upper()}{HELP[1:]}: the
reports of all shards and devices of a suite become one page, one comment, one file. Reports of two
commits or of two projects are refused, and so are two different figures of one test on one device;
then nothing is written. --limit shortens the Markdown to that many bytes: GitHub accepts 65,536
characters in a comment. Exit status 1: shards are missing, or, with --stale=fail, baselines have
no test; 2: a report cannot be read or merged."""
MIN_BYTES: Final = 1000
"""bytes that the shortest Markdown needs, approximately"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpumem report``."""
    parser.add_argument(
        "reports", metavar="REPORT.json", nargs="+", help="files of pytest --gpumem-json"
    )
    parser.add_argument("--limit", metavar="BYTES", type=int, help="largest size of the Markdown")
    for output in OUTPUTS:
        words = f"write a {output.title} of all reports to this file, and print no report"
        parser.add_argument(f"--{output.name}", metavar="PATH", help=words)
    parser.add_argument(
        "--github",
        action="store_true",
        help="add the report to the summary of the GitHub job, and print annotations for failures",
    )
    parser.add_argument(
        "--expect", metavar="NUMBER", type=int, help="the expected number of reports"
    )
    parser.add_argument(
        "--stale",
        choices=("note", "fail"),
        default="note",
        help="baselines whose tests are in no report: note or fail",
    )
    parser.add_argument(
        "--artifact",
        metavar="NAME",
        default="",
        help="the name of the CI artifact with the --json file, for the command that accepts "
        "its figures",
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Return the reports in the chosen format, or write them to files."""
    limit = arguments.limit
    if arguments.expect is not None and not 0 < arguments.expect <= MAX_SHARDS:
        problem = "this is not a number of reports"
        remedy = "write a whole number from 1, such as --expect=8"
        raise SpecError(f"--expect={arguments.expect}", problem, remedy)
    for output in OUTPUTS:
        if path := getattr(arguments, output.name):
            output.require(f"--{output.name}={path}")
            require_replaceable(path, output.beginning, f"--{output.name}={path}")
    with without_collections():  # creates hundreds of thousands of objects, and no garbage
        reports = [(name, read_report(name)) for name in arguments.reports]
        accept = ""
        if len(reports) > 1:
            artifact = arguments.artifact if arguments.json else ""
            accept = accept_command(os.path.basename(arguments.json or ""), artifact)  # noqa: PTH119
            # Name the merged report if one is written, as its parts may be deleted later.
            names = [arguments.json] if arguments.json else arguments.reports
            accept = accept or shlex.join(["gpumem", "accept", *names])
        merged = merge(reports, arguments.expect, accept)
        files = _rendered(merged, arguments)
        printed = ""
        if not files and not arguments.github:
            printed = _markdown_within(merged, limit).rstrip("\n")
        summary = _summary_lines(merged) if arguments.github else ""
        _write_files(files)
    lines = [f"gpumem: written: {path}" for path in files]
    if arguments.github:
        path = os.environ["GITHUB_STEP_SUMMARY"]
        try:
            with Path(path).open("ab") as stream:
                stream.write(f"\n{summary}".encode("utf-8", "backslashreplace"))
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise ReportError(path, problem, "look at GITHUB_STEP_SUMMARY") from error
        workspace = Path(os.environ.get("GITHUB_WORKSPACE") or os.curdir)
        origins = merged.report.origins
        root = workspace / origins[0].root if origins else workspace
        lines += error_lines(merged.report.results, root=root, workspace=workspace)
        lines += cause_warnings(merged.report.results, root=root, workspace=workspace)
    trouble = [f"gpumem: missing: {merged.missing}"] if merged.missing else []
    failed = bool(merged.missing) or (bool(merged.stale) and arguments.stale == "fail")
    if merged.stale and (files or arguments.github):
        number = len(merged.stale)
        verb = "1 baseline has" if number == 1 else f"{number} baselines have"
        trouble.append(f"gpumem: {verb} no test: pytest --collect-only lists them")
    return Outcome(printed or "\n".join(lines), FOUND if failed else OK, tuple(trouble))


def _when(merged: Merged) -> str:
    return f"{merged.created.replace('T', ' ').removesuffix('Z')} UTC"


def _markdown_within(merged: Merged, limit: int | None) -> str:
    rendered = markdown(merged.report, when=_when(merged), limit=limit)
    if not rendered:
        remedy = f"write --limit={MIN_BYTES} or more"
        raise SpecError(f"--limit={limit}", "no report is that short", remedy)
    return rendered


def _rendered(merged: Merged, arguments: argparse.Namespace) -> dict[str, Iterable[str]]:
    files: dict[str, Iterable[str]] = {}
    seen: set[str] = set()
    for output in OUTPUTS:
        path = getattr(arguments, output.name)
        if path is None:
            continue
        file = os.path.normpath(Path(path).absolute())
        if file in seen:
            raise SpecError(path, "two reports cannot be in one file", "name two different files")
        seen.add(file)
        if output.name == "markdown":  # only this format has a limit
            files[path] = [_markdown_within(merged, arguments.limit)]
            continue
        name = ""
        if arguments.json is not None:
            name = Path(os.path.relpath(arguments.json, Path(path).parent)).as_posix()
        files[path] = output.pieces(merged.report, merged.created, _when(merged), name)
    return files


def _write_files(files: Mapping[str, Iterable[str]]) -> None:
    """Write files: all of them, or none if one cannot be written."""
    written: list[NewContent] = []
    path = ""
    try:
        for number, (path, pieces) in enumerate(files.items()):
            encoded = (piece.encode("utf-8", "backslashreplace") for piece in pieces)
            written.append(NewContent(Path(path), encoded, f"{TEMPORARY}-{os.getpid()}-{number}"))
        for path, content in zip(files, written, strict=True):  # noqa: B007 - for the error
            content.replace()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ReportError(path, f"cannot be written: {reason}", "name another file") from error
    finally:
        for content in written:
            content.discard()


def _summary_lines(merged: Merged) -> str:
    path = os.environ.get("GITHUB_STEP_SUMMARY", "")
    if not path:
        problem = "GITHUB_STEP_SUMMARY is not set: this is not a GitHub Actions job"
        raise SpecError("--github", problem, "leave it out, or write --markdown=PATH")
    try:
        used = Path(path).stat().st_size
    except OSError:
        used = 0
    return markdown(merged.report, when=_when(merged), limit=max(1, SUMMARY_LIMIT - used - 1))
