"""What did the newest releases of torch and of seven libraries change in the memory of steps?

    python -m benchmarks.radar.run [PACKAGE ...] [--releases 2] [--page radar.md]

Each release is installed in an environment of its own, with the newest releases of the other
packages. Its package's steps run there on the virtual GPU: those in benchmarks/ecosystem, and those
in this folder. The figures are compared with those of the release before. If a package has release
candidates, the newest one is compared with the last release. Reports are stored in .gpumem-radar; a
release that has a report does not run again. The page is Markdown; benchmarks/results/radar.md is
the last recorded one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from benchmarks.harness import OFFLINE, RESULTS, line
from pytest_gpumem.cli.bisect.candidates import offered_releases
from pytest_gpumem.cli.bisect.trials import SkippedError, Trials, VersionTests
from pytest_gpumem.cli.recorded.changes import pair_entries
from pytest_gpumem.cli.recorded.sources import measured_entries
from pytest_gpumem.errors import SpecError
from pytest_gpumem.report.text import signed_size
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.cli.recorded.changes import EntryChange

FOLDER = Path(__file__).parents[1]
KEPT = Path(".gpumem-radar")
# Ignore this project's pytest settings, which turn a library's warnings into errors. importlib mode
# allows two files with the same name.
OPTIONS = (f"--rootdir={FOLDER}", "-c", os.devnull, "--import-mode=importlib")
HANGS_S = 1800
BESIDE = {
    "torch": (),
    "transformers": ("accelerate",),
    "diffusers": ("transformers", "accelerate"),
    "trl": ("transformers", "accelerate", "datasets"),
    "peft": ("transformers", "accelerate"),
    "accelerate": (),
    "timm": ("torchvision",),
    "lightning": (),
}
"""by package: other packages to install with it, in their newest releases"""


def newest(package: str, number: int) -> list[str]:
    """Return the last release of each of the newest minor versions, the oldest first.

    A release candidate counts if it is newer than every release.
    """
    versions = sorted(map(Version, offered_releases(package, prereleases=True)))
    finals = [it for it in versions if not it.is_prerelease and it.local is None]
    candidates = [it for it in versions if it.pre and not it.dev and it > finals[-1]]
    last = {it.release[:2]: it for it in finals}
    return [str(it) for it in [*last.values(), *candidates[-1:]][-number:]]


def steps_of(package: str) -> list[Path]:
    """Return the files with the steps of a package."""
    files = (FOLDER / room / f"test_{package}.py" for room in ("ecosystem", "radar"))
    return [path for path in files if path.is_file()]


class Pair:
    """Two releases of a package, and the figures that differ between them."""

    def __init__(self, package: str, old: str, new: str) -> None:
        self.package, self.old, self.new = package, old, new
        self.problem = ""
        self.changes: list[EntryChange] = []
        self.steps = 0

    def compare(self, trials: Trials) -> None:
        """Run the releases that have no report, and compare the two."""
        reports = []
        for version in (self.old, self.new):
            try:
                reports.append(trials.report(version))
            except (SkippedError, SpecError) as reason:  # noqa: PERF203 - the version is told
                self.problem = f"{self.package} {version}: {reason}"
                return
        (old, old_oom), (new, new_oom) = (measured_entries(it.results) for it in reports)
        self.steps = len({key.nodeid for key in new})
        self.changes = pair_entries(old, new, old_oom=old_oom, new_oom=new_oom)

    def rows(self) -> Iterator[str]:
        """Yield a row of the page's table for each figure that differs."""
        title = f"{self.package} {self.old} -> {self.new}"
        if self.problem:
            yield f"| {title} | not tried: {self.problem} | | |"
            return
        moved = [change for change in self.changes if change.kind.value != "same"]
        for change in moved:
            test = f"{change.key.module}::{change.key.name}"
            row = change.rows[0] if change.rows else None
            figures = change.kind.value
            if row is not None:
                sizes = f"{format_size(row.baseline or 0)} -> {format_size(row.measured)}"
                figures = f"{row.title} {signed_size(row.difference or 0)}: {sizes}"
            yield f"| {title} | `{test}` | {figures} | {change.cause.replace('|', '/')} |"
        if not moved:
            yield f"| {title} | none of {self.steps} steps moved | | |"


def page(pairs: Sequence[Pair]) -> str:
    """Return the page."""
    head = (
        "# Radar\n\nWhat the newest releases changed in the peak memory of reference steps, on the "
        "virtual GPU.\nWritten by `python -m benchmarks.radar.run`; the steps are in "
        f"`benchmarks/radar` and `benchmarks/ecosystem`.\n\n{line()}\n\n"
        "| releases | step | what moved | where |\n|---|---|---|---|"
    )
    return "\n".join([head, *(row for pair in pairs for row in pair.rows())]) + "\n"


def main() -> int:
    """Run the radar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", choices=[*BESIDE, []], help="by default all")
    parser.add_argument("--releases", type=int, default=2, help="of each package (default: 2)")
    parser.add_argument("--page", type=Path, default=RESULTS / "radar.md")
    arguments = parser.parse_args()
    os.environ.update(OFFLINE)
    pairs: list[Pair] = []
    for package in arguments.packages or BESIDE:
        tests = (*map(str, steps_of(package)), *OPTIONS)
        light = package != "trl"  # trl's trainers need Triton
        question = VersionTests(package, tests, BESIDE[package], device="virtual", light=light)
        trials = Trials(question, KEPT, timeout=HANGS_S)
        trials.begin(fresh=False)
        versions = newest(package, arguments.releases)
        print(f"{package}: {', '.join(versions)}", file=sys.stderr, flush=True)
        for old, new in itertools.pairwise(versions):
            pairs.append(Pair(package, old, new))
            pairs[-1].compare(trials)
            print(*pairs[-1].rows(), sep="\n", file=sys.stderr, flush=True)
            arguments.page.write_text(page(pairs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
