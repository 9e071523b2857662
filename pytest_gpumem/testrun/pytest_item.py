"""What measuring needs of pytest's items and has no public name there; each use is tested.

Nothing of pytest is imported: items come in as what they are.
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.source_lines import marker_line
from pytest_gpumem.tracebacks import clear

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

MARKER: Final = "gpu_memory"
FIXTURE: Final = "gpu_memory"


def fixture_names(item: Any) -> list[str]:  # noqa: ANN401 - see above, here and below
    """Return the names of the fixtures that an item is known to use before it runs."""
    return list(getattr(item, "fixturenames", ()))


def place(item: Any) -> tuple[str, int]:  # noqa: ANN401
    """Return an item's file and the line, from 1, of its marker, where that can be told."""
    path, line, _ = item.location
    filename = str(item.config.rootpath / path)
    return str(path), marker_line(filename, (line or 0) + 1, MARKER)


# -- fixtures --


def fixture_defs(item: Any) -> Iterator[Any]:  # noqa: ANN401
    """Yield the definitions of the fixtures that an item is known to use before it runs."""
    known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    for name in fixture_names(item):
        for definition in reversed(known.get(name, ())):
            yield definition
            if name not in definition.argnames:  # it does not ask for the one that it overrides
                break


def fixture_defs_used(item: Any) -> list[Any]:  # noqa: ANN401
    """Return the definitions of the fixtures that an item has used, whichever way."""
    request = getattr(item, "_request", None)
    return list(getattr(request, "_fixture_defs", {}).values())


def finish_replaced(item: Any, live: Collection[Any]) -> None:  # noqa: ANN401
    """Tear down the instances of parametrized fixtures that the item is about to replace.

    pytest would do it a little later, in the midst of the measurement.
    """
    params = getattr(getattr(item, "callspec", None), "params", {})
    for definition in fixture_defs(item):
        name, cached = definition.argname, definition.cached_result
        if definition in live and cached and name in params and not _same(cached[1], params[name]):
            definition.finish(item._request)


def finish_all(item: Any, definitions: Collection[Any]) -> None:  # noqa: ANN401
    """Tear down fixtures, the last set up first; errors of their own are nobody's business."""
    for definition in reversed(list(definitions)):
        with suppress(Exception):
            definition.finish(item._request)


def _same(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # arrays, as pytest itself has it
        return one is other


# -- unittest --


def hidden_error(item: Any) -> BaseException | None:  # noqa: ANN401
    """Return the error that a unittest.TestCase's test keeps to itself until its report."""
    kept = getattr(item, "_excinfo", None)
    error: BaseException | None = kept[0].value if kept else None
    return error


# -- once more --


def run_again(
    item: Any,  # noqa: ANN401
    error: BaseException | None,
    prepare: Callable[[], None],
    execute: Callable[[], None],
    failed: Callable[[BaseException], object] = bool,
) -> bool:
    """Tear a failed test down, set it up and run it once more; return whether it passed.

    Afterwards it is to be torn down (:func:`tear_down`). What it prints is not shown again.

    Args:
        item: the test; its set-up or its call has just ended.
        error: with what, if it failed.
        prepare: is called between tear-down and set-up.
        execute: is called after the set-up, to call ``item.runtest``.
        failed: is called with the error if it does not pass this time.
    """
    if item.parent is None or not hasattr(item, "_initrequest"):
        return False
    state: Any = item.session._setupstate
    hidden = getattr(item, "_excinfo", None)
    kept = list(hidden or ())
    clear(error)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            state.teardown_exact(item.parent)
            clear(error)  # frames that waited for the tear-down have ended now
            _forget_instance(item)
            item._initrequest()
            prepare()
            state.setup(item)
            execute()
        kept_now = list(hidden or ())
        if len(kept_now) > len(kept):  # unittest keeps its errors to itself
            failed(kept_now[-1].value)
        return len(kept_now) == len(kept)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as again:  # noqa: BLE001 - pytest.fail and pytest.skip raise no Exception
        failed(again)
        clear(again)
        return False
    finally:
        if hidden is not None:
            hidden[:] = kept


def tear_down(item: Any) -> None:  # noqa: ANN401
    """Tear an item down, quietly, whatever its fixtures do."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            item.session._setupstate.teardown_exact(item.parent)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the program's own; shown as Python shows it
        clear(error)


def finish(item: Any) -> None:  # noqa: ANN401
    """Tear an item down, with all that pytest keeps of it, and none of what is around it.

    Raises:
        BaseException: what its tear-down raises.
    """
    item.session._setupstate.teardown_exact(item.parent)
    _forget_instance(item)
    getattr(item, "funcargs", {}).clear()


def finish_for(item: Any, following: Any) -> None:  # noqa: ANN401
    """Tear down what the item that comes next has no use for."""
    item.session._setupstate.teardown_exact(following)


def _forget_instance(item: Any) -> None:  # noqa: ANN401
    """Have a method run on an instance of its own, without what the first run kept in ``self``."""
    if item.__dict__.pop("_instance", None) is not None:
        item.__dict__.pop("_obj", None)
