"""Clearing an error's frames: what they keep alive goes, what is to go on goes on."""

import asyncio
import gc
import weakref

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
