"""``gpumem report``: a JSON report in another form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.cli.outcome import Outcome
from pytest_gpumem.errors import SpecError
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.report.markdown import markdown
from pytest_gpumem.report.trackers.formats import FORMATS

if TYPE_CHECKING:
    import argparse

HELP = "print a JSON report in another form: Markdown, or what trackers of benchmarks read"
DESCRIPTION = f"""{HELP.capitalize()}. With --limit the Markdown is shortened to that many bytes:
GitHub takes 65,536 characters of a comment."""
FEWEST_BYTES: Final = 1000
"""bytes that the shortest Markdown needs, about"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpumem report``."""
    parser.add_argument("report", metavar="REPORT.json", help="a file of pytest --gpumem-json")
    parser.add_argument(
        "--format", choices=("markdown", *FORMATS), default="markdown", help="of what is printed"
    )
    parser.add_argument("--limit", metavar="BYTES", type=int, help="of the Markdown")


def run(arguments: argparse.Namespace) -> Outcome:
    """Return the report in the chosen form.

    Raises:
        GpuMemError: the report cannot be read, or not be as short.
    """
    limit = arguments.limit
    saved = read_report(arguments.report)
    if arguments.format in FORMATS:
        if limit is not None:
            problem = "only Markdown can be shortened"
            raise SpecError(f"--limit={limit}", problem, "leave it out, or --format")
        return Outcome(FORMATS[arguments.format](saved.results).rstrip("\n"))
    when = saved.created.replace("T", " ").removesuffix("Z")
    rendered = markdown(saved.report, when=f"{when} UTC", limit=limit)
    if not rendered:
        remedy = f"write --limit={FEWEST_BYTES} or more"
        raise SpecError(f"--limit={limit}", "no report is as short", remedy)
    return Outcome(rendered.rstrip("\n"))
