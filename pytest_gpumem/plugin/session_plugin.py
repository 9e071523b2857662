"""Hook into a session: header, results, baselines, reports and summary."""

from __future__ import annotations

import copy
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.plugin.device_choice import CHOICE, GUARD, choice_of
from pytest_gpumem.plugin.pytest_item import cards_of, is_marked, terminal_stream
from pytest_gpumem.plugin.report_data import data_of, has_verdict, own_outcome
from pytest_gpumem.session.hidden_skip import HiddenSkip
from pytest_gpumem.session.results import SessionResults
from pytest_gpumem.session.settings import in_ci
from pytest_gpumem.session.torchrun import open_rank_session

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from types import FrameType
    from typing import NoReturn

    from pytest_gpumem.baselines.store import UpdateSummary
    from pytest_gpumem.judge.result import Outcome
    from pytest_gpumem.plugin.item_hooks import ItemHooks
    from pytest_gpumem.report.model import Origin
    from pytest_gpumem.report.parts.styles import StyledText
    from pytest_gpumem.session.outputs import Published
    from pytest_gpumem.session.settings import Settings
    from pytest_gpumem.session.terminal_summary import Screen

NAME: Final = "gpumem-session"
LISTINGS: Final = ("collectonly", "showfixtures", "show_fixtures_per_test")
"""pytest options with which no test runs"""
ENDS: Final[dict[int, str]] = {
    pytest.ExitCode.INTERRUPTED: "it was interrupted",
    pytest.ExitCode.INTERNAL_ERROR: "pytest ended with an internal error",
    pytest.ExitCode.USAGE_ERROR: "pytest ended with a usage error",
}
"""by exit status: why a session did not finish"""
STYLES: Final[dict[str, dict[str, bool]]] = {
    "headline": {"red": True, "bold": True},
    "command": {"bold": True},
    "bad": {"red": True},
    "good": {"green": True},
    "open": {"yellow": True},
    "": {},
}
"""by style: arguments of pytest's terminal writer, which ignores them if it has no colors"""
REMOTE: Final = (
    "pytest-xdist's workers on other machines may test other code: no baselines are written from "
    "their figures (run the tests there with --gpumem-json, and merge: gpumem report)"
)
"""the sentence for a session with workers on other machines"""
STATUS: Final = 128 + signal.SIGTERM
"""the exit status that a shell reports for a process ended by SIGTERM"""


class BriefRepr:
    """Replaces a report's ``longrepr`` by a few lines."""

    def __init__(self, lines: Sequence[StyledText], longrepr: object) -> None:
        self.lines = lines
        self.reprcrash = getattr(longrepr, "reprcrash", None)
        """the place and message that pytest's short summary shows"""

    def toterminal(self, tw: Any) -> None:  # noqa: ANN401 - pytest's TerminalWriter
        """Write the lines; pytest calls this method of every ``longrepr``."""
        for line in self.lines:
            tw.line(line.text, **STYLES[line.style])


def screen_of(config: pytest.Config) -> Screen:
    """Return the terminal to format text for."""
    from pytest_gpumem.session.terminal_summary import Screen

    stream = terminal_stream(config)
    interactive = bool(getattr(stream, "isatty", bool)())
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return Screen(config.get_terminal_writer().fullwidth, encoding, interactive)


class GpuMemPlugin:
    """Hooks into a session. Results travel on test reports; the controller collects them."""

    def __init__(self, config: pytest.Config, settings: Settings, items: ItemHooks) -> None:
        self.config = config
        self.settings = settings
        self.results = SessionResults()
        self._items = items
        self._published: list[Published] = []
        self._reports_shown = False
        self._cards: tuple[str, ...] = ()
        """the cards that marked tests name; empty if one of them names none"""
        self._updates: UpdateSummary | None = None
        self._worker = hasattr(config, "workerinput")
        self._remote = False
        """whether pytest-xdist workers run in other folders or on other machines"""
        self._first_worker = ""
        """id of the first pytest-xdist worker: "gw0", or NAME of ``--tx popen//id=NAME``"""
        folder = settings.baseline_dir
        self._has_baselines = folder.is_dir() and any(path.is_dir() for path in folder.iterdir())
        self._listing = any(map(config.getoption, LISTINGS))
        try:
            self._ranks = None if self._worker or self._listing else open_rank_session()
        except GpuMemError as error:
            raise pytest.UsageError(f"gpumem: {error}") from error

    def pytest_sessionstart(self) -> None:
        """Let SIGTERM end the session in order: the figures of finished tests are then written."""
        writes = self.settings.update_baselines or self.settings.writes
        if writes and not self._worker and self._ranks is None:
            end_session_on_sigterm(self.config)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Prepare PyTorch for several cards: it must not cache convolution plans across them."""
        marked = [item for item in session.items if is_marked(item)]
        if len(marked) > 1 and len(cards_of(marked)) > 1:
            from pytest_gpumem.devices import virtual

            virtual.prepare_many_cards()

    # -- the header --

    def _device_header(self) -> list[str]:
        from pytest_gpumem.session.terminal_summary import device_header

        return device_header(choice_of(self.config), self.settings, self._cards)

    def pytest_report_header(self) -> list[str]:
        """Show the device in the header if xdist's workers collect the tests."""
        distributed = self.config.getoption("dist", "no") != "no"
        sentences = self._device_header() if distributed else []
        return [f"gpumem: {sentence}" for sentence in sentences]

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> list[str]:
        """Show the device once marked tests are collected."""
        cards = cards_of(filter(is_marked, items))
        self._cards = () if None in cards else tuple(sorted(filter(None, cards)))
        quiet = self.config.get_verbosity() < 0 or self.config.getoption("no_header", default=False)
        # If unmarked tests may see a GPU, importing torch has already chosen the device.
        uses_device = any(map(is_marked, items)) or (
            self.settings.shown_always and CHOICE in self.config.stash
        )
        if quiet or not uses_device:
            return []
        return [f"gpumem: {sentence}" for sentence in self._device_header()]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:  # noqa: ANN401 - of pytest-xdist
        """Remember the first worker, and whether any is in another folder or on another machine."""
        spec = node.gateway.spec
        self._remote |= bool(spec.chdir or not spec.popen)
        self._first_worker = self._first_worker or node.gateway.id

    # -- results --

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """Record the test during which a pytest-xdist worker crashed."""
        self.results.lost.append(crashitem)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the results, in the controller only."""
        if self._worker:
            return
        expected = report.skipped and hasattr(report, "wasxfail")
        data = data_of(report)
        gateway = getattr(getattr(report, "node", None), "gateway", None)
        is_first = getattr(gateway, "id", "") == self._first_worker
        if self.config.getoption("dist", "no") == "each" and not is_first:
            return  # with --dist=each every worker runs each test; one result is enough
        outcome: Outcome = "failed" if "own_error" in data else ""
        self.results.add(
            data.get("nodeid", report.nodeid),
            report.when or "",
            passed=report.passed and not hasattr(report, "wasxfail"),
            data=data.get("results"),
            expected=expected,
            outcome="xfail" if hasattr(report, "wasxfail") else outcome,
        )
        self._add_hidden_skip(report)
        lists_tests = (self.settings.html or self.settings.json) is not None
        if lists_tests and not report.passed and "marked" in data and not has_verdict(report):
            ended = own_outcome(report)
            if ended is not None:
                self.results.add_own(report.when or "", ended)
        if report.when == "setup":
            properties = dict(report.user_properties)
            if report.skipped and "gpumem_skipped" in properties:
                self.results.skipped.append(str(properties["gpumem_skipped"]))
            if report.skipped and "gpumem_too_large" in properties:
                self.results.too_large.append(str(properties["gpumem_too_large"]))
            if "gpumem_unmeasured" in properties:
                self.results.unmeasured.append(str(properties["gpumem_unmeasured"]))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Collect the files that were skipped as a whole."""
        self._add_hidden_skip(report)

    def _add_hidden_skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        fields: Any = data_of(report).get("hidden_skip")
        if fields is not None and not self._worker:
            self.results.hidden_skips[report.nodeid] = HiddenSkip(*fields)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the baselines and the reports; fail the session if a file cannot be written."""
        if self._worker:
            return
        is_remote = self._remote and bool(self.results)
        if is_remote:  # only then, as reading .problems parses all results
            self.results.problems.append(REMOTE)
        complete = not (is_remote and self.settings.update_baselines)
        if self._ranks is not None:
            shrinkage_fails = self.settings.shrinkage == "fail"
            if not self._ranks.join(self.results, shrinkage_fails=shrinkage_fails):
                return  # the first rank reports for all
            complete = not self.results.problems  # a problem may be that a rank sent no figures
        failed = bool(self.results.failed_elsewhere) or not complete
        failed |= bool(self.results.unmeasured) and self.settings.absent_device_fails
        failed |= self.results.all_too_large and in_ci()
        if self.settings.update_baselines:
            changes = self.results.changes() if complete else []
            self._updates = self._items.opened_session().store.update(changes)
            failed |= bool(self._updates.errors)
        hook = self.config.hook.pytest_gpumem_report
        writes = self.settings.writes or hook.get_hookimpls()
        if (writes or (self.results and self.settings.on_github)) and not self._listing:
            from pytest_gpumem.session.outputs import publish

            self._published = publish(
                self.results,
                self.settings,
                self._device_header() if self.results else [],
                updates=self._updates,
                origin=self._origin(session),
                write_more=lambda report: hook(config=self.config, report=report),
            )
            failed |= any(report.failed for report in self._published)
        if failed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _origin(self, session: pytest.Session) -> Origin | None:
        """Return where the session ran, for its JSON report; None if it writes none."""
        if self.settings.json is None:
            return None
        from pytest_gpumem.plugin import stale_hooks
        from pytest_gpumem.session.origin import session_origin, shard_of

        shard = shard_of(lambda name: self.config.getoption(name, default=None))
        origin = session_origin(Path(self.config.rootpath), self.settings, shard)
        unfinished = ENDS.get(session.exitstatus, REMOTE if self._remote else "")
        collecting = self.config.pluginmanager.get_plugin(stale_hooks.NAME)
        if isinstance(collecting, stale_hooks.StaleHooks):
            origin = replace(origin, **collecting.known())
        return replace(origin, unfinished=unfinished, ranks=self.results.rank_count)

    # -- the summary --

    @pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_terminal_summary")
    def pytest_terminal_summary_shortened(
        self, terminalreporter: pytest.TerminalReporter
    ) -> Generator[None, None, None]:
        """Shorten each failure to its cause; later failures with the same cause name the first one.

        The terminal gets copies of the reports; the originals stay unchanged.
        """
        if self.results and not self._worker:
            from pytest_gpumem.session.terminal_summary import failure_lines

            texts = failure_lines(
                self.results.results(), screen_of(self.config), terminalreporter.verbosity
            )
            for reports in (terminalreporter.stats.get(name, []) for name in ("failed", "error")):
                for index, report in enumerate(reports):
                    # The report of a test that failed for another reason has no results.
                    if report.nodeid in texts and has_verdict(report):
                        reports[index] = copy.copy(report)
                        reports[index].longrepr = BriefRepr(texts[report.nodeid], report.longrepr)
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the table, the counts, the next command, and where the reports are."""
        if self._worker or (self._ranks is not None and not self._ranks.reports):
            return
        if self.results or self.settings.update_baselines:
            self._show_summary(terminalreporter)
        self._show_reports(terminalreporter)

    def _show_reports(self, terminalreporter: pytest.TerminalReporter) -> None:
        self._reports_shown = True
        for report in self._published:
            if report.failed or terminalreporter.verbosity >= 0:
                terminalreporter.write_line(report.line)
        if self.results and self.settings.on_github:
            from pytest_gpumem.session.outputs import github_lines

            for line in github_lines(self.results, Path(self.config.rootpath)):
                terminalreporter.write_line(line)

    def _show_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        from pytest_gpumem.report.parts.styles import lines_of
        from pytest_gpumem.report.text import wrapped
        from pytest_gpumem.session.terminal_summary import (
            card_hint,
            failure_lines,
            session_summary,
            versions_hint,
        )

        summary = session_summary(
            self.results,
            self._updates,
            updating=self.settings.update_baselines,
            arguments=self.settings.arguments,
            verbosity=terminalreporter.verbosity,
            screen=screen_of(self.config),
        )
        if terminalreporter.verbosity >= 0:
            results, inipath = self.results.results(), self.config.inipath
            hints = [
                versions_hint(results, self.settings, inipath.name if inipath else "pytest.ini")
            ]
            if not self._has_baselines:
                hints.append(card_hint(results, self.settings))
            width = self.config.get_terminal_writer().fullwidth
            for hint in filter(None, hints):
                summary += lines_of(wrapped("gpumem: ", hint, width))
        if not summary:
            return
        # Otherwise pytest would end the last test's line in the middle of the summary.
        terminalreporter.ensure_newline()
        if terminalreporter.verbosity >= 0:
            terminalreporter.section("GPU memory", sep="=")
        for results in self.results.failed_elsewhere:
            terminalreporter.write_line(results[0].nodeid)
            lines = failure_lines(results, screen_of(self.config), terminalreporter.verbosity)
            for line in lines.get(results[0].nodeid, ()):
                terminalreporter.write_line(line.text, **STYLES[line.style])
            terminalreporter.write_line("")
        for row in summary:
            for part in row:
                terminalreporter.write(part.text, **STYLES[part.style])
            terminalreporter.write_line("")

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_html(self, report: pytest.TestReport, data: list[str]) -> None:
        """Add a test's figures to its details in pytest-html's report."""
        if "results" in data_of(report):
            from html import escape

            from pytest_gpumem.report.item_properties import property_lines

            lines = [escape(line) for line in property_lines(report.user_properties)]
            data.insert(0, "\n".join(["GPU memory", *lines, ""]))

    def pytest_unconfigure(self) -> None:
        """Restore the process to its state before the session."""
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        # With --no-summary, pytest calls the summary hooks only from version 9 on.
        if self.results and not (self._worker or self._reports_shown) and terminal is not None:
            self._show_reports(terminal)
        GUARD.remove()
        self.results = SessionResults()  # otherwise Python frees thousands of objects at exit
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.end()


def end_session_on_sigterm(config: pytest.Config) -> None:
    """Let SIGTERM end pytest's loop in order; a second SIGTERM kills the process.

    The handler is removed when pytest is unconfigured. It is not installed if a program that calls
    pytest has its own.
    """

    def leave_alone() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end(_number: int, _frame: FrameType | None) -> NoReturn:
        leave_alone()
        pytest.exit("SIGTERM", returncode=STATUS)

    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)
        config.add_cleanup(leave_alone)
