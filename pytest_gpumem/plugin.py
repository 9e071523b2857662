"""The pytest plugin: hooks, options and the fixture. pytest's objects stop here."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gpumem import hookspecs
from pytest_gpumem.errors import GpuMemError, SpecError
from pytest_gpumem.options import OPTIONS, Option, Settings, read_settings
from pytest_gpumem.spec import spec_from_marks

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_gpumem.devices.choose import Choice
    from pytest_gpumem.running import GpuMemory
    from pytest_gpumem.session import TestSession


MARKER: Final = "gpu_memory"
FIXTURE: Final = "gpu_memory"
NAME: Final = "gpumem-session"
MARKER_HELP: Final = (
    "gpu_memory(max_gib, max_allocated_gib, max_reserved_gib, card, batch_size, tolerance, "
    "baseline, devices, warmup): measure the test's peak CUDA memory, hold it to the limits and to "
    "its baseline."
)

SETTINGS = pytest.StashKey[Settings]()
CHOICE = pytest.StashKey["Choice"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add every option twice: on the command line and in the ini file."""
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
    """Load the virtual GPU before any conftest file can import torch."""
    with contextlib.suppress(pytest.UsageError):  # pytest_configure says it
        _choose(early_config, early_config.known_args_namespace)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and what runs the session."""
    config.addinivalue_line("markers", MARKER_HELP)
    settings = _choose(config, config.option)
    from pytest_gpumem.session import TestSession

    choice = config.stash[CHOICE]
    if choice.device is None and choice.reason == UNKNOWN_DEVICE:
        choice = _made_by_hook(config, settings)
    session = TestSession(settings, choice, Path(config.rootpath))
    config.pluginmanager.register(GpuMemPlugin(config, session), NAME)


UNKNOWN_DEVICE: Final = "unknown"


def _choose(config: pytest.Config, namespace: object) -> Settings:
    """Read the settings and choose the device, once."""
    if SETTINGS in config.stash:
        return config.stash[SETTINGS]

    def get(option: Option) -> tuple[object, str]:
        value = getattr(namespace, option.ini, None)
        if value is not None:
            return value, option.flag
        return config.getini(option.ini), option.ini

    from pytest_gpumem.devices.cards import find_card
    from pytest_gpumem.devices.choose import WANTED, Choice, choose

    try:
        settings = read_settings(get, Path(config.rootpath), lambda name: find_card(name).name)
    except SpecError as error:
        raise pytest.UsageError(str(error)) from error
    shared = hasattr(config, "workerinput")
    if settings.device in WANTED:
        choice = choose(settings.device, find_card(settings.card), shared=shared)
    else:
        choice = Choice(None, UNKNOWN_DEVICE)
    config.stash[SETTINGS], config.stash[CHOICE] = settings, choice
    return settings


def _made_by_hook(config: pytest.Config, settings: Settings) -> Choice:
    from pytest_gpumem.devices.choose import WANTED, Choice

    device = config.hook.pytest_gpumem_make_device(config=config, name=settings.device)
    if device is None:
        raise pytest.UsageError(
            f"--gpumem-device={settings.device}: nobody makes such a device; write "
            f"{', '.join(WANTED)}, or implement pytest_gpumem_make_device"
        )
    return Choice(device, demanded=True)


@pytest.fixture
def gpu_memory(request: pytest.FixtureRequest) -> GpuMemory:
    """The memory measurement of this test: device, batch size, parts, figures so far."""
    from pytest_gpumem.running import GpuMemory

    plugin = request.config.pluginmanager.get_plugin(NAME)
    if not isinstance(plugin, GpuMemPlugin) or plugin.session.run is None:
        raise pytest.UsageError("gpu_memory: no marked test is running")
    return GpuMemory(plugin.session.run)


class Failed(pytest.fail.Exception):  # type: ignore[name-defined, misc] # it is a class
    """A test failed by its verdict: the message is the report, no traceback is shown."""

    __module__ = "builtins"  # as pytest's own: the short summary begins with "Failed:"

    def __init__(self, text: str) -> None:
        super().__init__(text, pytrace=False)


def _out_of_memory(text: str) -> BaseException:
    """Return a failure that is also torch's out-of-memory error, for ``xfail(raises=...)``."""
    import torch

    kind = type("Failed", (Failed, torch.OutOfMemoryError), {"__module__": "builtins"})
    error: BaseException = kind(text)
    return error


class GpuMemPlugin:
    """The hooks of a session. Results travel on the test reports; the controller gathers them."""

    def __init__(self, config: pytest.Config, session: TestSession) -> None:
        self.config = config
        self.session = session
        self._errors: list[BaseException] = []
        self._worker = hasattr(config, "workerinput")

    # -- the header --

    def pytest_report_header(self) -> str:
        """Say which device marked tests run on."""
        return self.session.header()

    # -- one test --

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Let no failed test's traceback keep its tensors alive, whether marked or not."""
        try:
            return (yield)
        finally:
            self._forget_errors()

    def _forget_errors(self) -> None:
        if "torch" in sys.modules:
            from pytest_gpumem.frames import clear

            while self._errors:
                clear(self._errors.pop())
        self._errors.clear()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Open the device for a marked test, so that it is set up under its cap.

        Not in a wrapper: others' wrappers must have begun when it fails or skips.
        """
        if not _is_marked(item):
            return
        from pytest_gpumem.running import canonical_card

        marks = [(mark.args, mark.kwargs) for mark in item.iter_markers(MARKER)]
        try:
            spec = spec_from_marks(marks, find_card=canonical_card)
            self.session.begin(item.nodeid, spec, _fixture_names(item))
        except GpuMemError as error:
            raise Failed(str(error)) from None
        if self.session.run is None:
            if self.session.choice.demanded:
                raise Failed(f"gpumem: {self.session.choice.reason}")
            item.user_properties.append(("gpumem_skipped", self.session.choice.reason))
            pytest.skip(f"gpumem: {self.session.choice.reason}")

    @pytest.hookimpl(wrapper=True, specname="pytest_runtest_setup", tryfirst=True)
    def explain_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        """Make a verdict of running out of memory in a fixture."""
        try:
            return (yield)
        except BaseException as error:
            self._explain(item, error)
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        """Note what fixtures of wider scope than a test retain."""
        if fixturedef.scope == "function":
            return (yield)
        with self.session.fixture(fixturedef.argname, fixturedef):
            return (yield)

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Forget a fixture that was torn down."""
        self.session.fixtures.pop(fixturedef, None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Warm up, run, measure, judge; a verdict that fails is an exception like any other."""
        run = self.session.run
        if run is None:
            return (yield)
        try:
            for _ in range(run.spec.warmup):
                item.runtest()
                run.meter.restart()
            yield
        except BaseException as error:
            self._explain(item, error)
            raise
        hidden = _hidden_error(item)
        if hidden is not None:  # unittest keeps its errors to itself
            self._explain(item, hidden)
            return None
        try:
            results = self.session.judge(item.nodeid, _marker_place(item), self._measured(item))
        except GpuMemError as error:
            raise Failed(str(error)) from None
        for result in results:
            item.ihook.pytest_gpumem_judged(item=item, result=result)
        item.stash[RESULTS] = results
        text = self.session.failure_text(results)
        if text:
            raise Failed(text)
        return None

    def _measured(self, item: pytest.Item) -> Any:  # noqa: ANN401 - a function
        def ask(part: str, measurement: object) -> object:
            changed = item.ihook.pytest_gpumem_measured(
                item=item, part=part, measurement=measurement
            )
            return measurement if changed is None else changed

        return ask

    def _explain(self, item: pytest.Item, error: BaseException) -> None:
        """Turn running out of memory into a verdict, with what the step would have needed."""
        run = self.session.run
        if run is None or isinstance(error, (KeyboardInterrupt, pytest.exit.Exception)):
            return
        from pytest_gpumem.oom import find_out_of_memory

        cause = find_out_of_memory(error)
        if cause is None or isinstance(error, Failed):
            return
        record = run.out_of_memory(cause)
        measurement = run.measurement(record)
        debugging = self.config.getoption("usepdb", default=False)
        needed = None if debugging else self._again(item, error)
        results = self.session.judge_out_of_memory(
            item.nodeid, _marker_place(item), measurement, needed, self._measured(item)
        )
        for result in results:
            item.ihook.pytest_gpumem_judged(item=item, result=result)
        item.stash[RESULTS] = results
        if debugging:  # who debugs wants the frames of the error itself
            return
        raised = _out_of_memory(self.session.failure_text(results))
        if _hidden_error(item) is not None:
            _replace_hidden(item, raised)
            return
        raise raised from None

    def _again(self, item: pytest.Item, error: BaseException) -> Any:  # noqa: ANN401
        """Set the test up and run it once more, without any cap; return its peaks, or None."""
        from pytest_gpumem.frames import clear

        run = self.session.run
        state: Any = item.session._setupstate
        if run is None or item.parent is None or not hasattr(item, "_initrequest"):
            return None
        clear(error)
        hidden = getattr(item, "_excinfo", None)
        kept = list(hidden) if hidden else None
        try:
            state.teardown_exact(item.parent)
            item._initrequest()
            run.uncap()
            state.setup(item)
            item.runtest()
            if kept is not None and len(hidden or ()) > len(kept):
                return None
            return run.meter.peaks()
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as again:  # noqa: BLE001 - whatever the test raises
            clear(again)
            return None
        finally:
            if kept is not None and hidden is not None:
                hidden[:] = kept
            with contextlib.suppress(Exception):
                state.teardown_exact(item.parent)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        """Tear the test down on its device, then let go of that."""
        try:
            return (yield)
        finally:
            self.session.end()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the results on the report that they belong to."""
        report = yield
        if call.excinfo is not None:
            self._errors.append(call.excinfo.value)
        results = item.stash.get(RESULTS, None)
        if results:
            from pytest_gpumem.report.wire import to_dict

            report.__dict__["gpumem"] = [to_dict(result) for result in results]
            del item.stash[RESULTS]
        return report

    # -- the session --

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather the results, in the controller alone."""
        if self._worker:
            return
        self.session.gather.add(
            report.nodeid,
            report.when or "",
            passed=report.outcome == "passed" and not hasattr(report, "wasxfail"),
            data=getattr(report, "gpumem", None),
        )
        if report.skipped and report.when == "setup":
            reasons = dict(report.user_properties)
            if "gpumem_skipped" in reasons:
                self.session.gather.skipped.append(str(reasons["gpumem_skipped"]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the baselines; a file that cannot be written fails the session."""
        if self._worker or not self.session.settings.update_baselines:
            return
        updates = self.session.update_baselines()
        if updates.errors and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the table, the counts and the next command."""
        if self._worker:
            return
        sections = self.session.summary(
            verbosity=terminalreporter.verbosity,
            width=terminalreporter._tw.fullwidth,
            encoding=getattr(terminalreporter._tw._file, "encoding", None) or "utf-8",
        )
        if not sections:
            return
        if terminalreporter.verbosity >= 0:
            terminalreporter.section("GPU memory", sep="=")
        for text in sections:
            terminalreporter.write_line(text)

    def pytest_unconfigure(self) -> None:
        """Leave the process as it was found, also after an interrupted test."""
        self.session.end()


RESULTS = pytest.StashKey["list[Any]"]()


def _is_marked(item: pytest.Item) -> bool:
    return item.get_closest_marker(MARKER) is not None or FIXTURE in _fixture_names(item)


def _fixture_names(item: pytest.Item) -> list[str]:
    return list(getattr(item, "fixturenames", ()))


def _marker_place(item: pytest.Item) -> tuple[str, int]:
    path, line, _ = item.location
    return path, (line or 0) + 1


def _hidden_error(item: pytest.Item) -> BaseException | None:
    """Return the error that a unittest.TestCase's test keeps to itself until its report."""
    kept = getattr(item, "_excinfo", None)
    return kept[0].value if kept else None


def _replace_hidden(item: pytest.Item, error: BaseException) -> None:
    item._excinfo = [pytest.ExceptionInfo.from_exception(error)]  # type: ignore[attr-defined]
