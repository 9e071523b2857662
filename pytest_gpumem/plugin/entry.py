"""The pytest plugin: hooks, options and the fixture. pytest's objects stop here.

Every pytest session of a machine that has the plugin runs this: what costs time to import is
imported when a marked test is there.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gpumem.devices.terminal import save_stderr
from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.plugin import hookspecs
from pytest_gpumem.plugin.device_choice import (
    GUARD,
    SETTINGS,
    choice_of,
    choose_early,
    load_by_default,
    settings_of,
)
from pytest_gpumem.plugin.item_hooks import Failed, Runner, is_marked
from pytest_gpumem.plugin.parametrize import CARD, RANK, cards_of, spread
from pytest_gpumem.plugin.results import Gathering
from pytest_gpumem.plugin.settings import DEVICES, OPTIONS, Settings
from pytest_gpumem.plugin.torchrun import joining

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_gpumem.baselines.store import NewBaseline
    from pytest_gpumem.plugin.outputs import Published
    from pytest_gpumem.plugin.session import TestSession
    from pytest_gpumem.testrun.fixture import GpuMemory
    from pytest_gpumem.testrun.run import Run


NAME: Final = "gpumem-session"
MARKER_HELP: Final = (
    "gpu_memory(max_gib, max_allocated_gib, max_reserved_gib, card, batch_size, tolerance, "
    "baseline, devices, warmup, world_size, rank, ranks, batch_sizes, max_mib_per_sample, "
    "max_fixed_gib, variants, max_leak_mib, steady): measure the test's peak "
    "CUDA memory, hold it to the limits and to its baseline."
)

LISTINGS: Final = ("collectonly", "showfixtures", "show_fixtures_per_test")
"""options of pytest with which no test is run"""

# -- the session --


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add every option twice: on the command line and in the ini file."""
    save_stderr()  # pytest captures standard error after this hook
    GUARD.install(load_by_default)
    group = parser.getgroup("gpumem", "GPU memory regression tests")
    for option in OPTIONS:
        extra: dict[str, Any] = {"help": option.help, "default": None, "dest": option.ini}
        if isinstance(option.default, bool):
            group.addoption(option.flag, action="store_true", **extra)
            parser.addini(option.ini, option.help, type="bool", default=option.default)
        else:
            group.addoption(option.flag, metavar=option.metavar, **extra)
            parser.addini(option.ini, option.help.replace("%%", "%"), default=option.default)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Make the hooks of hookspecs.py known."""
    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Be ready before any conftest file can import torch."""
    with contextlib.suppress(pytest.UsageError):  # pytest_configure says it
        settings_of(early_config, early_config.known_args_namespace)
        GUARD.install(lambda: choose_early(early_config))


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and what runs the session."""
    config.addinivalue_line("markers", MARKER_HELP)
    settings = settings_of(config, config.option)
    if settings.device not in DEVICES:
        choice_of(config)
    GUARD.install(lambda: choice_of(config))
    config.pluginmanager.register(GpuMemPlugin(config, settings), NAME)
    if settings.baseline_dir.is_dir():
        from pytest_gpumem.plugin import stale_hooks

        watching = stale_hooks.Collecting(config, settings)
        config.pluginmanager.register(watching, stale_hooks.NAME)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make several tests of one that names several cards or ranks."""
    spread(metafunc, metafunc.config.stash[SETTINGS].cards)


@pytest.fixture(name=CARD)
def _card(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture(name=RANK)
def _rank(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture
def gpu_memory(request: pytest.FixtureRequest) -> GpuMemory:
    """The memory measurement of this test: device, batch size, parts, figures so far."""
    from pytest_gpumem.testrun.fixture import GpuMemory

    plugin = request.config.pluginmanager.get_plugin(NAME)
    if not isinstance(plugin, GpuMemPlugin) or plugin.run is None:
        raise Failed(
            f"{request.node.nodeid} is not measured: gpu_memory has to be an argument of the test "
            "or of its fixtures, or the test has to be marked; write @pytest.mark.gpu_memory"
        )
    return GpuMemory(plugin.run)


class _Line:
    """In place of a failed report's ``longrepr``: less of it."""

    def __init__(self, text: str, full: object) -> None:
        self.text = text
        self.reprcrash = getattr(full, "reprcrash", None)

    def toterminal(self, tw: Any) -> None:  # noqa: ANN401 - pytest's TerminalWriter
        """Write it, as pytest asks of every ``longrepr``."""
        tw.line(self.text)


class GpuMemPlugin(Runner):
    """The hooks of a session. Results travel on the test reports; the controller gathers them."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        super().__init__(config)
        self.settings = settings
        self.gathering = Gathering()
        self._published: list[Published] = []
        self._session: TestSession | None = None
        self._worker = hasattr(config, "workerinput")
        listing = any(map(config.getoption, LISTINGS))
        try:
            self._ranks = None if self._worker or listing else joining()
        except GpuMemError as error:
            raise pytest.UsageError(f"gpumem: {error}") from error

    @property
    def session(self) -> TestSession:
        """What runs marked tests, made for the first of them."""
        if self._session is None:
            from pytest_gpumem.plugin.session import TestSession

            choice = choice_of(self.config)
            verbosity = self.config.get_verbosity()
            root = Path(self.config.rootpath)
            self._session = TestSession(self.settings, choice, root, verbosity)
            self._session.tell = self._tell_now
        return self._session

    def _tell_now(self, text: str) -> None:
        """Show a line to who waits for a test, past pytest's capture; workers have no terminal."""
        manager = self.config.pluginmanager
        terminal, capture = (
            manager.get_plugin("terminalreporter"),
            manager.get_plugin("capturemanager"),
        )
        if terminal is None or self._worker:
            return
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            terminal.ensure_newline()
            terminal.write_line(f"gpumem: {text}")
            terminal.flush()

    @property
    def started(self) -> bool:
        """Whether there was a marked test."""
        return self._session is not None

    @property
    def run(self) -> Run | None:
        """The marked test that runs now."""
        return self._session.run if self._session else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Let PyTorch keep no plan of a convolution where several cards take turns."""
        marked = [item for item in session.items if is_marked(item)]
        if len(marked) > 1 and len(cards_of(marked)) > 1:
            from pytest_gpumem.devices.virtual.cudnn_notes import keep_no_plans

            keep_no_plans()

    # -- the header --

    def pytest_report_header(self) -> list[str]:
        """Say which device marked tests run on, where others than this process collect them."""
        return self._header() if self.config.getoption("dist", "no") != "no" else []

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> list[str]:
        """Say it where there are marked tests."""
        quiet = self.config.get_verbosity() < 0 or self.config.getoption("no_header", default=False)
        return self._header() if not quiet and any(map(is_marked, items)) else []

    def _header(self) -> list[str]:
        return self.session.header().splitlines()

    # -- the session --

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather the results, in the controller alone."""
        if self._worker:
            return
        expected = report.skipped and hasattr(report, "wasxfail")
        self.gathering.add(
            report.nodeid,
            report.when or "",
            passed=report.passed and not hasattr(report, "wasxfail"),
            data=getattr(report, "gpumem", None),
            expected=expected,
        )
        if report.skipped and report.when == "setup":
            reasons = dict(report.user_properties)
            if "gpumem_skipped" in reasons:
                self.gathering.skipped.append(str(reasons["gpumem_skipped"]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the baselines and the reports; a file that cannot be written fails the session."""
        if self._worker or not self._joined():
            return
        failed = bool(self.gathering.elsewhere or (self._ranks and self.gathering.broken))
        if self.settings.update_baselines:
            failed |= bool(self.session.update_baselines(self._changes()).errors)
        if not any(map(self.config.getoption, LISTINGS)):
            failed |= self._publish()
        if failed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    # -- ranks of torchrun's --

    @property
    def _silent(self) -> bool:
        """Whether another process tells of this session."""
        return self._worker or (self._ranks is not None and not self._ranks.reports)

    def _joined(self) -> bool:
        """Bring the ranks' results together; return whether it is here that they are told."""
        if self._ranks is None:
            return True
        return self._ranks.join(self.gathering, shrinkage_fails=self.settings.shrinkage == "fail")

    def _changes(self) -> list[NewBaseline]:
        """Return what becomes baselines: nothing where a rank's figures are missing."""
        return [] if self._ranks and self.gathering.broken else self.gathering.changes()

    def _publish(self) -> bool:
        """Write the reports that anybody wants; return whether that failed."""
        if not self.settings.writes and not (self.gathering and self.settings.on_github):
            return False
        from pytest_gpumem.plugin.outputs import publish

        header = self.session.header() if self.gathering else ""
        updates = self._session.updates if self._session else None
        self._published = publish(self.gathering, self.settings, header, updates)
        return any(it.failed for it in self._published)

    @pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_terminal_summary")
    def pytest_terminal_summary_shortened(
        self, terminalreporter: pytest.TerminalReporter
    ) -> Generator[None, None, None]:
        """Show one line of each test that only moved together with the toolchain."""
        texts = {}
        if self.gathering and not self._worker and terminalreporter.verbosity <= 0:
            from pytest_gpumem.report.terminal.toolchain_lead import short_texts

            texts = short_texts(self.gathering.results())
        reports = [it for it in terminalreporter.stats.get("failed", ()) if it.nodeid in texts]
        full = [(it, it.longrepr) for it in reports if it.when == "call"]
        for report, _ in full:
            report.longrepr = _Line(texts[report.nodeid], report.longrepr)
        try:
            return (yield)
        finally:
            for report, longrepr in full:
                report.longrepr = longrepr

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the table, the counts and the next command, and where the reports are."""
        if self._silent:
            return
        if self.gathering or self.settings.update_baselines:
            self._show_summary(terminalreporter)
        for it in self._published:
            if it.failed or terminalreporter.verbosity >= 0:
                terminalreporter.write_line(it.line)
        if self.gathering and self.settings.on_github:
            from pytest_gpumem.plugin.outputs import github_lines

            for line in github_lines(self.gathering, Path(self.config.rootpath)):
                terminalreporter.write_line(line)

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_html(self, report: pytest.TestReport, data: list[str]) -> None:
        """Show a test's figures among its details in pytest-html's report."""
        if hasattr(report, "gpumem"):
            from html import escape

            from pytest_gpumem.report.item_properties import property_lines

            lines = [escape(line) for line in property_lines(report.user_properties)]
            data.insert(0, "\n".join(["GPU memory", *lines, ""]))

    def _show_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        texts = self.session.summary(
            self.gathering,
            verbosity=terminalreporter.verbosity,
            width=terminalreporter._tw.fullwidth,
            encoding=getattr(terminalreporter._tw._file, "encoding", None) or "utf-8",
        )
        if not texts:
            return
        if terminalreporter.verbosity >= 0:
            terminalreporter.section("GPU memory", sep="=")
        for results in self.gathering.elsewhere:
            terminalreporter.write_line(
                f"{results[0].nodeid}\n{self.session.failure_text(results)}\n"
            )
        for text in texts:
            terminalreporter.write_line(text)

    def pytest_unconfigure(self) -> None:
        """Leave the process as it was found, also after an interrupted test."""
        GUARD.remove()
        if self._session is not None:
            self._session.end()
        self.gathering = Gathering()  # or Python frees thousands of objects one by one as it ends
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.end()
