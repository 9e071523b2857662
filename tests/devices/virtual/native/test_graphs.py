"""CUDA graphs and the user objects that they keep alive, by ctypes alone."""

import ctypes

import pytest
from helpers.virtual_gpu import private_library

INVALID_VALUE = 1
NO_SYNC, MOVE = 1, 1
DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture
def library(tmp_path):
    return private_library(tmp_path)


@pytest.fixture
def graph(library):
    """An empty graph, captured from a stream."""
    stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
    assert library.call("cudaStreamCreate", ctypes.byref(stream)) == 0
    assert library.call("cudaStreamBeginCapture", stream, 0) == 0
    assert library.call("cudaStreamEndCapture", stream, ctypes.byref(graph)) == 0
    return graph


class UserObject:
    """An object that notes when its destructor is called, and with what."""

    def __init__(self, library, references=1, flags=NO_SYNC):
        self.destroyed = []
        self.destructor = DESTRUCTOR(self.destroyed.append)
        self.handle = ctypes.c_void_p()
        args = ctypes.c_void_p(7), self.destructor, references, flags
        self.status = library.call("cudaUserObjectCreate", ctypes.byref(self.handle), *args)


def test_the_last_reference_destroys_it(library):
    thing = UserObject(library, references=2)
    assert library.call("cudaUserObjectRetain", thing.handle, 3) == 0
    assert library.call("cudaUserObjectRelease", thing.handle, 4) == 0
    assert thing.destroyed == []
    assert library.call("cudaUserObjectRelease", thing.handle, 2) == INVALID_VALUE
    assert library.call("cudaUserObjectRelease", thing.handle, 1) == 0
    assert thing.destroyed == [7]


@pytest.mark.parametrize(("references", "flags"), [(0, NO_SYNC), (1, 0), (1, 2)])
def test_wrong_arguments_are_refused(library, references, flags):
    assert UserObject(library, references, flags).status == INVALID_VALUE


def test_a_graph_that_was_given_the_reference_keeps_it_alive(library, graph):
    """As PyTorch does: moved to the graph, which is destroyed when it has been instantiated."""
    thing, executable = UserObject(library), ctypes.c_void_p()
    assert library.call("cudaGraphRetainUserObject", graph, thing.handle, 1, MOVE) == 0
    assert library.call("cudaGraphInstantiate", ctypes.byref(executable), graph, 0) == 0
    assert library.call("cudaGraphDestroy", graph) == 0
    assert thing.destroyed == []
    assert library.call("cudaGraphLaunch", executable, None) == 0
    assert library.call("cudaGraphExecDestroy", executable) == 0
    assert thing.destroyed == [7]


def test_a_graph_takes_references_of_its_own_and_gives_them_back(library, graph):
    thing = UserObject(library)
    for _ in range(2):
        assert library.call("cudaGraphRetainUserObject", graph, thing.handle, 2, 0) == 0
    assert library.call("cudaUserObjectRelease", thing.handle, 1) == 0
    assert library.call("cudaGraphReleaseUserObject", graph, thing.handle, 3) == 0
    assert thing.destroyed == []
    assert library.call("cudaGraphReleaseUserObject", graph, thing.handle, 1) == 0
    assert thing.destroyed == [7]
    assert library.call("cudaGraphReleaseUserObject", graph, thing.handle, 1) == INVALID_VALUE
    assert library.call("cudaGraphDestroy", graph) == 0
