"""``gpumem bisect``: find the release of a package that caused a growth."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.cli.bisect.candidates import releases_between
from pytest_gpumem.cli.bisect.halving import Halving
from pytest_gpumem.cli.bisect.trials import SkippedError, Trials, VersionTests
from pytest_gpumem.cli.outcome import FOUND, OK, Outcome, add_device_argument, write_json
from pytest_gpumem.cli.recorded.change_list import table
from pytest_gpumem.cli.recorded.changes import Changes, pair_entries
from pytest_gpumem.cli.recorded.sources import measured_entries
from pytest_gpumem.errors import SpecError
from pytest_gpumem.judge.verdict import DEFAULT_TOLERANCES, EVERY_PEAK, PeakName
from pytest_gpumem.report.text import printable
from pytest_gpumem.session.output_files import require_replaceable
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.baselines.paths import Key
    from pytest_gpumem.cli.recorded.changes import EntryChange
    from pytest_gpumem.measurement import BaselineEntry

HELP: Final = "find the release of a package that increased memory"
DESCRIPTION: Final = (
    f"{HELP[0].upper()}{HELP[1:]}. The tests run with releases between GOOD and BAD, each release "
    "in its own environment, without baselines. A binary search finds the first release "
    "that takes more memory. Usage: gpumem bisect transformers 4.37.2 4.38.2 "
    "tests/test_llama.py. If BAD is older than GOOD, the answer is the first release that "
    "takes less. An interrupted search continues where it stopped. Exit status 1: nothing "
    "grew between GOOD and BAD."
)
FOLDER: Final = ".gpumem-bisect"
TIMEOUT: Final = 3600
OUT_OF_MEMORY: Final = math.inf
BEGINNING: Final = rb'\{\s*"package": ".*",\s*"good": '
"""pattern for the first bytes of a file that ``--json`` may replace"""


class Followed(NamedTuple):
    """The figure that distinguishes good from bad versions: the one that grew most."""

    key: Key
    device: int
    peak: PeakName

    @property
    def name(self) -> str:
        """The figure and its test: "peak allocated of tests/test_model.py::test_step"."""
        device = f" of device {self.device}" if self.device else ""
        return f"peak {self.peak}{device} of {self.key.nodeid}" + (
            f" ({self.key.part})" if self.key.part else ""
        )


class VersionFigures(NamedTuple):
    """The figures of each test in one report."""

    entries: Mapping[Key, BaselineEntry]
    out_of_memory: frozenset[Key]

    def value(self, followed: Followed) -> float | None:
        """Return a figure in bytes; infinity after out of memory, None if it is missing."""
        if followed.key in self.out_of_memory:
            return OUT_OF_MEMORY
        entry = self.entries.get(followed.key)
        if entry is None or len(entry.peaks) <= followed.device:
            return None
        return float(getattr(entry.peaks[followed.device], followed.peak))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.usage = "gpumem bisect PACKAGE GOOD BAD TEST... [--with REQUIREMENT]..."
    parser.add_argument(
        "words",
        nargs="+",
        metavar="PACKAGE GOOD BAD TEST",
        help="a package of the index (torch too), a release without the growth, a release with "
        "the growth, and the tests as for pytest; pytest's options go after --. If GOOD or BAD is "
        "a release candidate, others are tried too",
    )
    parser.add_argument(
        "--with",
        dest="requirements",
        action="append",
        default=[],
        metavar="REQUIREMENT",
        help="another requirement to install, as for pip: datasets==3.0.0, or . for the project "
        "(repeatable). The installed version of torch is used unless torch is named here",
    )
    parser.add_argument(
        "--as-of",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="a package that is released together with the one in question: each release is tried "
        "with the newest release that this package had on the day of its upload (repeatable)",
    )
    parser.add_argument(
        "--light",
        action="store_true",
        help="install none of NVIDIA's packages except cuDNN (gpumem light), for the virtual GPU",
    )
    add_device_argument(
        parser,
        "where the tests run: auto (on a real GPU if there is one, else on the virtual GPU), "
        "cuda, virtual",
        "auto",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"skip a version whose tests run longer (default: {TIMEOUT})",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH",
        help="also write the answer to this file, with exact bytes",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="forget the results of an earlier search"
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Search for the release that changed memory; return it with its figures and the cause."""
    if arguments.json is not None:
        require_replaceable(arguments.json, BEGINNING, f"--json={arguments.json}")
    package, good, bad, tests = parse_words(arguments)
    how = arguments.device, arguments.light, tuple(arguments.as_of)
    question = VersionTests(package, tests, tuple(arguments.requirements), *how)
    candidates = releases_between(package, good, bad)
    trials = Trials(question, Path(FOLDER).absolute(), timeout=arguments.timeout)
    trials.begin(fresh=arguments.fresh)
    return Bisection(arguments, package, *candidates, trials).run()


def parse_words(arguments: argparse.Namespace) -> tuple[str, str, str, tuple[str, ...]]:
    """Return the package, the good and the bad release, and pytest's arguments."""
    words = [*arguments.words, *arguments.pytest_arguments]
    if len(words) < len(("package", "good", "bad", "test")):
        problem = "a package, two releases and a test are needed"
        remedy = "write: gpumem bisect transformers 4.37.2 4.38.2 tests/test_llama.py"
        raise SpecError(shlex.join(["gpumem", "bisect", *words]), problem, remedy)
    package, good, bad, *tests = words
    # Check before anything is installed.
    paths = () if "--pyargs" in arguments.pytest_arguments else arguments.words
    for test in paths[3:]:
        if not Path(test.partition("::")[0]).exists():
            remedy = "name a test as for pytest: tests/test_llama.py::test_step"
            raise SpecError(test, f"{Path.cwd()} has no such file or folder", remedy)
    if os.sep in package or package.startswith("-"):
        remedy = "search the commits of a repository with git bisect run pytest TEST"
        raise SpecError(package, "this is not the name of a package", remedy)
    return package, good, bad, tuple(tests)


@dataclass
class Bisection:
    """One search, reporting its progress on standard error."""

    arguments: argparse.Namespace
    package: str
    versions: list[str]
    """releases, from the good one to the bad one"""
    falls: bool
    """whether the bad version is the older one"""
    trials: Trials
    figures: dict[str, VersionFigures] = field(default_factory=dict)
    """figures of each version that was tried"""

    def run(self) -> Outcome:
        """Try both ends, then bisect the versions between them."""
        versions = self.versions
        search = Halving(versions)
        _print_progress(
            f"{len(versions)} releases of {self.package} from {versions[0]} to {versions[-1]}: "
            f"at most {search.trials_left + 2} to try; reports and logs are kept in "
            f"{self.trials.folder}"
        )
        self._try_end(versions[0])
        self._try_end(versions[-1])
        followed = leading_growth(self.figures[versions[0]], self.figures[versions[-1]])
        if followed is None:
            first, last = versions[0], versions[-1]
            head = f"nothing grew between {self.package} {first} and {last}"
            self._write_result({"found": None})
            return Outcome(f"{head}\n\n{self._table(first, last)}", FOUND)
        low, high = (self._value(version, followed) for version in (versions[0], versions[-1]))
        limit = (low + high) / 2
        for version in (versions[0], versions[-1]):
            self._tell_trial(version, followed, is_bad=version == versions[-1])
        while (index := search.next_index) is not None:
            version = versions[index]
            try:
                self._try(version)
                value = self._value(version, followed)
            except SkippedError as reason:
                search.skipped.add(index)
                _print_progress(f"  {version}: skipped, {reason}")
                continue
            is_bad = value > limit if limit < OUT_OF_MEMORY else value == OUT_OF_MEMORY
            search.note(index, is_bad=is_bad)
            self._tell_trial(version, followed, is_bad=is_bad)
        return self._answer(search, followed)

    def _try(self, version: str) -> None:
        if not self.trials.is_known(version):
            _print_progress(f"  {version}: installing and running its tests")
        results = self.trials.report(version).results
        self.figures[version] = VersionFigures(*measured_entries(results))

    def _try_end(self, version: str) -> None:
        try:
            self._try(version)
        except SkippedError as reason:
            raise SpecError(
                f"{self.package} {version}",
                f"the search needs both ends, and this end cannot be tried: {reason}",
                "correct the tests or --with, or choose another end; --fresh tries this end again",
            ) from reason

    def _value(self, version: str, followed: Followed) -> float:
        value = self.figures[version].value(followed)
        if value is None:
            raise SkippedError(f"{followed.key.nodeid} was not measured with this version")
        return value

    def _tell_trial(self, version: str, followed: Followed, *, is_bad: bool) -> None:
        value = _size(self._value(version, followed))
        _print_progress(f"  {version}: {value}, {'bad' if is_bad else 'good'}")

    def _answer(self, search: Halving, followed: Followed) -> Outcome:
        good, bad = self.versions[search.last_good], self.versions[search.first_bad]
        low, high = self._value(good, followed), self._value(bad, followed)
        (change,) = (each for each in self._changes(good, bad) if each.key == followed.key)
        sizes = [None if value == OUT_OF_MEMORY else int(value) for value in (low, high)]
        old_size, new_size = reversed(sizes) if self.falls else sizes
        answer = {
            "found": good if self.falls else bad,
            "before": bad if self.falls else good,
            "takes": "less" if self.falls else "more",
            "nodeid": followed.key.nodeid,
            "part": followed.key.part,
            "device": followed.key.device,
            "device_index": followed.device,
            "peak": followed.peak,
            "bytes_before": old_size,
            "bytes_found": new_size,
            "cause": change.cause,
        }
        self._write_result(answer, search.untried)
        lines = []
        if search.untried:
            skipped = ", ".join(search.untried)
            lines.append(
                f"{self.package} {bad} takes more, and {good} "
                f"does not; these versions between them were skipped: {skipped}"
            )
        elif self.falls:
            lines.append(f"{self.package} {good} is the first that takes less:")
        else:
            lines.append(f"{self.package} {bad} is the first that takes more:")
        texts = [_size(high), _size(low)] if self.falls else [_size(low), _size(high)]
        more = "" if high == OUT_OF_MEMORY else f" ({_more(low, high)})"
        more = more.replace("+", "-") if self.falls else more
        lines.append(f"{followed.name}: {' -> '.join(texts)}{more}")
        blocks = ["\n".join(lines), self._table(good, bad)]
        blocks += self._further_growth(good, bad, followed)
        return Outcome("\n\n".join(blocks), OK)

    def _write_result(self, answer: Mapping[str, object], untried: Sequence[str] = ()) -> None:
        """Write the result to the file of ``--json``; a size of None means out of memory."""
        if self.arguments.json is None:
            return
        ends = self.versions[0], self.versions[-1]
        head = {"package": self.package, "good": ends[0], "bad": ends[1], "skipped": [*untried]}
        write_json(self.arguments.json, {**head, **answer})

    def _further_growth(self, good: str, bad: str, followed: Followed) -> list[str]:
        """Return sentences on growth before the good version found, and after the bad one found."""
        first, last = self.versions[0], self.versions[-1]
        sizes = [self._value(version, followed) for version in (first, good, bad, last)]
        allowance = DEFAULT_TOLERANCES[followed.peak].allowance(int(sizes[0]))
        return [
            f"{_more(low, high)} of the growth came between {older} and {newer}: search there too"
            for low, high, older, newer in (
                (sizes[0], sizes[1], first, good),
                (sizes[2], sizes[3], bad, last),
            )
            if high - low > allowance  # the difference is nan if both ran out of memory
        ]

    def _table(self, good: str, bad: str) -> str:
        changes = self._changes(good, bad)
        names = f"{self.package} {good}", f"{self.package} {bad}"
        return table(Changes(*names, tuple(changes)), shutil.get_terminal_size().columns)

    def _changes(self, good: str, bad: str) -> list[EntryChange]:
        old, new = self.figures[good], self.figures[bad]
        return pair_entries(
            old.entries, new.entries, old_oom=old.out_of_memory, new_oom=new.out_of_memory
        )


def leading_growth(good: VersionFigures, bad: VersionFigures) -> Followed | None:
    """Return the figure that grew most beyond its tolerance; None if none did.

    A test that newly runs out of memory comes first, then peak allocated, as it is equal in every
    run. Pinned memory is skipped if it was 0 with another torch: an older torch does not count it.
    """
    for key in sorted(bad.out_of_memory - good.out_of_memory):
        if key in good.entries:
            return Followed(key, 0, "allocated")
    growths: list[tuple[bool, int, Followed]] = []
    for key in good.entries.keys() & bad.entries.keys():
        older, newer = good.entries[key], bad.entries[key]
        same_torch = older.provenance.torch == newer.provenance.torch
        pairs = zip(older.peaks, newer.peaks, strict=False)
        for device, (old, new) in enumerate(pairs):
            for peak in EVERY_PEAK:
                old_bytes, new_bytes = getattr(old, peak), getattr(new, peak)
                if peak == "pinned" and not old_bytes and not same_torch:
                    continue
                if new_bytes - old_bytes > DEFAULT_TOLERANCES[peak].allowance(old_bytes):
                    followed = Followed(key, device, peak)
                    growths.append((peak == "allocated", new_bytes - old_bytes, followed))
    return max(growths)[2] if growths else None


def _size(value: float) -> str:
    return "out of memory" if value == OUT_OF_MEMORY else format_size(int(value))


def _more(low: float, high: float) -> str:
    return "the rest" if high == OUT_OF_MEMORY else f"+{format_size(int(high - low))}"


def _print_progress(line: str) -> None:
    """Print a line of progress; callers indent lines on single versions."""
    head = "" if line.startswith(" ") else "gpumem bisect: "
    print(f"{head}{printable(line)}", file=sys.stderr, flush=True)  # noqa: T201 - as it goes
