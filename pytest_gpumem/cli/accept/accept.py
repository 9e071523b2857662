"""``gpumem accept``: write the baselines of a finished session from its JSON report."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from pytest_gpumem.baselines.file_format import check, encode
from pytest_gpumem.baselines.paths import Key, baseline_error_on_write, device_keys
from pytest_gpumem.baselines.store import WHOLE_TEST, BaselineStore, NewBaseline, checked_file
from pytest_gpumem.cli.accept.download import downloaded
from pytest_gpumem.cli.accept.expression import chooser
from pytest_gpumem.cli.outcome import BAD_INPUT, FOUND, OK, Outcome, confirmed, show
from pytest_gpumem.cli.recorded.change_list import table
from pytest_gpumem.cli.recorded.changes import Changes, pair_entries
from pytest_gpumem.errors import ReportError, SpecError
from pytest_gpumem.files.atomic_file import TEMPORARY, NewContent
from pytest_gpumem.judge.result import entry_of
from pytest_gpumem.nodeids import split_nodeid
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.report.merge import merge
from pytest_gpumem.report.text import printable
from pytest_gpumem.session.origin import checkout_of
from pytest_gpumem.tracebacks import without_collections

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import BaselineEntry, Measurement
    from pytest_gpumem.report.json_report import SavedReport
    from pytest_gpumem.report.merge import Merged
    from pytest_gpumem.report.model import Origin
    from pytest_gpumem.session.origin import Checkout

HELP = "write the baselines of an earlier run, from its JSON report"
DESCRIPTION = f"""{HELP[0].upper()}{HELP[1:]}: for the tests that grew, shrank or have no baseline,
or for the tests that -k names. The command first shows the changes, and writes them after a yes.
The files are those that pytest --gpumem-update-baselines would have written in that run. Exit
status 1: there was no yes, so nothing was written; 2: a report or a test was refused, so nothing
was written."""
MAX_NAMES: Final = 20
"""maximum number of tests to name as refused or without figures"""
_OUTCOMES: Final = {
    "failed": "it failed for a reason other than its memory",
    "xfail": "it is marked xfail",
    "unfinished": "it did not finish",
    "": "the report does not say how this test ended",
}
"""by outcome: why a test's figures are not accepted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpumem accept``."""
    parser.add_argument(
        "reports", metavar="REPORT.json", nargs="*", help="files of pytest --gpumem-json"
    )
    parser.add_argument(
        "--run",
        metavar="URL",
        help="take the reports from the artifacts of this GitHub Actions run, with the gh command",
    )
    parser.add_argument(
        "--artifact",
        metavar="NAME",
        default="",
        help="use only the artifacts of --run with this name or pattern",
    )
    parser.add_argument(
        "-k",
        dest="expression",
        metavar="EXPRESSION",
        help="accept only these tests, as with pytest's -k",
    )
    skipping = "accept the other tests if some are refused, such as those that ran out of memory"
    for flag, meaning in (
        ("--all", "accept all tests, including tests within their tolerance"),
        ("--skip-refused", skipping),
        ("--yes", "write without asking"),
        ("--any-commit", "accept reports of any commit"),
    ):
        parser.add_argument(flag, action="store_true", help=meaning)
    parser.add_argument(
        "--device",
        metavar="KEY",
        action="append",
        default=[],
        help="also accept figures of this device, which has no baselines yet: virtual-T4",
    )
    parser.add_argument(
        "--baseline-dir",
        metavar="DIR",
        help="write into this folder, not into the folder that each report names",
    )


@dataclass
class _Accepted:
    """The new baselines to write into one folder."""

    folder: Path
    follow_provenance: bool = False
    baselines: list[NewBaseline] = field(default_factory=list)

    @property
    def store(self) -> BaselineStore:
        return BaselineStore(self.folder, follow_provenance=self.follow_provenance)


def run(arguments: argparse.Namespace) -> Outcome:
    """Show the changes, ask the user, and write the baselines."""
    if arguments.run is None:
        if not arguments.reports:
            raise SpecError(
                "no report", "there is nothing to accept", "name a report, or write --run=URL"
            )
        return _accept(arguments, [Path(name) for name in arguments.reports], Path())
    if arguments.reports:
        problem = "with --run, reports come from that run only"
        raise SpecError(f"--run={arguments.run}", problem, "name reports or write --run, not both")
    with downloaded(arguments.run, arguments.artifact) as (folder, paths):
        return _accept(arguments, paths, folder)


def _accept(arguments: argparse.Namespace, paths: Sequence[Path], above: Path) -> Outcome:
    chosen = None if arguments.expression is None else chooser(arguments.expression)
    checkout = checkout_of(Path())
    reports = [(str(os.path.relpath(path, above)), read_report(path)) for path in paths]
    for name, saved in reports:
        _require_origins(name, saved)
        if not arguments.any_commit:
            _require_commit(name, saved.report.origins, checkout)
    merged = merge(reports)
    top = Path() if checkout is None else checkout.top
    tests = list(_tests(merged, chosen, every=arguments.all))
    without = dict(_without_figures(merged, chosen))
    if chosen is not None and not tests and not without:
        problem = "no test of the report has this name"
        raise SpecError(f"-k {arguments.expression}", problem, "gpumem report lists the tests")
    _require_project(merged, tests, top)
    folders = [
        _baseline_folder(merged, index, top, arguments.baseline_dir)
        for index in range(len(merged.report.origins))
    ]
    refusals = list(_refusals(tests, folders, arguments.device))
    lines = [
        *(f"{test.nodeid} on {test.device} is not accepted: {reason}" for test, reason in refusals),
        *(f"{nodeid} has no figures: {reason}" for nodeid, reason in without.items()),
    ]
    trouble_lines = tuple(f"gpumem: {printable(line)}" for line in lines[:MAX_NAMES])
    if len(lines) > MAX_NAMES:
        trouble_lines += (f"gpumem: and {len(lines) - MAX_NAMES} more",)
    # Without -k, a test that failed before it was measured only keeps its baseline: the other
    # tests are accepted.
    if (refusals or (without and chosen is not None)) and not arguments.skip_refused:
        remedy = "gpumem: nothing was written; --skip-refused accepts the other tests"
        return Outcome("", BAD_INPUT, (*trouble_lines, remedy))
    refused = {id(test) for test, _ in refusals}
    groups: dict[str, _Accepted] = {}
    for test in tests:
        if id(test) not in refused:
            origin, folder = merged.report.origins[test.origin], folders[test.origin]
            group = groups.setdefault(os.path.realpath(folder), _Accepted(folder))
            group.follow_provenance |= origin.follow_provenance
            parts = {each.part: entry_of(each, ranks=origin.ranks) for each, _ in test.measured}
            device = test.measured[0][1].device
            group.baselines.append(NewBaseline(device, *split_nodeid(test.nodeid), parts))
    names = [name for name, _ in reports]
    return _write(merged, list(groups.values()), names, trouble_lines, sure=arguments.yes)


def _require_origins(name: str, saved: SavedReport) -> None:
    """Refuse a report that does not say where it comes from, or is incomplete."""
    again = "run the tests again, with this version of pytest-gpumem and --gpumem-json"
    if not saved.report.origins:
        problem = f"does not name its commit: pytest-gpumem {saved.gpumem} wrote this report"
        raise ReportError(name, problem, again)
    for origin in saved.report.origins:
        if origin.unfinished:
            raise ReportError(
                name, f"is from a run that did not finish: {origin.unfinished}", again
            )
    if any(result.origin >= len(saved.report.origins) for result in saved.results):
        raise ReportError(name, "has a result from a run that the report does not describe", again)


def _require_commit(name: str, origins: Iterable[Origin], checkout: Checkout | None) -> None:
    """Refuse a report whose commit is not the one checked out."""
    here = "" if checkout is None else checkout.commit
    for origin in origins:
        if here and here in {origin.commit, origin.head}:
            continue
        own = origin.head or origin.commit
        in_checkout = checkout is not None and checkout.has(own)
        problem = f"is from commit {own[:12]}" if own else "is from a folder outside git"
        if not here:
            problem += ", but this folder has no commit"
        elif own and not in_checkout:
            problem += ", which this repository does not have"
        else:
            problem += f", but {here[:12]} is checked out"
        remedy = "write --any-commit if its figures are also right here"
        if in_checkout:
            remedy = f"run git switch --detach {own[:12]}, or {remedy}"
        elif own:
            remedy = f"run git fetch if this is the repository that was tested, or {remedy}"
        raise ReportError(name, printable(problem), printable(remedy))


def _require_project(merged: Merged, tests: Iterable[_ReportedTest], top: Path) -> None:
    """Refuse reports on test files that do not exist here."""
    missing: dict[tuple[int, str], bool] = {}
    for test in tests:
        origin = merged.report.origins[test.origin]
        module = split_nodeid(test.nodeid)[0]
        key = test.origin, module
        if key not in missing:
            path = Path(os.path.normpath(top / origin.root / module))
            try:
                missing[key] = not path.is_file()
            except (OSError, ValueError):  # no file can have that name
                missing[key] = True
        if missing[key]:
            name = printable(str(PurePosixPath(origin.root, module)))
            problem = f"is from another project: there is no file {name} here"
            remedy = "run gpumem accept in the repository that was tested"
            raise ReportError(merged.origin_names[test.origin], problem, remedy)


def _baseline_folder(merged: Merged, index: int, top: Path, chosen: str | None) -> Path:
    if chosen is not None:
        return Path(chosen)
    name, folder = merged.origin_names[index], merged.report.origins[index].folder
    place = PurePosixPath(folder)
    # A report may come from anybody, so it may only name a folder within the repository.
    outside = not folder or "\0" in folder or place.is_absolute() or ".." in place.parts
    real_top = Path(os.path.realpath(top))
    if not outside:
        try:
            outside = not Path(os.path.realpath(top / folder)).is_relative_to(real_top)
        except (OSError, ValueError):
            outside = True
    if outside or ".git" in (part.lower() for part in place.parts):
        problem = f"names a folder of baselines that is not in this repository: {folder!r}"
        raise ReportError(name, printable(problem), "name the folder with --baseline-dir")
    return top / folder


@dataclass(frozen=True)
class _ReportedTest:
    """A test on one device, from one report."""

    origin: int
    nodeid: str
    device: str
    results: tuple[Result, ...]
    """results of the whole test and its parts"""

    @property
    def measured(self) -> list[tuple[Result, Measurement]]:
        """The results that may become baselines, with their measurements."""
        return [
            (result, result.measurement)
            for result in self.results
            if result.measurement is not None and result.baseline
        ]


def _tests(
    merged: Merged, chosen: Callable[[str], bool] | None, *, every: bool
) -> Iterator[_ReportedTest]:
    """Yield the tests to accept.

    ``chosen`` selects tests by nodeid. If it is None, ``every`` selects all tests; without
    ``every`` these are the tests whose memory changed or made them fail.
    """
    groups: dict[tuple[int, str, str], list[Result]] = {}
    for result in merged.report.results:
        if result.measurement is not None:
            key = result.origin, result.nodeid, result.device_key
            groups.setdefault(key, []).append(result)
    for (origin, nodeid, device), results in groups.items():
        if chosen is not None:
            take = chosen(nodeid)
        else:
            kinds = [result.verdict.kind for result in results if result.outcome != "xfail"]
            take = every or any(kind.by_baseline or kind.refusal for kind in kinds)
        test = _ReportedTest(origin, nodeid, device, tuple(results))
        if take and (test.measured or chosen is not None):
            yield test


def _refusals(
    tests: Iterable[_ReportedTest], folders: Sequence[Path], devices: Iterable[str]
) -> Iterator[tuple[_ReportedTest, str]]:
    """Yield tests whose figures are not accepted, with the reasons."""
    declared = {folder: {*device_keys(folder), *devices} for folder in set(folders)}
    recorded = {folder: bool(device_keys(folder)) for folder in declared}
    for test in tests:
        folder = folders[test.origin]
        cards = {result.card for result in test.results if result.card}
        device = test.results[0].measurement.device if test.results[0].measurement else None
        kinds = sorted((result.verdict.kind for result in test.results), key=lambda k: k.severity)
        reason = next((kind.refusal for kind in kinds if kind.refusal), "")
        outcome = next(
            (_OUTCOMES[each.outcome] for each in test.results if each.outcome != "passed"), ""
        )
        held_to = next((each.verdict.held_to for each in test.results if each.verdict.held_to), "")
        if reason or outcome:
            yield test, reason or outcome
        elif held_to:
            yield test, f"it was compared with the baseline of {held_to}"
        elif not test.measured:
            yield test, "its marker has baseline=False"
        elif device is not None and device.is_predicted and cards and {device.name} != cards:
            yield test, f"it declares card={min(cards)!r}"
        elif recorded[folder] and not cards and test.device not in declared[folder]:
            keys = ", ".join(device_keys(folder))
            option = f"--device={test.device} also accepts this device"
            yield test, f"there are baselines for {keys} only: {option}"


def _without_figures(
    merged: Merged, chosen: Callable[[str], bool] | None
) -> Iterator[tuple[str, str]]:
    """Yield the chosen tests that have no figures, and why.

    If ``chosen`` is None, these are the tests that failed.
    """
    results = merged.report.results
    measured = {result.nodeid for result in results if result.measurement is not None}
    for outcome in merged.report.own_outcomes:
        take = outcome.failed if chosen is None else chosen(outcome.nodeid)
        if take and outcome.nodeid not in measured:
            words = {"skipped": "it was skipped", "xfailed": _OUTCOMES["xfail"]}
            yield outcome.nodeid, words.get(outcome.word, _OUTCOMES["failed"])
    for result in results:
        take = chosen is not None and chosen(result.nodeid)
        if take and result.nodeid not in measured:
            yield result.nodeid, str(result.verdict.kind)


def _write(
    merged: Merged,
    groups: Sequence[_Accepted],
    names: Sequence[str],
    trouble_lines: tuple[str, ...],
    *,
    sure: bool,
) -> Outcome:
    """Show the changes, ask unless ``sure``, and write; ``trouble_lines`` name refused tests."""
    source = names[0] if len(names) == 1 else f"{len(names)} reports"
    remarks = [
        f"{name} was made with uncommitted changes"
        for name, origin in zip(merged.origin_names, merged.report.origins, strict=True)
        if origin.modified
    ]
    if merged.missing:
        kept = "the tests of these reports keep their baselines"
        remarks.append(f"missing: {merged.missing}: {kept}")
    texts = []
    width = shutil.get_terminal_size().columns
    for group in groups:
        changes = _changes(group, source, tuple(remarks))
        if changes is not None:
            texts.append(table(changes, width))
    if not texts:
        adjective = "other " if trouble_lines else ""
        sentence = f"gpumem: nothing to accept: no {adjective}figure differs from its baseline"
        return Outcome(sentence, OK, trouble_lines)
    if not sure:
        show(Outcome("\n\n".join(texts), trouble=trouble_lines))
        texts, trouble_lines = [], ()
        if not confirmed("write these baselines?"):
            return Outcome("gpumem: nothing was written; --yes writes the baselines", FOUND)
    files = write_all({group.store: group.baselines for group in groups})
    lines = [f"gpumem: written: {os.path.relpath(file)}" for file in files]
    return Outcome("\n\n".join([*texts, "\n".join(map(printable, lines))]), OK, trouble_lines)


def _changes(group: _Accepted, source: str, remarks: tuple[str, ...]) -> Changes | None:
    """Return a folder's changes; None if no figure changes."""
    store = group.store
    old: dict[Key, BaselineEntry] = {}
    new: dict[Key, BaselineEntry] = {}
    differs = False
    for baseline in group.baselines:
        place = baseline.device.key, baseline.module, baseline.test
        check(f"{baseline.module}::{baseline.test}", baseline.device, baseline.parts)
        old_parts = store.parts(*place)
        if WHOLE_TEST not in baseline.parts:  # the update keeps the test's other parts
            old_parts = {part: entry for part, entry in old_parts.items() if part in baseline.parts}
        parts = {*old_parts, *baseline.parts}
        pairs = [(old_parts.get(part), baseline.parts.get(part)) for part in parts]
        differs |= not all(store.same(*pair) for pair in pairs)
        old.update({Key(*place, part): entry for part, entry in old_parts.items()})
        new.update({Key(*place, part): entry for part, entry in baseline.parts.items()})
    if not differs:
        return None
    entries = tuple(pair_entries(old, new))
    folder = os.path.relpath(group.folder)
    return Changes(printable(folder), source, entries, remarks)


def write_all(updates: Mapping[BaselineStore, Iterable[NewBaseline]]) -> list[Path]:
    """Write the entries that changed in several folders: all or none.

    The new content of every file is written next to it before any file is replaced. If the process
    is killed while replacing, each file is either old or new. No two stores may share a folder.

    Returns:
        The files that were written.

    Raises:
        BaselineError: a file cannot be read or written, or a new baseline is invalid; all files are
            unchanged. If replacing a file itself fails, the files replaced before it keep their new
            content.
    """
    written: dict[Path, NewContent] = {}
    with without_collections(), ExitStack() as stack:
        # Lock in a fixed order: another process may lock the same folders, and each would hold a
        # lock that the other waits for.
        for store in sorted(updates, key=lambda store: os.path.realpath(store.directory)):
            stack.enter_context(store.locked())
        try:
            for store, baselines in updates.items():
                by_file: dict[tuple[str, str], list[NewBaseline]] = {}
                for baseline in baselines:
                    by_file.setdefault(checked_file(baseline), []).append(baseline)
                for key, group in sorted(by_file.items()):
                    file, _, changed = store.revise(group)
                    if changed:
                        path, name = store.path(*key), f"{TEMPORARY}-{len(written)}"
                        with baseline_error_on_write(path):
                            written[path] = NewContent(path, [encode(file)], name)
            for path, new in written.items():
                with baseline_error_on_write(path):
                    new.replace()
        finally:
            for new in written.values():
                new.discard()
    return list(written)
