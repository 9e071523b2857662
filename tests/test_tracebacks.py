"""Clearing an error's frames: what they keep alive goes, what is to go on goes on."""

import asyncio
import gc
import inspect
import weakref
from types import FunctionType

import pytest

from pytest_gpumem.tracebacks import clear, without_collections


class Kept:
    """Something that a frame keeps alive."""


def caught(call):
    with pytest.raises(ArithmeticError) as error:
        call()
    return error.value


def test_what_frames_of_functions_and_of_generators_that_ended_keep_is_let_go():
    kept = []

    def fails():
        held = Kept()
        kept.append(weakref.ref(held))
        raise ArithmeticError(str(held))

    def generates():
        held = Kept()
        kept.append(weakref.ref(held))
        yield fails()

    async def awaits():
        held = Kept()
        kept.append(weakref.ref(held))
        await asyncio.sleep(0)
        list(generates())

    error = caught(lambda: asyncio.run(awaits()))
    assert all(it() is not None for it in kept)
    clear(error)
    gc.collect()
    assert [it() for it in kept] == [None] * 3


def test_a_coroutine_that_handed_the_error_on_is_not_ended():
    """As anyio's, which runs tests and fixtures in a task of its own."""
    errors = []

    async def fails():
        raise ArithmeticError

    async def serves(jobs):
        while (job := await jobs.get()) is not None:
            with pytest.raises(ArithmeticError) as error:
                await job
            errors.append(error.value)
            del error
        return "done"

    async def main():
        jobs = asyncio.Queue()
        server = asyncio.create_task(serves(jobs))
        for _ in range(2):
            await jobs.put(fails())
            await asyncio.sleep(0.01)
            clear(errors[-1])
        await jobs.put(None)
        return await server

    assert asyncio.run(main()) == "done"
    assert len(errors) == 2


def test_a_generator_that_caught_its_error_goes_on():
    errors = []

    def goes_on():
        held = "mine"
        try:
            _ = 1 / 0
        except ArithmeticError as error:
            errors.append(error)
        yield held
        yield held

    generator = goes_on()
    next(generator)
    clear(errors[0])
    assert next(generator) == "mine"


def test_errors_behind_an_error_are_cleared_too_also_in_a_circle():
    one, other = caught(lambda: 1 / 0), caught(lambda: 2 / 0)
    one.__cause__, other.__context__ = other, one
    clear(one)
    assert one.__traceback__.tb_next.tb_frame.f_locals == {}
    clear(None)


# -- closures: from Python 3.11 on a frame keeps its function, with all that is in its cells --


def calls_inner(held, *, hooks=(), read=False):
    """As ``Module.__call__`` runs hooks: arguments and result in cells of a function in it."""
    result = None

    def inner():
        nonlocal held, result
        result = [held, Kept()]
        for hook in hooks:
            hook(result)
        if read:
            _ = inspect.currentframe().f_locals, inspect.currentframe().f_back.f_locals
        raise ArithmeticError

    return inner()


@pytest.mark.parametrize("read", [False, True])
def test_what_cells_of_closures_keep_is_let_go(read):
    held = Kept()
    gone = weakref.ref(held)

    def step():
        nonlocal held
        mine, held = held, None
        calls_inner(mine, read=read)

    error = caught(step)
    assert gone() is not None
    clear(error)
    gc.collect()
    assert gone() is None


def test_functions_that_refer_to_themselves_and_to_each_other_are_let_go():
    gone = []

    def step():
        held = Kept()
        gone.append(weakref.ref(held))

        def even(number):
            return odd(number - 1)

        def odd(number):
            return even(number - 1) if number else held / 2

        even(7)

    with pytest.raises(TypeError) as error:
        step()
    clear(error.value)
    gc.collect()
    assert gone[0]() is None


def test_cells_that_a_running_function_shares_keep_what_they_have():
    model = Kept()

    def step():
        raise ArithmeticError(str(model))

    clear(caught(step))
    assert isinstance(model, Kept)
    with pytest.raises(ArithmeticError):
        step()


def test_cells_of_a_function_that_lives_on_keep_what_they_have():
    hooks = []

    def fails():
        scale = Kept()
        hooks.append(lambda: scale)
        calls_inner(Kept(), hooks=[lambda _: scale])

    clear(caught(fails))
    assert isinstance(hooks[0](), Kept)


def test_a_decorated_function_can_be_called_again():
    def decorated(function):
        def wrapper():
            return function()

        return wrapper

    @decorated
    def fails():
        raise ArithmeticError

    for _ in range(2):
        clear(caught(fails))


def test_a_closure_that_another_function_has_too_keeps_what_it_has():
    copies = []

    def fails():
        scale = Kept()

        def inner():
            copies.append(FunctionType(inner.__code__, globals(), "copy", (), inner.__closure__))
            return scale / 2

        inner()

    with pytest.raises(TypeError) as error:
        fails()
    clear(error.value)
    contents = [cell.cell_contents for cell in copies[0].__closure__]
    assert any(isinstance(content, Kept) for content in contents)


@pytest.mark.parametrize("before", [True, False])
def test_nobody_looks_for_garbage_for_a_while_and_then_as_before(before):
    enabled = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with pytest.raises(LookupError), without_collections():
            assert not gc.isenabled()
            raise LookupError
        assert gc.isenabled() == before
    finally:
        (gc.enable if enabled else gc.disable)()
