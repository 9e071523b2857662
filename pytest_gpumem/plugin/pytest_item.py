"""Adapt pytest's items to marked tests, and spread one test over several cards or ranks.

All uses of pytest's private names are here, except ``_use_item_location`` in item_hooks.py. They
are tested with pytest 8.3 to 9.2.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from fnmatch import fnmatchcase
from types import CodeType
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gpumem.errors import SpecError
from pytest_gpumem.testrun.marked_item import Attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.testrun.marked_item import FixtureKey

MARKER: Final = "gpu_memory"
ALL: Final = "*"
"""the pattern that matches every node id"""
FIXTURE: Final = "gpu_memory"
UNMARKED = pytest.StashKey[bool]()
"""set on tests that are measured only because of an option"""
CARD: Final = "_gpumem_card"
RANK: Final = "_gpumem_rank"
"""CARD and RANK name fixtures whose only purpose is to parametrize a test"""
MAX_RANKS: Final = 4096
""""all" may request at most this many ranks"""


def terminal_stream(config: pytest.Config) -> object:
    """Return the file that pytest's terminal reporter writes to, as it may not be sys.stdout."""
    return config.get_terminal_writer()._file


def is_marked(item: pytest.Item) -> bool:
    """Return whether a test is measured: by its marker, or by using the fixture."""
    return item.get_closest_marker(MARKER) is not None or FIXTURE in _fixture_names(item)


def measure_unmarked(item: pytest.Item, patterns: Sequence[str]) -> None:
    """Mark an unmarked test for measuring if its node id matches a pattern."""
    if not patterns or is_marked(item) or not isinstance(item, pytest.Function):
        return
    nodeid = unique_nodeid(item)
    names = (nodeid, nodeid.partition("::")[0])
    if any(pattern == ALL or fnmatchcase(name, pattern) for pattern in patterns for name in names):
        item.add_marker(MARKER)
        item.stash[UNMARKED] = True


def unique_nodeid(item: pytest.Item) -> str:
    """Return a test's nodeid; for a test outside the root folder, with its path from the root.

    pytest names tests outside the root by the folder on its command line, so two tests may share a
    nodeid.
    """
    path, root = item.path, item.config.rootpath
    if _is_below(path, root):
        return item.nodeid
    _, separator, test = item.nodeid.partition("::")
    return f"{os.path.relpath(path, root).replace(os.sep, '/')}{separator}{test}"


@functools.lru_cache(maxsize=1024)
def _is_below(path: Path, root: Path) -> bool:
    """Return whether a file lies below a folder; cached, as a file has hundreds of tests."""
    return path.is_relative_to(root)


def watch_uses(definition: Any, used: Callable[[], None]) -> None:  # noqa: ANN401 - see below
    """Call a function whenever a test or fixture uses a fixture that is already set up.

    pytest has no hook for this: the definition's private ``execute`` returns the cached value.
    """
    execute = definition.execute

    def watched(request: object) -> object:
        value = execute(request)
        used()
        return value

    definition.execute = watched


def watch_requests(request: Any, used: Callable[[FixtureKey], None]) -> None:  # noqa: ANN401 - as above
    """Call a function for each fixture that a setup requests by ``request.getfixturevalue``.

    pytest executes a fixture once per test, so :func:`watch_uses` misses a test's later requests.
    """
    get_value = request.getfixturevalue

    def watched(name: str) -> object:
        value = get_value(name)
        if name != "request":  # pytest 8.3 gets "request" by this method, but it has no definition
            used(request._get_active_fixturedef(name))
        return value

    request.getfixturevalue = watched


def unwatch_uses(definition: Any) -> None:  # noqa: ANN401 - its method is replaced
    """Stop watching the uses of a fixture."""
    vars(definition).pop("execute", None)


def _fixture_names(item: pytest.Item) -> list[str]:
    return list(getattr(item, "fixturenames", ()))


def _late_names(code: CodeType | None) -> Iterator[str]:
    """Yield the strings in code that calls ``getfixturevalue``, inner functions included."""
    if not isinstance(code, CodeType):
        return
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _late_names(constant)
        elif isinstance(constant, str) and "getfixturevalue" in code.co_names:
            yield constant


class _Unreporting:
    """A node's hooks, except that a subtest is not reported and its error is cleared."""

    def __init__(self, hooks: object) -> None:
        self._hooks = hooks

    def __getattr__(self, name: str) -> object:
        return getattr(self._hooks, name)

    def pytest_runtest_logreport(self, **_: object) -> None:
        """Report nothing."""

    def pytest_exception_interact(self, *, call: pytest.CallInfo[Any], **_: object) -> None:
        """Open no debugger, and clear the error."""
        from pytest_gpumem.tracebacks import clear

        if call.excinfo is not None:
            clear(call.excinfo.value)


class PytestItem:
    """A pytest item as a :class:`~pytest_gpumem.testrun.marked_item.MarkedItem`."""

    def __init__(self, item: pytest.Item) -> None:
        self.item = item
        self._private: Any = item
        """the same item, typed Any where private names are used"""

    @property
    def declared(self) -> bool:
        """See :meth:`~pytest_gpumem.testrun.marked_item.MarkedItem.declared`."""
        return UNMARKED not in self.item.stash

    @property
    def nodeid(self) -> str:
        """The test's nodeid, which is unique even if its file is outside the root folder."""
        return unique_nodeid(self.item)

    @property
    def argument(self) -> str:
        """The test's name for a command line, with its file relative to the working folder."""
        config = self.item.config
        module, separator, test = self.nodeid.partition("::")
        path = os.path.relpath(config.rootpath / module, config.invocation_params.dir)
        return f"{path.replace(os.sep, '/')}{separator}{test}"

    def location(self) -> tuple[str, int]:
        """Return the test's file and the line of its marker, counted from 1."""
        from pytest_gpumem.source_lines import marker_line

        path, line, _ = self.item.location
        filename = str(self.item.config.rootpath / path)
        return str(path), marker_line(filename, (line or 0) + 1, MARKER)

    # -- fixtures --

    def requested_fixtures(self) -> Iterator[pytest.FixtureDef[Any]]:
        """Yield the fixtures that the test uses, as far as they are known before it runs."""
        info = getattr(self.item, "_fixtureinfo", None)
        definitions_by_name = getattr(info, "name2fixturedefs", {})
        for name in _fixture_names(self.item):
            for definition in reversed(definitions_by_name.get(name, ())):
                yield definition
                if name not in definition.argnames:  # the overridden one is not requested
                    break

    def late_fixtures(self) -> Iterator[pytest.FixtureDef[Any]]:
        """Yield the fixtures that ``request.getfixturevalue("a name")`` requests during the run.

        Only names that are written in the test or in a fixture that it uses are found, not computed
        ones.
        """
        manager = self._private.session._fixturemanager
        pending: list[Any] = [definition.func for definition in self.requested_fixtures()]
        pending.append(getattr(self.item, "function", None))
        names: set[str] = set()
        while pending:
            code = None
            with suppress(ValueError):  # an object with every attribute has endless __wrapped__
                code = getattr(inspect.unwrap(pending.pop()), "__code__", None)
            unresolved = [*_late_names(code)]
            while unresolved:
                name = unresolved.pop()
                if name in names:
                    continue
                names.add(name)
                for definition in manager.getfixturedefs(name, self.item) or ():
                    yield definition
                    unresolved += definition.argnames
                    pending.append(definition.func)

    def finish_replaced(self, live: Collection[FixtureKey], outdated: Sequence[FixtureKey]) -> None:
        """Tear down live fixtures that this test replaces: see ``MarkedItem``.

        pytest would tear down parametrized ones a little later, during the measurement.
        """
        if outdated:
            used = {*self.requested_fixtures(), *self.late_fixtures()}
            # Ignore their errors: the instances that replace them raise the same ones at tear-down.
            self.finish_fixtures(fixture for fixture in outdated if fixture in used)
        params = getattr(getattr(self.item, "callspec", None), "params", {})
        for definition in self.requested_fixtures():
            name, cached = definition.argname, definition.cached_result
            if definition not in live or not cached or name not in params:
                continue
            try:
                same = bool(cached[1] == params[name])
            except (ValueError, RuntimeError):  # arrays; pytest handles them in the same way
                same = cached[1] is params[name]
            if not same:
                definition.finish(self._private._request)

    def finish_fixtures(self, fixtures: Iterable[FixtureKey]) -> None:
        """Tear fixtures down in reverse order, ignoring their errors."""
        definitions: list[Any] = list(fixtures)
        for definition in reversed(definitions):
            with suppress(Exception):
                definition.finish(self._private._request)

    # -- running --

    def runtest(self) -> None:
        """Call the test's function."""
        self.item.runtest()

    def hidden_error(self) -> BaseException | None:
        """Return the error that a unittest.TestCase test keeps until its report, or None."""
        hidden = self._hidden_infos()
        return hidden[0].value if hidden else None

    def replace_hidden_error(self) -> None:
        """Replace the hidden error by the one that is being handled."""
        self._private._excinfo = [pytest.ExceptionInfo.from_current()]

    def _hidden_infos(self) -> list[pytest.ExceptionInfo[BaseException]]:
        return list(getattr(self.item, "_excinfo", None) or ())

    def run_again(
        self, error: BaseException | None, prepare: Callable[[], None], execute: Callable[[], None]
    ) -> Attempt:
        """Tear the test down, set it up and run it again: see ``MarkedItem``."""
        if self.item.parent is None or not hasattr(self.item, "_initrequest"):
            return Attempt(passed=False)  # only a function's test can be set up again
        from pytest_gpumem.tracebacks import clear

        hidden_before = self._hidden_infos()
        try:
            with (
                redirect_stdout(io.StringIO()),
                redirect_stderr(io.StringIO()),
                self._unreported_subtests(),
            ):
                state: Any = self._private.session._setupstate
                clear(error)
                state.teardown_exact(self.item.parent)
                clear(error)  # frames that waited for the teardown have ended now
                self._forget_instance()
                self._private._initrequest()
                prepare()
                state.setup(self.item)
                execute()
            hidden = self._hidden_infos()
            if len(hidden) > len(hidden_before):
                return Attempt(passed=False, error=hidden[-1].value)
            return Attempt(passed=True)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as failure:  # noqa: BLE001 - pytest.fail and pytest.skip raise no Exception
            clear(failure)
            return Attempt(passed=False, error=failure)
        finally:
            if self._hidden_infos() != hidden_before:
                self._private._excinfo = hidden_before

    @contextmanager
    def _unreported_subtests(self) -> Iterator[None]:
        """Keep pytest from reporting subtests in the block: only those of the first run count.

        Subtests report through the hooks that a node gets from its session.
        """
        session = self._private.session
        hooks_for = session.gethookproxy
        failed: dict[object, int] = {}
        with suppress(ImportError):  # pytest 8 has no subtests of its own
            from _pytest.subtests import failed_subtests_key

            failed = self._private.config.stash[failed_subtests_key]
        failed_before = dict(failed)
        session.gethookproxy = lambda path: _Unreporting(hooks_for(path))
        try:
            yield
        finally:
            del session.gethookproxy
            failed.clear()
            failed.update(failed_before)

    def tear_down(self) -> None:
        """Tear the test down, ignoring its output and its errors."""
        from pytest_gpumem.tracebacks import clear

        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                self._private.session._setupstate.teardown_exact(self.item.parent)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - the test's own fixtures may raise anything
            clear(error)

    def finish(self) -> None:
        """Tear down the test and drop pytest's references to it, but leave fixtures of wider scope.

        Raises:
            BaseException: an error of the teardown.
        """
        try:
            self._private.session._setupstate.teardown_exact(self.item.parent)
        finally:
            self._forget_instance()
            getattr(self.item, "funcargs", {}).clear()

    def error_text(self, error: BaseException) -> Any:  # noqa: ANN401 - a report's longrepr
        """Return pytest's rendering of an error of the test's teardown."""

        def reraise() -> None:
            __tracebackhide__ = True
            raise error

        call = pytest.CallInfo.from_call(reraise, "teardown")
        return pytest.TestReport.from_item_and_call(self.item, call).longrepr

    def finish_for(self, following: pytest.Item | None) -> None:
        """Tear down the fixtures that the next item does not use."""
        self._private.session._setupstate.teardown_exact(following)

    def _forget_instance(self) -> None:
        """Make a method run on a new instance, without the attributes of the first run."""
        if self.item.__dict__.pop("_instance", None) is not None:
            self.item.__dict__.pop("_obj", None)

    # -- hooks --

    def measured(self, part: str, measurement: Measurement) -> Measurement:
        """Return the measurement to judge: this one, or a hook's replacement."""
        changed: Measurement | None = self.item.ihook.pytest_gpumem_measured(
            item=self.item, part=part, measurement=measurement
        )
        return measurement if changed is None else changed


def spread(metafunc: pytest.Metafunc, cards: Sequence[str]) -> None:
    """Parametrize a test that has several cards or ranks in its marker.

    Errors in a marker are reported by the test's setup, not here.

    ``cards`` are the session's, which apply to every test; without them the marker's apply.
    """
    declared = [mark.kwargs for mark in metafunc.definition.iter_markers(MARKER)]
    if not declared and FIXTURE not in metafunc.fixturenames:
        return
    fields = {name: value for kwargs in reversed(declared) for name, value in kwargs.items()}
    names, card = list(cards), fields.get("card")
    if not names and isinstance(card, (list, tuple)) and all(isinstance(n, str) for n in card):
        names = list(dict.fromkeys(map(canonical_or_given, card)))
    if names:
        _parametrize(metafunc, CARD, names, names)
    ranks, world_size = fields.get("ranks"), fields.get("world_size")
    if isinstance(ranks, str) and str.__str__(ranks) == "all" and isinstance(world_size, int):
        ranks = range(world_size) if 1 <= world_size <= MAX_RANKS else ranks
    # The test's setup reports everything else, including too many ranks.
    if (
        isinstance(ranks, (list, tuple, range))
        and len(ranks) <= MAX_RANKS
        and all(type(rank) is int for rank in ranks)
    ):
        ranks = list(dict.fromkeys(ranks))
        if ranks:
            _parametrize(metafunc, RANK, ranks, [f"rank{rank}" for rank in ranks])


def _parametrize(
    metafunc: pytest.Metafunc, name: str, values: Sequence[object], ids: list[str]
) -> None:
    if name not in metafunc.fixturenames:
        metafunc.fixturenames.append(name)
    metafunc.parametrize(name, values, indirect=True, ids=ids)


def canonical_or_given(name: str) -> str:
    """Return a card's canonical name, or the given name if the table does not have it."""
    from pytest_gpumem.devices.cards import find_card

    try:
        return find_card(name).name
    except SpecError:
        return name


def spread_fields(item: pytest.Item) -> dict[str, object]:
    """Return the marker's arguments that come from the test's parameters."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    fields: dict[str, object] = {}
    if CARD in params:
        fields["card"] = params[CARD]
    if RANK in params:
        fields |= {"rank": params[RANK], "ranks": None}
    return fields


def cards_of(items: Iterable[pytest.Item]) -> set[str | None]:
    """Return the names of the tests' cards, with None among them if a test names no card."""
    named: set[str | None] = set()
    for item in items:
        fields = spread_fields(item)
        if "card" not in fields:
            for mark in item.iter_markers(MARKER):
                fields = {**mark.kwargs, **fields}
        card = fields.get("card")
        named.add(canonical_or_given(card) if isinstance(card, str) else None)
    return named
