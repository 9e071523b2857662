"""torch.compile compiles on the virtual GPU, and in a recorded run, what it would without."""

import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.recorded_runs import recorded
from helpers.virtual_gpu import CARD_80GIB, virtual_card, virtual_device

import pytest_gpumem

PACKAGE = str(Path(pytest_gpumem.__file__).parent)


@contextmanager
def measured():
    """A recorded run with values."""
    with recorded():
        virtual_device().values.compute("auto")
        yield


@pytest.fixture(scope="module")
def programs():
    """The module of programs; torch may not be imported where it is."""
    virtual_device()
    from helpers import compiled_programs

    return compiled_programs


@pytest.fixture(autouse=True)
def no_warning_of_pytorchs():
    """A graph that is ended on purpose is warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_graphs_and_guards_are_those_without(programs):
    without = [programs.compiled_of(program, "cpu") for program in programs.PROGRAMS]
    before = programs.compiled_frames()
    with measured():
        within = [programs.compiled_of(program, "cpu") for program in programs.PROGRAMS]
    assert all(compiled.graphs and not compiled.error for compiled in without)
    assert within == without
    new = programs.compiled_frames() - before
    assert [frame for frame in new if frame[0].startswith(PACKAGE)] == []


def test_inductors_cache_is_asked_for_the_same_keys(programs):
    with virtual_card(CARD_80GIB):  # the card is in the keys
        without = programs.compiled_of(programs.module_with_hooks, "cpu", lowers=True)
    with measured():
        within = programs.compiled_of(programs.module_with_hooks, "cpu", lowers=True)
    assert len(without.keys) == 2  # of the forward pass and of the backward pass
    assert within == without


def test_a_compiled_step_of_several_shapes_compiles_no_frame_of_this_package(programs):
    """Operators between its graphs compute values; sizes are symbols from the second shape on."""
    before = programs.compiled_frames()
    with measured():
        compiled = programs.compiled_of(programs.optimizer_of_several_shapes, "cuda")
    assert compiled.graphs
    assert not compiled.error
    new = programs.compiled_frames() - before
    assert [frame for frame in new if frame[0].startswith(PACKAGE)] == []


def test_what_one_run_has_compiled_the_next_one_does_not_compile_again(programs):
    import torch

    torch._dynamo.reset()
    compiled, net = programs.Compiled(), programs.Net()
    forward = compiled.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step = compiled.compile(optimizer.step)
    for _ in range(3):
        with measured():
            forward(torch.ones(4, programs.WIDTH)).sum().backward()
            step()
    assert len(compiled.graphs) == 2


@pytest.mark.usefixtures("programs")
def test_an_error_of_the_compiler_shows_no_frame_of_this_package():
    import torch

    def broken(_graph, _inputs):
        raise ArithmeticError

    with measured():
        torch._dynamo.reset()
        for compiled in (
            torch.compile(print, backend="eager", fullgraph=True),
            torch.compile(lambda x: x + 1, backend=broken),
            torch.compile(lambda x: x.sum().tolist(), backend="eager", fullgraph=True),
        ):
            with pytest.raises(Exception, match=r".") as error:
                compiled(torch.ones(3, device="cuda"))
            text = "".join(traceback.format_exception(error.value))
            assert PACKAGE not in text
            error.value.__traceback__ = None
            del error
