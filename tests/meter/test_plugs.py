"""cuBLAS's workspaces that a live CUDA graph may write to are given to no other test.

Newer versions of PyTorch free a workspace after each call: here a block stands in for one.
"""

from __future__ import annotations

import gc

import pytest
from helpers.virtual_gpu import MIB, virtual_card

from pytest_gpumem.meter.allocator import settle
from pytest_gpumem.meter.plugs import WORKSPACES
from pytest_gpumem.recording.allocator_view import VIEW


@pytest.fixture
def workspace(monkeypatch):
    """A workspace of which the clearing frees every one, made by a call."""
    import torch

    made = []

    def make(mib=32):
        made.append(torch.cuda.caching_allocator_alloc(mib * MIB, 0))
        return 0, made[-1]

    def clear():
        while made:
            torch.cuda.caching_allocator_delete(made.pop())

    with virtual_card() as device:
        make.device = device
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear)
        yield make


def captured():
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(8, device="cuda").mul_(2)
    return graph


def test_a_live_graph_s_workspace_stays_allocated_and_others_are_freed(workspace):
    of_graph = workspace()
    graph = captured()
    of_test = workspace()
    for _ in range(2):
        settle(1)
        assert VIEW.live_blocks().get(of_graph) == 32 * MIB
        assert of_test not in VIEW.live_blocks()
        of_test = workspace()
    graph.reset()
    settle(1)
    assert of_graph not in VIEW.live_blocks()


def test_a_workspace_goes_with_its_graph_and_one_in_a_common_segment_is_kept(workspace):
    first, of_graph, _ = workspace(9), workspace(9), None
    graph = captured()
    settle(1)
    assert {first, of_graph} & VIEW.live_blocks().keys()
    del graph
    settle(1)
    assert not VIEW.live_blocks()


def test_garbage_that_would_be_collected_meanwhile_is_taken_for_no_workspace(
    workspace, monkeypatch
):
    import torch

    of_graph, graph = workspace(9), captured()
    cycle = [torch.empty(9 * MIB, dtype=torch.uint8, device="cuda")]
    assert cycle[0].data_ptr() - of_graph[1] == 9 * MIB  # they are neighbours
    cycle.append(cycle)
    clear = torch._C._cuda_clearCublasWorkspaces

    def clear_with_objects():
        clear()
        gc.set_threshold(100)
        return [[] for _ in range(2000)]

    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear_with_objects)
    thresholds = gc.get_threshold()
    del cycle
    try:
        gc.set_threshold(1_000_000)
        WORKSPACES.clear(range(1))
    finally:
        gc.set_threshold(*thresholds)
    assert VIEW.live_blocks()[of_graph] == 9 * MIB
    graph.reset()
    WORKSPACES.clear(range(1))


def test_a_recording_s_end_leaves_a_live_graph_s_workspace(workspace):
    import torch

    from pytest_gpumem.meter.meter import Meter

    device = workspace.device
    meter = Meter(device, device.open(None, 1), 1, record=True)
    meter.start()
    of_graph = workspace()
    graph = captured()
    assert meter.recording.stop() is not None
    assert VIEW.live_blocks().get(of_graph) == 32 * MIB
    meter.stop()
    graph.reset()
    torch._C._cuda_clearCublasWorkspaces()


GRAPHS = """
@pytest.fixture(scope="module")
def graph():
    a = torch.ones(512, 512, device="cuda")
    out, stream, graph = torch.empty_like(a), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        torch.mm(a, a, out=out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        torch.mm(a, a, out=out)
    return graph, a, out

@pytest.mark.gpu_memory
@pytest.mark.parametrize("n", range(3))
def test_replayed(graph, n):
    graph[0].replay()
    graph[1] @ graph[1]

@pytest.mark.gpu_memory
def test_other():
    a = torch.ones(512, 512, device="cuda")
    a @ a
"""


def test_figures_beside_a_wide_fixture_s_graph_are_those_alone(suite):
    figures = suite.run_warm("-v", "-p", "no:randomly", source=GRAPHS).figures()
    assert len({figures[f"test_replayed[{n}]"] for n in range(3)}) == 1
    for name in ("test_replayed[1]", "test_other"):
        alone = suite.run_warm("-v", "-k", name).figures()
        assert alone[name] == figures[name]
