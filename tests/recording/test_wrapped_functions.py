"""Functions whose code is replaced, so that they stay the objects that they are."""

import inspect
from collections import OrderedDict
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from pytest_gpumem.recording.wrapped_functions import WrappedFunctions


def plain(first, /, second, third=3, *rest, named, other=5, **more):
    """A function with all kinds of parameters."""
    return first, second, third, rest, named, other, more


def made():
    kept = []

    def closing(value=1):
        kept.append(value)
        return len(kept)

    return closing


def doubling(function):
    def call(*args, **kwargs):
        return function(*args, **kwargs), function(*args, **kwargs)

    return call


@pytest.fixture
def wrapped():
    return WrappedFunctions()


def test_a_wrapped_function_takes_the_same_arguments_and_has_the_same_signature(wrapped):
    signature, code = inspect.signature(plain), plain.__code__
    expected = 1, 2, 3, (), 4, 5, {}
    with ExitStack() as stack:
        wrapped.wrap(stack, {plain: doubling})
        assert plain(1, 2, named=4) == (expected, expected)
        assert plain(1, 2, 3, 8, 9, named=4, x=1)[0] == (1, 2, 3, (8, 9), 4, 5, {"x": 1})
        assert inspect.signature(plain) == signature
        assert plain.__code__.co_filename == code.co_filename
        with wrapped.hidden(), wrapped.hidden():
            assert plain(1, 2, named=4) == expected
            assert plain.__code__ is code
        assert plain(1, 2, named=4) == (expected, expected)
    assert plain.__code__ is code
    assert plain(1, 2, named=4) == expected


def test_a_function_with_a_closure_keeps_it(wrapped):
    closing = made()
    with ExitStack() as stack:
        wrapped.wrap(stack, {closing: doubling})
        assert closing() == (1, 2)
    assert closing() == 3


def test_wrappers_are_removed_in_any_order(wrapped):
    closing, first, second = made(), ExitStack(), ExitStack()
    wrapped.wrap(first, {closing: doubling})
    wrapped.wrap(second, {closing: lambda function: lambda *args: [function(*args)]})
    assert closing() == [(1, 2)]
    first.close()
    assert closing() == [3]
    with wrapped.hidden():
        second.close()
        assert closing() == 4
    assert closing() == 5


def test_code_that_guards_compare_is_the_same_in_every_run(wrapped):
    closing, codes = made(), set()
    for _ in range(2):
        with ExitStack() as stack:
            wrapped.wrap(stack, {closing: doubling}, traced=False)
            with wrapped.hidden():
                assert len(closing()) == 2
                codes.add(closing.__code__)
            codes.add(closing.__code__)
    assert len(codes) == 1
    assert closing() == 5


def test_hidden_hooks_come_back_in_their_order(wrapped):
    hooks = OrderedDict({1: "theirs", 2: "ours", 3: "theirs", 4: "ours too"})
    removed = []

    def handle(key):
        return SimpleNamespace(
            hooks_dict_ref=lambda: hooks, id=key, remove=lambda: removed.append(hooks.pop(key))
        )

    with ExitStack() as stack:
        wrapped.hook(stack, handle(2))
        wrapped.hook(stack, handle(4))
        with wrapped.hidden():
            assert list(hooks) == [1, 3]
            del hooks[3]
            hooks[5] = "new"
        assert list(hooks) == [1, 2, 4, 5]
    assert removed == ["ours too", "ours"]
