"""Find stale baselines, whose tests no longer exist, after a full collection.

``--gpumem-stale=delete`` deletes them. Under pytest-xdist the workers collect the tests, and each
sends the stale baselines that it found to the controller.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gpumem.baselines.paths import Key
from pytest_gpumem.nodeids import module_of, without_card

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Collection as Collection_

    from pytest_gpumem.errors import BaselineError
    from pytest_gpumem.session.settings import Settings

NAME: Final = "gpumem-collecting"
SENT: Final = "gpumem_stale"
"""the key of a worker's stale baselines in its ``workeroutput``"""
NARROWING: Final = {
    "keyword": "-k",
    "markexpr": "-m",
    "lf": "--lf",
    "deselect": "--deselect",
    "ignore": "--ignore",
    "ignore_glob": "--ignore-glob",
    "stepwise": "--stepwise",
    "noconftest": "--noconftest",
    "showfixtures": "--fixtures",
    "show_fixtures_per_test": "--fixtures-per-test",
}
"""options that may leave tests out"""
NARROWING_INI: Final = ("python_", "testpaths", "norecursedirs", "collect_", "gpumem_cards")
"""prefixes of ini options that may leave tests out"""
SPLITTING: Final = frozenset(
    {"keyword", "markexpr", "deselect", "ignore", "ignore_glob", "stepwise"}
)
"""options in NARROWING that deselect tests after they are collected, or leave out whole files: all
tests of a collected file are still known"""
_UNFINISHED: Final = (
    pytest.ExitCode.INTERRUPTED,
    pytest.ExitCode.INTERNAL_ERROR,
    pytest.ExitCode.USAGE_ERROR,
)

_OK: Final = pytest.ExitCode.OK
MAX_NAMES: Final = 3
"""maximum number of tests that a line of the terminal names"""


class StaleHooks:
    """Collects the session's tests, and finds the baselines without a test among them."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config = config
        self.settings = settings
        self.collection = Collection()
        self.stale: list[Key] = []
        self._errors: Sequence[BaselineError] = ()
        """why some stale baselines could not be deleted"""
        self._answers: list[dict[str, Any]] = []
        """what pytest-xdist's workers sent under :data:`SENT`"""

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Record a test."""
        self.collection.tests.add(item.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file, and whether it could be collected."""
        self.collection.record(report.nodeid, report.outcome)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Record that the collection is incomplete."""
        if items:
            self.collection.partial = "tests were deselected"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Find stale baselines; fail the session for them, or delete them, as the option says."""
        if session.exitstatus in _UNFINISHED:
            reason = "the session was interrupted"
            self.collection.partial = self.collection.partial or reason
            self.collection.broken = self.collection.broken or reason
        output: dict[str, Any] | None = getattr(self.config, "workeroutput", None)
        if output is not None:
            stale = self._find()
            known: dict[str, Any] = {"partial": "no report was requested"}
            if self.settings.json is not None:
                known = self._known_here()
            output[SENT] = {
                "stale": None if self.collection.partial else [tuple(key) for key in stale],
                "collected": list(known.get("collected", ())),
                "unseen": [tuple(key) for key in known.get("unseen", ())],  # execnet sends no Keys
                "partial": known["partial"],
            }
            return
        self.collection.partial = narrowed(self.config) or self.collection.partial
        if not self.config.pluginmanager.hasplugin("dsession"):
            self.stale = self._find()
        elif self._answers and not self.collection.partial:
            # A baseline is stale if all workers say so; an incomplete collection finds none.
            answers = [answer["stale"] or () for answer in self._answers]
            agreed = set.intersection(*map(set, answers))
            self.stale = [Key(*key) for key in answers[0] if key in agreed]
        failed = bool(self.stale) and self.settings.stale == "fail"
        if self.stale and self.settings.stale == "delete":
            from pytest_gpumem.baselines.store import BaselineStore

            self._errors = BaselineStore(self.settings.baseline_dir).remove(self.stale)
            failed = bool(self._errors)
        if failed and session.exitstatus == _OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _find(self) -> list[Key]:
        if not self.collection.partial and not self.collection.tests:
            self.collection.partial = "no test was collected"
        return [] if self.collection.partial else self._search(self.collection)[1]

    def _search(self, collection: Collection) -> tuple[list[Key], list[Key]]:
        """Return the baselines of collected files and of missing files, and those that are stale.

        Other baseline files are not read.
        """
        from pytest_gpumem.baselines.file_format import read_names

        keys = read_names(
            self.settings.baseline_dir,
            lambda module: module in collection.files or not self._exists(module),
        )
        return keys, find_stale(collection, keys, self._exists)

    def _exists(self, module: str) -> bool:
        """Return whether a test file exists; a baseline's name may not be a valid path."""
        try:
            return (Path(self.config.rootpath) / module).exists()
        except (OSError, ValueError):
            return False

    def known(self) -> dict[str, Any]:
        """Return the fields of :class:`~pytest_gpumem.report.model.Origin` on stale baselines.

        In a shard of the suite they cover the files that the shard collected.
        """
        if not self.config.pluginmanager.hasplugin("dsession"):
            return self._known_here()
        partial = self.collection.broken or next(
            (answer["partial"] for answer in self._answers if answer["partial"]), ""
        )
        if partial or not self._answers:
            return {"partial": partial or "no worker reported its tests"}
        collected = set.intersection(*(set(answer["collected"]) for answer in self._answers))
        unseen = set.intersection(*(set(answer["unseen"]) for answer in self._answers))
        keys = tuple(Key(*fields) for fields in sorted(unseen))
        return {"collected": tuple(sorted(collected)), "unseen": keys, "partial": ""}

    def _known_here(self) -> dict[str, Any]:
        partial = self.collection.broken or narrowed(self.config, SPLITTING)
        if partial:
            return {"partial": partial}
        root, here = Path(self.config.rootpath), Path(self.config.invocation_params.dir)
        # Leave out a file if a test of it is named: its other tests are not collected.
        named = (arg.partition("::") for arg in self.config.args)
        parts = {os.path.relpath(here / path, root) for path, colons, _ in named if colons}
        whole = Collection(
            self.collection.tests,
            {file for file in self.collection.files if file not in parts},
            self.collection.skipped,
        )
        keys, unseen = self._search(whole)
        modules = {key.module for key in keys} & whole.files - whole.skipped
        return {"collected": tuple(sorted(modules)), "unseen": tuple(unseen), "partial": ""}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:  # noqa: ANN401 - of pytest-xdist
        """Store the stale baselines that a worker sent; a worker that crashed sent none."""
        output = getattr(node, "workeroutput", None) or {}
        if SENT in output:
            self._answers.append(output[SENT])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List the stale baselines."""
        from pytest_gpumem.report.text import printable

        option, verbosity = self.settings.stale, terminalreporter.verbosity
        words = (*self.settings.arguments, *self.settings.repeated)
        max_names = MAX_NAMES if verbosity <= 0 else len(self.stale)
        line = stale_line(self.stale, words, deleted=option == "delete", max_names=max_names)
        for error in self._errors:
            terminalreporter.write_line(printable(f"gpumem: {error}"))
        if line and not self._errors and (option == "fail" or verbosity >= 0):
            terminalreporter.write_line(printable(line))
        elif self.collection.partial and (
            option == "delete" or (option == "fail" and verbosity > 0)
        ):
            reason = self.collection.partial
            terminalreporter.write_line(f"gpumem: stale baselines are unknown: {reason}")


def narrowed(config: pytest.Config, but: Collection_[str] = ()) -> str:
    """Return why the command line leaves tests out; "" if it does not.

    Options in ``but`` do not count. If ``but`` is not empty, tests named on the command line do not
    count either, as a shard may name its tests.
    """
    for name, option in NARROWING.items():
        if name not in but and config.getoption(name, default=None):
            return f"{option} was given"
    if config.getoption("gpumem_cards") is not None:  # it changes the tests' names
        return "--gpumem-cards was given"
    for setting in config.getoption("override_ini", default=None) or ():
        if setting.startswith(NARROWING_INI):
            return f"-o {setting} was given"
    root = Path(config.rootpath)
    if but or config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        return ""
    here = Path(config.invocation_params.dir)
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        return "" if here == root else f"pytest was not run in {root}"
    whole = [root, *(root / path for path in config.getini("testpaths"))]
    folders = {Path(os.path.normpath(here / arg)) for arg in config.args}
    covered = root in folders or (len(whole) > 1 and folders.issuperset(whole[1:]))
    return "" if covered else "tests, files or folders were named"


@dataclass
class Collection:
    """The tests and files that pytest has collected."""

    tests: set[str] = field(default_factory=set)
    """the nodeids of all tests, deselected ones included"""
    files: set[str] = field(default_factory=set)
    """the nodeids of collectors without an error, including test files"""
    skipped: set[str] = field(default_factory=set)
    """test files that were skipped on purpose, as a whole or in part"""
    partial: str = ""
    """why some tests are missing; "" if none is"""
    broken: str = ""
    """why tests may be missing even from collected files; "" if none are"""

    def record(self, nodeid: str, outcome: str) -> None:
        """Record pytest's outcome for a file, class or folder: "passed", "failed" or "skipped"."""
        if outcome == "passed":
            self.files.add(nodeid)
        elif outcome == "skipped":
            self.skipped.add(module_of(nodeid))
        else:
            self.broken = f"{nodeid or 'something'} could not be collected"
            self.partial = self.partial or self.broken


def find_stale(
    collection: Collection, keys: Iterable[Key], exists: Callable[[str], bool]
) -> list[Key]:
    """Return the keys of baselines whose tests no longer exist; [] for an incomplete collection.

    A test no longer exists if its file does not exist, or was collected without the test. A file
    that was left out or skipped says nothing about its tests. A card's name among a test's
    parameters is ignored: ``--gpumem-cards`` runs the test under that name.
    """
    from pytest_gpumem.devices.cards import CARDS

    if collection.partial:
        return []
    tests = collection.tests
    there: dict[str, bool] = {}  # cached, to access the disk once per file
    stale = set()
    for key in keys:
        module, nodeid = key.module, key.nodeid
        if module not in there:
            there[module] = False
            with suppress(OSError):  # the name in a baseline may be too long for a path
                there[module] = exists(module)
        is_gone = not there[module]
        if not is_gone and module in collection.files and module not in collection.skipped:
            is_gone = nodeid not in tests and without_card(nodeid, CARDS) not in tests
        if is_gone:
            stale.add(key)
    return sorted(stale, key=lambda key: (key.nodeid, key.device))


def stale_line(
    stale: Iterable[Key],
    words: Iterable[str] = (),
    *,
    deleted: bool = False,
    max_names: int = MAX_NAMES,
) -> str:
    """Return a line that names stale baselines; "" if there are none.

    ``words`` are the command-line arguments with which pytest collects the same tests again.
    """
    names = [f"{key.nodeid} on {key.device}" for key in stale]
    if not names:
        return ""
    number = len(names)
    if number > max_names:
        names = [*names[:max_names], f"{number - max_names} more"]
    have = "baseline has" if number == 1 else "baselines have"
    command = shlex.join(["pytest", "--collect-only", "--gpumem-stale=delete", *words])
    remedy = "deleted" if deleted else f"{command} deletes them"
    return f"gpumem: {number} {have} no test any more ({remedy}): {', '.join(names)}"
