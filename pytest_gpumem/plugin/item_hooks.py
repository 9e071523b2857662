"""The hooks that run one test: set up under its cap, measured, judged, reported."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.errors import GpuMemError, TooSmallError
from pytest_gpumem.testrun import pytest_item
from pytest_gpumem.testrun.pytest_item import FIXTURE, MARKER

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.plugin.session import Ask, TestSession
    from pytest_gpumem.testrun.run import Run

RESULTS = pytest.StashKey["list[Result]"]()
"""what the next report is to have"""
JUDGED = pytest.StashKey["list[Result]"]()
"""what the call's had"""


class Failed(pytest.fail.Exception):  # type: ignore[name-defined, misc] # it is a class
    """A test failed by its verdict: the message is the report, no traceback is shown."""

    __module__ = "builtins"  # as pytest's own: the short summary begins with "Failed:"

    def __init__(self, text: str) -> None:
        super().__init__(text, pytrace=False)


def _out_of_memory(text: str, error: BaseException) -> BaseException:
    """Return a failure that is also what the test raised, for ``xfail(raises=...)``."""
    import torch

    wanted: tuple[type, ...] = (type(error), torch.OutOfMemoryError)
    for bases in (dict.fromkeys(wanted), wanted[1:]):
        with contextlib.suppress(TypeError):  # classes that cannot be combined
            kind = type("Failed", (Failed, *bases), {"__module__": "builtins"})
            made: BaseException = kind(text)
            return made
    return Failed(text)


class Runner:
    """The hooks of each test. Unmarked tests pay no more than a look at their markers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._errors: list[BaseException] = []

    @property
    def session(self) -> TestSession:
        """What runs marked tests, made for the first of them."""
        raise NotImplementedError

    @property
    def started(self) -> bool:
        """Whether there was one."""
        raise NotImplementedError

    @property
    def run(self) -> Run | None:
        """The marked test that runs now."""
        raise NotImplementedError

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Let no failed test's traceback keep its tensors alive, whether marked or not."""
        try:
            return (yield)
        finally:
            self._forget_errors()

    def _forget_errors(self) -> None:
        if "torch" in sys.modules:
            from pytest_gpumem.tracebacks import clear

            while self._errors:
                clear(self._errors.pop())
        self._errors.clear()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Open the device for a marked test, so that it is set up under its cap.

        Not in a wrapper: others' wrappers must have begun when it fails or skips.
        """
        self._forget_errors()  # of the last try, where this is a rerun
        if JUDGED in item.stash:
            del item.stash[JUDGED]
        if not is_marked(item):
            return
        _forget_properties(item)  # likewise
        from pytest_gpumem.plugin.parametrize import spread_fields
        from pytest_gpumem.spec import spec_from_marks
        from pytest_gpumem.testrun.run import canonical_card

        marks: list[tuple[tuple[object, ...], Mapping[str, object]]] = [((), spread_fields(item))]
        marks += [(mark.args, mark.kwargs) for mark in item.iter_markers(MARKER)]
        try:
            spec = spec_from_marks(marks, find_card=canonical_card)
            self.session.begin(item, spec)
        except TooSmallError as error:  # another machine's GPU may do
            self._without_device(item, str(error), skip=self.session.settings.device == "auto")
        except GpuMemError as error:
            raise Failed(str(error)) from None
        if self.run is None:
            choice = self.session.choice
            self._without_device(item, choice.reason, skip=not choice.demanded)

    @staticmethod
    def _without_device(item: pytest.Item, reason: str, *, skip: bool) -> None:
        if not skip:
            raise Failed(f"gpumem: {reason}")
        item.user_properties.append(("gpumem_skipped", reason))
        raise pytest.skip.Exception(f"gpumem: {reason}", _use_item_location=True)

    @pytest.hookimpl(wrapper=True, specname="pytest_runtest_setup", tryfirst=True)
    def pytest_runtest_setup_explained(self, item: pytest.Item) -> Generator[None, None, None]:
        """Make a verdict of running out of memory in a fixture.

        pytest only sees methods whose names begin with "pytest_".
        """
        try:
            return (yield)
        except BaseException as error:
            self._explain(item, error)
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """Note what fixtures of wider scope than a test retain."""
        if self.run is None or fixturedef.scope == "function":
            return (yield)
        try:
            with self.session.fixture(fixturedef.argname, fixturedef):
                return (yield)
        except Exception as error:
            from pytest_gpumem.meter.out_of_memory import find_out_of_memory

            if find_out_of_memory(error) is not None:  # the next test may have room for it
                fixturedef.finish(request)  # type: ignore[arg-type] # it is a SubRequest
            raise

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Forget a fixture that was torn down."""
        if self.started:
            self.session.fixtures.pop(fixturedef, None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Warm up, run, measure, judge; a verdict that fails is an exception like any other."""
        run = self.run
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
        hidden = pytest_item.hidden_error(item)
        if hidden is not None:  # unittest keeps its errors to itself
            self._explain(item, hidden)
            return None
        try:
            results = self.session.judge(item, self._asker(item))
        except GpuMemError as error:
            raise Failed(str(error)) from None
        self._tell(item, results)
        text = self.session.failure_text(results)
        if text:
            raise Failed(text)
        return None

    def _asker(self, item: pytest.Item) -> Ask:
        def ask(part: str, measurement: Measurement) -> Measurement:
            changed: Measurement | None = item.ihook.pytest_gpumem_measured(
                item=item, part=part, measurement=measurement
            )
            return measurement if changed is None else changed

        return ask

    @pytest.hookimpl(specname="pytest_runtest_teardown", tryfirst=True)
    def pytest_runtest_teardown_leaks(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> None:
        """Judge what a test left behind: its own fixtures torn down, wider ones alive.

        An error here keeps pytest from tearing down, so that is done as well.
        """
        results = item.stash.get(JUDGED, None)
        if self.run is None or self.run.spec.max_leak_mib is None or results is None:
            return
        try:
            pytest_item.finish(item)
            self._judge_left(item, results)
        except BaseException:
            pytest_item.finish_for(item, nextitem)
            raise

    def _judge_left(self, item: pytest.Item, results: list[Result]) -> None:
        left = self.session.judge_left(item, results)
        if left:
            self._tell(item, left)
            raise Failed(self.session.failure_text(left))

    @staticmethod
    def _tell(item: pytest.Item, results: list[Result]) -> None:
        for result in results:
            item.ihook.pytest_gpumem_judged(item=item, result=result)
        item.stash[RESULTS] = item.stash[JUDGED] = results
        from pytest_gpumem.report.item_properties import properties

        item.user_properties.extend(properties(results))

    def _explain(self, item: pytest.Item, error: BaseException) -> None:
        """Turn running out of memory into a verdict, with what the step would have needed."""
        on_purpose = (KeyboardInterrupt, pytest.exit.Exception, pytest.skip.Exception)
        run = self.run
        if run is None or isinstance(error, (*on_purpose, pytest.xfail.Exception, Failed)):
            return
        from pytest_gpumem.meter.out_of_memory import find_out_of_memory

        cause = find_out_of_memory(error)
        if cause is None:
            return
        failure = self.session.ran_out(item, cause, error)
        if self.config.getoption("usepdb", default=False):
            self._tell(item, self.session.judge_out_of_memory(item, failure, self._asker(item)))
            return  # who debugs wants the frames of the error itself
        failure = self.session.run_again(item, failure, error)
        results = self.session.judge_out_of_memory(item, failure, self._asker(item))
        self._tell(item, results)
        raised = _out_of_memory(self.session.failure_text(results), error)
        if pytest_item.hidden_error(item) is None:
            raise raised from None
        try:
            raise raised
        except Failed:
            item._excinfo = [pytest.ExceptionInfo.from_current()]  # type: ignore[attr-defined]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        """Tear the test down on its device, then let go of that."""
        try:
            return (yield)
        finally:
            if JUDGED in item.stash:
                del item.stash[JUDGED]
            if self.run is not None:
                self._forget_errors()
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
            from pytest_gpumem.report.serialize import to_text

            report.__dict__["gpumem"] = to_text(results)
            del item.stash[RESULTS]
        return report


def _forget_properties(item: pytest.Item) -> None:
    kept = [it for it in item.user_properties if not it[0].startswith("gpumem_")]
    item.user_properties[:] = kept


def is_marked(item: pytest.Item) -> bool:
    """Return whether a test is to be measured: by its marker, or by the fixture alone."""
    return item.get_closest_marker(MARKER) is not None or FIXTURE in pytest_item.fixture_names(item)
