"""Define the hooks around a test: they set it up under its cap, measure, judge and report it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gpumem.errors import GpuMemError, TooSmallError
from pytest_gpumem.plugin.device_choice import CHOICE, SETTINGS, choice_of
from pytest_gpumem.plugin.pytest_item import (
    MARKER,
    PytestItem,
    is_marked,
    measure_unmarked,
    unique_nodeid,
    unwatch_uses,
    watch_requests,
    watch_uses,
)
from pytest_gpumem.plugin.report_data import (
    ATTRIBUTE,
    ReportData,
    hidden_skip,
    skip_decorated,
    skip_reason,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.session.memory_session import MemorySession
    from pytest_gpumem.testrun.run import Run

NAME: Final = "gpumem-items"
ABSENT_IN_CI: Final = (
    "CI is set, so a marked test without a device fails; to skip these tests here, write "
    "--gpumem-device=none"
)
ENDS_SESSION: Final = (KeyboardInterrupt, pytest.exit.Exception)
RESULTS = pytest.StashKey["list[Result]"]()
"""results to attach to the item's next report"""
CALL_RESULTS = pytest.StashKey["list[Result]"]()
"""the results that were attached to the report of the item's call"""
TEARDOWN_ERROR = pytest.StashKey["tuple[BaseException, Any]"]()
"""an error of the teardown, with cleared frames, and the ``longrepr`` made before clearing"""


class Failed(pytest.fail.Exception):  # type: ignore[name-defined, misc] # it is a class
    """Fails a test by its verdict: the message is the report, without a traceback."""

    __module__ = "builtins"  # like pytest's own, so that the short summary shows "Failed:"

    def __init__(self, message: str) -> None:
        super().__init__(message, pytrace=False)


def _out_of_memory_failure(message: str, error: BaseException) -> BaseException:
    """Return a Failed that is also of the error's class if possible, for ``xfail(raises=...)``."""
    import torch

    classes: tuple[type, ...] = (type(error), torch.OutOfMemoryError)
    for bases in (dict.fromkeys(classes), classes[1:]):
        with contextlib.suppress(TypeError):  # the classes cannot be combined
            kind = type("Failed", (Failed, *bases), {"__module__": "builtins"})
            failure: BaseException = kind(message)
            return failure
    return Failed(message)


class ItemHooks:
    """The hooks around each test.

    An unmarked test is not measured, but its errors are cleared, and a fixture that it sets up for
    marked tests is measured.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._session: MemorySession | None = None
        self._marked_fixtures: set[pytest.FixtureDef[Any]] = set()
        self._errors: list[BaseException] = []
        """errors of the running test, whose frames keep its tensors alive"""
        self._phase_runs = False
        """whether a test is being set up, called or torn down: a report created meanwhile is a
        subtest's"""
        self._failed_fixtures: list[tuple[Any, pytest.FixtureRequest]] = []
        """fixtures of wider scope that failed in an unmarked test, each with its request"""

    # Not a property: pytest before 8.3.5 reads all attributes of plugins, which would open the
    # session.
    def opened_session(self) -> MemorySession:
        """Return the session of marked tests, opening it for the first one."""
        if self._session is None:
            from pytest_gpumem.session.memory_session import MemorySession
            from pytest_gpumem.testrun.rerun import Runner

            settings, choice = self.config.stash[SETTINGS], choice_of(self.config)
            root = Path(self.config.rootpath)
            runner = Runner(choice, root, self._show_progress, settings.values)
            self._session = MemorySession(settings, runner)
        return self._session

    @property
    def run(self) -> Run | None:
        """The marked test that runs now; None outside of one."""
        return self._session.run if self._session else None

    def _show_progress(self, line: str) -> None:
        """Show progress to a waiting user, bypassing pytest's capture; workers have no terminal."""
        manager = self.config.pluginmanager
        terminal = manager.get_plugin("terminalreporter")
        capture = manager.get_plugin("capturemanager")
        if terminal is None or hasattr(self.config, "workerinput"):
            return
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            terminal.ensure_newline()
            terminal.write_line(f"gpumem: {line}")
            terminal.flush()

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self) -> None:
        """Release the device, also after an interrupted test."""
        if self._session is not None:
            self._session.end()

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Mark a test that an option selects for measuring, before ``-m`` selects by markers."""
        measure_unmarked(item, self.config.stash[SETTINGS].all)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember the fixtures of marked tests: an unmarked test may set them up first."""
        marked = filter(is_marked, session.items)
        self._marked_fixtures = {
            definition
            for item in map(PytestItem, marked)
            for definition in (*item.requested_fixtures(), *item.late_fixtures())
        }

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Record a file of marked tests that a condition skips as a whole.

        If a file cannot be imported because torch lacks a shared library, add the reason why there
        is no virtual GPU.
        """
        choice = self.config.stash.get(CHOICE, None)
        if choice is not None and choice.device is not None and isinstance(collector, pytest.File):
            choice.device.values.renew()  # a file's values must not depend on earlier files
        report = yield
        if report.failed and "shared object" in report.longreprtext and CHOICE in self.config.stash:
            choice = self.config.stash[CHOICE]
            if choice.device is None:
                report.sections.append(("pytest-gpumem", choice.reason))
        if report.skipped and isinstance(collector, pytest.File):
            reason = skip_reason(report.longrepr)
            skip = hidden_skip(self.config, collector.path, reason, whole_file=True)
            if skip is not None and MARKER in collector.path.read_text("utf-8", "replace"):
                report.__dict__[ATTRIBUTE] = ReportData(hidden_skip=list(skip))
        return report

    # -- a test's protocol --

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Clear a failed test's tracebacks, marked or not: their frames keep tensors alive."""
        try:
            return (yield)
        finally:
            self._forget_errors()

    @contextlib.contextmanager
    def _phase(self) -> Iterator[None]:
        outer, self._phase_runs = self._phase_runs, True
        try:
            yield
        finally:
            self._phase_runs = outer

    def _forget_errors(self) -> None:
        if "torch" in sys.modules:
            from pytest_gpumem.tracebacks import clear

            while self._errors:
                clear(self._errors.pop())
        self._errors.clear()

    # -- set-up --

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Open the device for a marked test, so that its fixtures are set up under its cap.

        Not a hook wrapper: if this raises or skips, other plugins' wrappers must have started.
        """
        self._forget_errors()  # a previous try of a rerun test may have left some
        if CALL_RESULTS in item.stash:
            del item.stash[CALL_RESULTS]
        if not is_marked(item):
            return
        from pytest_gpumem.devices.cards import find_card
        from pytest_gpumem.plugin.pytest_item import spread_fields
        from pytest_gpumem.report.item_properties import PREFIX
        from pytest_gpumem.spec import spec_from_marks

        # If the test is rerun, remove the properties of the previous try.
        item.user_properties[:] = [
            pair for pair in item.user_properties if not pair[0].startswith(PREFIX)
        ]
        marks: list[tuple[tuple[object, ...], Mapping[str, object]]] = [((), spread_fields(item))]
        marks += [(mark.args, mark.kwargs) for mark in item.iter_markers(MARKER)]
        # A fixture that failed without a GPU is set up again: pytest would raise its cached error.
        while self._failed_fixtures:
            fixture, request = self._failed_fixtures.pop()
            fixture.finish(request)
        try:
            defaults = item.ihook.pytest_gpumem_defaults(item=item)
            marks += [((), arguments) for arguments in defaults if arguments]
            spec = spec_from_marks(marks, find_card=lambda name: find_card(name).name)
            self.opened_session().begin(PytestItem(item), spec)
        except TooSmallError as error:  # another machine's GPU may be large enough
            settings = self.opened_session().settings
            if settings.skip_too_large:
                item.user_properties.append(("gpumem_too_large", error.problem))
                raise pytest.skip.Exception(f"gpumem: {error}", _use_item_location=True) from None
            self._skip_or_fail(item, str(error), skip=settings.device == "auto")
        except GpuMemError as error:
            raise Failed(str(error)) from None
        if self.run is None and not PytestItem(item).declared:
            item.user_properties.append(("gpumem_unmeasured", self.opened_session().choice.reason))
        elif self.run is None:
            session = self.opened_session()
            choice, reason = session.choice, session.choice.reason
            if session.settings.absent_device_fails:
                reason = f"{reason}. {ABSENT_IN_CI}"
                self._skip_or_fail(item, reason, skip=False)
            self._skip_or_fail(item, reason, skip=not choice.demanded)

    @staticmethod
    def _skip_or_fail(item: pytest.Item, reason: str, *, skip: bool) -> None:
        if not skip:
            raise Failed(f"gpumem: {reason}")
        item.user_properties.append(("gpumem_skipped", reason))
        raise pytest.skip.Exception(f"gpumem: {reason}", _use_item_location=True)

    # Two methods implement this hook: pytest_runtest_setup must not be a wrapper, and this one must
    # be, to see the errors of all fixtures.
    @pytest.hookimpl(wrapper=True, specname="pytest_runtest_setup", tryfirst=True)
    def pytest_runtest_setup_explained(self, item: pytest.Item) -> Generator[None, None, None]:
        """Turn running out of memory in a fixture into a verdict."""
        try:
            with self._phase():
                return (yield)
        except BaseException as error:
            self._report_error(item, error)
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """Record the memory that fixtures of wider scope than a test retain."""
        if fixturedef.scope == "function" or not (
            self.run is not None or fixturedef in self._marked_fixtures
        ):
            try:
                return (yield)
            except BaseException:  # an error or a skip: a marked test sets the fixture up again
                if fixturedef.scope != "function":
                    self._failed_fixtures.append((fixturedef, request))
                raise
        runner = self.opened_session().runner
        try:
            with runner.fixture(fixturedef.argname, fixturedef):
                watch_requests(request, runner.use)
                value = yield
        except Exception as error:
            from pytest_gpumem.meter.out_of_memory import find_out_of_memory

            if find_out_of_memory(error) is not None:  # the next test may have room for the fixture
                fixturedef.finish(request)  # type: ignore[arg-type] # it is a SubRequest
            raise
        watch_uses(fixturedef, lambda: runner.use(fixturedef))
        return value

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Forget a fixture that was torn down."""
        if self._session is not None:
            unwatch_uses(fixturedef)
            self._session.runner.forget(fixturedef)

    # -- call --

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Warm up, run, measure and judge; a failing verdict is raised as an exception."""
        run = self.run
        if run is None:
            with self._phase():
                return (yield)
        marked = PytestItem(item)
        try:
            with self._phase():
                run.warm_up(marked)
                try:
                    yield
                finally:
                    run.meter.end_step()
                run.await_kernels()
        except BaseException as error:
            self._report_error(item, error)
            raise
        hidden = marked.hidden_error()
        if hidden is not None:
            # unittest catches the error itself and keeps it: replace it with the verdict.
            try:
                self._report_error(item, hidden)
            except Failed:
                marked.replace_hidden_error()
            return None
        try:
            results = self.opened_session().finish(marked, None)
        except GpuMemError as error:
            raise Failed(str(error)) from None
        self._attach(item, results)
        message = self._failure_text(results)
        if message:
            raise Failed(message)
        return None

    @property
    def _is_debugging(self) -> bool:
        return bool(self.config.getoption("usepdb", default=False))

    def _report_error(self, item: pytest.Item, error: BaseException) -> None:
        """Replace an out-of-memory error with a verdict that has the peak of a run without limits.

        Raises:
            Failed: the test ran out of memory, its inference server refused to start, or the
                measurement is worthless. Any other error is left to the caller.
        """
        outcomes = (pytest.skip.Exception, pytest.xfail.Exception, Failed)
        if self.run is None or isinstance(error, (*ENDS_SESSION, *outcomes)):
            return
        debugging = self._is_debugging
        try:
            results = self.opened_session().finish(PytestItem(item), error, debugging=debugging)
        except GpuMemError as worthless:
            raise Failed(str(worthless)) from None
        if results:
            self._attach(item, results)
            if not debugging:  # a debugger should see the frames of the error itself
                raise _out_of_memory_failure(self._failure_text(results), error) from None

    # -- teardown --

    @pytest.hookimpl(specname="pytest_runtest_teardown", tryfirst=True)
    def pytest_runtest_teardown_leaks(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> None:
        """Judge the memory that a test left behind once only fixtures of wider scope are alive.

        If a fixture's teardown fails, the test ends with that error. After an error raised here
        pytest tears down nothing, so before raising one this hook tears down what ``nextitem`` does
        not use.
        """
        __tracebackhide__ = True
        results = item.stash.get(CALL_RESULTS, None)
        if self.run is None or self.run.spec.max_leak_mib is None or results is None:
            return
        marked = PytestItem(item)
        try:
            error = self._finish_own(marked)
            leaked = self.opened_session().finish_torn_down(marked, results)
            if leaked:
                self._attach(item, leaked)
        except BaseException:
            marked.finish_for(nextitem)
            raise
        if error is not None or leaked:
            marked.finish_for(nextitem)
            raise error or Failed(self._failure_text(leaked))

    def _finish_own(self, marked: PytestItem) -> BaseException | None:
        """Tear down the test's own fixtures; return their error with its frames cleared, or None.

        The frames keep memory alive. The error's report needs them, so it is made before they are
        cleared. For a debugger the frames are kept: the error is raised, and no leak is judged.
        """
        __tracebackhide__ = True
        try:
            marked.finish()
        except (Exception, pytest.fail.Exception) as error:
            if self._is_debugging:
                raise
            from pytest_gpumem.tracebacks import clear

            marked.item.stash[TEARDOWN_ERROR] = error, marked.error_text(error)
            clear(error)
            return error
        return None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        """Tear the test down on its device, then release the device."""
        try:
            with self._phase():
                return (yield)
        finally:
            if CALL_RESULTS in item.stash:
                del item.stash[CALL_RESULTS]
            if self.run is not None:
                self._forget_errors()
                self.opened_session().end()

    # -- reports --

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_exception_interact(self) -> Generator[None, object, object]:
        """Clear a subtest's error after debuggers have used it, so that it keeps nothing alive."""
        try:
            return (yield)
        finally:
            if self._phase_runs:
                self._forget_errors()

    def _failure_text(self, results: Sequence[Result]) -> str:
        from pytest_gpumem.session.terminal_summary import failure_text

        return failure_text(results, self.config.get_verbosity())

    @staticmethod
    def _show_own_error(
        item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> bool:
        """Make a report show the error of the test's own teardown; return whether there was one."""
        error, longrepr = item.stash.get(TEARDOWN_ERROR, (None, None))
        if error is None:
            return False
        del item.stash[TEARDOWN_ERROR]
        if call.excinfo is not None and call.excinfo.value is error:
            report.longrepr = longrepr
        return True

    @staticmethod
    def _attach(item: pytest.Item, results: list[Result]) -> None:
        """Attach results to the next report, and call the hooks for them."""
        from pytest_gpumem.report.item_properties import properties

        for result in results:
            item.ihook.pytest_gpumem_judged(item=item, result=result)
        item.stash[RESULTS] = item.stash[CALL_RESULTS] = results
        item.user_properties.extend(properties(results))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the results to the report that they belong to."""
        report = yield
        if call.excinfo is not None:
            self._errors.append(call.excinfo.value)
            if self._phase_runs and report.skipped:  # a skipped subtest: no debugger needs it
                self._forget_errors()
        nodeid = unique_nodeid(item)
        data = ReportData() if nodeid == report.nodeid else ReportData(nodeid=nodeid)
        if not report.passed and is_marked(item):
            data["marked"] = True
        own_error = self._show_own_error(item, call, report)
        results = item.stash.get(RESULTS, None)
        if report.skipped and is_marked(item) and (report.when == "setup" or skip_decorated(item)):
            skip = hidden_skip(self.config, item.path, skip_reason(report.longrepr))
            if skip is not None:
                data["hidden_skip"] = list(skip)  # execnet sends plain tuples and lists only
        if results:
            from pytest_gpumem.report.serialize import to_text

            data["results"] = to_text(results)
            del item.stash[RESULTS]
            if own_error:
                data["own_error"] = True
                report.sections.append(("GPU memory", self._failure_text(results)))
            crash = getattr(report.longrepr, "reprcrash", None)
            if (
                crash is not None
                and call.excinfo is not None
                and call.excinfo.errisinstance(Failed)
            ):
                from pytest_gpumem.report.parts.cause_sentences import short_message

                # pytest's short summary shows this message; in CI it would show the whole text.
                crash.message = short_message(results)
        if data:
            report.__dict__[ATTRIBUTE] = data
        return report
