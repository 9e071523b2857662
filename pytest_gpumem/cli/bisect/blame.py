"""``gpumem blame``: find the edits of a project that caused a growth, by undoing them.

An edited line may allocate more because of another edit. So the tests run without an edit, and the
peak's decrease is what that edit added.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from importlib.util import decode_source, find_spec
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.cli.bisect.bisect import (
    OUT_OF_MEMORY,
    Followed,
    VersionFigures,
    leading_growth,
)
from pytest_gpumem.cli.bisect.trials import FINISHED, SkippedError, last_error
from pytest_gpumem.cli.outcome import FOUND, OK, Outcome
from pytest_gpumem.cli.recorded.sources import measured_entries
from pytest_gpumem.errors import SpecError
from pytest_gpumem.files.git import GitError, blob_contents, repository_root, run_git
from pytest_gpumem.judge.verdict import DEFAULT_TOLERANCES
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.report.text import printable
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Sequence

HELP: Final = "find the edits that increased memory, by undoing them"
DESCRIPTION: Final = (
    "Find the edits of Python files since a git REVISION that increased memory. The tests run "
    "without each edit in question, in processes of their own that import other sources; no file "
    "is changed. Usage: gpumem blame origin/main tests/test_llama.py::test_step. Exit status 1: "
    "no edit increased memory."
)
MIN_SHARE: Final = 8
"""edits that caused less than 1/MIN_SHARE of the growth are not reported"""


class Replacement(NamedTuple):
    """An edit of a file: lines that replaced others."""

    path: Path
    first: int
    """index of the first new line"""
    new: tuple[str, ...]
    old: tuple[str, ...]

    @property
    def place(self) -> str:
        """The file and the number of the first line."""
        return f"{os.path.relpath(self.path)}:{self.first + 1}"

    def __str__(self) -> str:
        """Return the edit's place, and its lines in patch format."""
        pairs = [("-", line) for line in self.old] + [("+", line) for line in self.new]
        return "\n".join([self.place, *(f"  {sign}{line.rstrip()}" for sign, line in pairs)])


Group = tuple[Replacement, ...]
"""edits that must be undone together for the file to parse"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("revision", metavar="REVISION", help="a commit without the growth")
    parser.add_argument(
        "tests",
        nargs="+",
        metavar="TEST",
        help="the tests as for pytest; pytest's options go after --",
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Return the edits that added memory, and how much each one added."""
    groups = edits_since(arguments.revision)
    if not groups:
        return Outcome(f"no Python file was edited since {arguments.revision}", FOUND)
    with TemporaryDirectory(prefix="gpumem-blame-") as folder:
        options = [*arguments.tests, *arguments.pytest_arguments]
        measure = partial(figures_without, Path(folder), options)
        return EditSearch(measure, arguments.revision).answer(groups)


def edits_since(revision: str) -> list[Group]:
    """Return the working tree's edits since a commit, except comments and formatting.

    Raises:
        SpecError: git cannot determine them.
    """
    try:
        root = repository_root()
        changed = run_git(
            *("-C", str(root), "diff", "--name-only", "-z", "--no-renames", "--diff-filter=M"),
            *(revision, "--", "*.py"),
        )
        names = [os.fsdecode(name) for name in changed.split(b"\0") if name]
        contents = [*blob_contents(root, [f"{revision}:{name}" for name in names])]
    except GitError as error:
        remedy = "name a commit of this repository, such as origin/main (git fetch brings it)"
        raise SpecError(revision, str(error), remedy) from error
    groups: list[Group] = []
    for name, content in zip(names, contents, strict=True):
        path = Path(os.path.realpath(root / name))
        try:
            groups += grouped(path, decode_source(content), decode_source(path.read_bytes()))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            _print_line(f"gpumem blame: {name} cannot be read, so its edits stay: {error}")
    return groups


def grouped(path: Path, old: str, new: str) -> Iterator[Group]:
    """Group a file's edits such that each group can be undone alone."""
    lines, old_lines = new.splitlines(keepends=True), old.splitlines(keepends=True)
    matcher = SequenceMatcher(None, old_lines, lines, autojunk=False)
    group: Group = ()
    for tag, old_first, old_last, first, last in matcher.get_opcodes():
        if tag != "equal":
            edit = Replacement(
                path, first, tuple(lines[first:last]), tuple(old_lines[old_first:old_last])
            )
            group = (*group, edit)
            program = _program(undone(new, group))
            if program is not None:
                if program != _program(new):
                    yield group
                group = ()
    if group:  # even with these edits undone the file does not parse
        yield group


def undone(source: str, edits: Iterable[Replacement]) -> str:
    """Return a file's source with some of its edits undone."""
    lines = source.splitlines(keepends=True)
    for edit in sorted(edits, key=lambda edit: edit.first, reverse=True):
        lines[edit.first : edit.first + len(edit.new)] = edit.old
    return "".join(lines)


def _program(source: str) -> str | None:
    """Dump a source's syntax tree, without docstrings; None if it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return ast.dump(tree)


def figures_without(
    folder: Path, options: Sequence[str], groups: Sequence[Group]
) -> VersionFigures:
    """Run pytest with ``options`` and some edits undone; return the tests' figures.

    Raises:
        SkippedError: the tests do not run, or none is measured.
    """
    sources: dict[str, str] = {}
    for path in {edit.path for edit in chain.from_iterable(groups)}:
        edits = [edit for edit in chain.from_iterable(groups) if edit.path == path]
        sources[str(path)] = undone(decode_source(path.read_bytes()), edits)
    given, report, log = (folder / name for name in ("sources", "report.json", "log"))
    given.write_text(json.dumps(sources), encoding="utf-8")
    report.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "pytest_gpumem.cli.bisect.undone", str(given), *options),
        *("-p", "no:cacheprovider", "--assert=plain", f"--gpumem-json={report}"),
        *("-o", f"gpumem_baseline_dir={folder}/none", "--gpumem-missing-baseline=note"),
        *("--gpumem-stale=note", "--gpumem-attribution=off", "--gpumem-github=off"),
        *(["-n0"] if find_spec("xdist") else []),  # a worker would import the files with all edits
    ]
    with log.open("wb") as output:
        status = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    if status not in FINISHED or not report.exists():
        raise SkippedError(last_error(log, status).partition(" (see ")[0])
    figures = VersionFigures(*measured_entries(read_report(report).results))
    if not (figures.entries or figures.out_of_memory):
        raise SkippedError("no test was measured")
    return figures


@dataclass
class EditSearch:
    """Searches for the edits that raised the figure that grew most; reports its progress."""

    figures_without: Callable[[Sequence[Group]], VersionFigures]
    """runs the tests without some edits; may raise a SkippedError"""
    revision: str
    followed: Followed | None = None
    least: float = 0
    """least bytes that an edit must add to be reported"""
    known: dict[tuple[Group, ...], float | None] = field(default_factory=dict)
    """the figure without each set of edits; None if the tests do not run then, or lack the
    figure"""

    def answer(self, groups: Sequence[Group]) -> Outcome:
        """Return the edits that increased memory, the largest increase first."""
        edits = "1 edit" if len(groups) == 1 else f"{len(groups)} edits"
        _print_line(f"gpumem blame: {edits} since {self.revision}")
        try:
            present, before = self.figures_without(()), self.figures_without(groups)
        except SkippedError as error:
            remedy = "correct the tests, or name another commit"
            problem = f"the tests do not run as they are, or without the {edits}: {error}"
            raise SpecError(self.revision, problem, remedy) from error
        self.followed = leading_growth(before, present)
        if self.followed is None:
            return Outcome(
                f"without the {edits} since {self.revision} the tests take as much memory: new "
                "files, data, installed packages, and programs that the tests start are not undone",
                FOUND,
            )
        name, old = self.followed.name, before.value(self.followed) or 0
        self.known = {(): present.value(self.followed), tuple(groups): old}
        growth = self._less_without(groups)
        _print_line(f"  {name}: {_size(self.known[()])}; without all: {_size(old)}")
        allowance = DEFAULT_TOLERANCES[self.followed.peak].allowance(int(old))
        self.least = max(growth / MIN_SHARE, allowance)
        sizes = f"{_size(old)} -> {_size(self.known[()])}"
        blocks = [f"{name} grew since {self.revision}: {sizes}"]
        for less, together in sorted(self._guilty(groups), key=lambda each: -each[0]):
            edited = "\nand ".join(map(str, chain.from_iterable(together)))
            amount = "all" if less == OUT_OF_MEMORY else f"+{_size(less)}"
            blocks.append(f"{amount} by {edited}")
        return Outcome("\n\n".join(blocks), OK)

    def _guilty(self, groups: Sequence[Group]) -> Iterator[tuple[float, Sequence[Group]]]:
        """Yield the smallest sets of edits that lower the figure when undone, and by how much."""
        middle, left, halves = len(groups) // 2, self._less_without(groups), []
        for half in (groups[:middle], groups[middle:]) if middle else ():
            less = self._less_without(half) if left >= self.least else 0
            if less >= self.least:
                halves.append(half)
                left -= less
        for half in halves:
            yield from self._guilty(half)
        if not halves:
            yield self._less_without(groups), groups

    def _less_without(self, groups: Sequence[Group]) -> float:
        """Return how much undoing some edits lowers the figure; 0 if the tests do not run then."""
        key = tuple(groups)
        if key not in self.known:
            self.known[key], size = None, "the tests do not run"
            with suppress(SkippedError):
                assert self.followed is not None  # noqa: S101 - for the type checker
                self.known[key] = self.figures_without(groups).value(self.followed)
                size = _size(self.known[key])
            places = ", ".join(edit.place for edit in chain.from_iterable(groups))
            _print_line(f"  without {places}: {size}")
        most, without = self.known[()], self.known[key]
        return 0 if most is None or without is None or most == without else most - without


def _size(nbytes: float | None) -> str:
    if nbytes is None:
        return "not measured"
    return "out of memory" if nbytes == OUT_OF_MEMORY else format_size(int(nbytes))


def _print_line(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)  # noqa: T201 - as it goes
