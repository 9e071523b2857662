"""CUDA graphs and the user objects that they keep alive, by ctypes alone."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.torch_features import RELEASE, require_release
from helpers.virtual_gpu import child, private_library

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


class Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


def handle(library, function):
    result = ctypes.c_void_p()
    assert library.call(function, ctypes.byref(result)) == 0
    return result


def launch(library, stream):
    size = Dim3(1, 1, 1)
    assert library.call("cudaLaunchKernel", None, size, size, None, ctypes.c_size_t(0), stream) == 0


def last_nodes(library, stream):
    """The nodes behind which a stream's next one comes."""
    status, count = ctypes.c_int(), ctypes.c_size_t()
    nodes = ctypes.POINTER(ctypes.c_void_p)()
    args = (ctypes.byref(nodes), None, ctypes.byref(count))
    info = "cudaStreamGetCaptureInfo"
    assert library.call(info, stream, ctypes.byref(status), None, None, *args) == 0
    assert status.value == 1
    return nodes[: count.value]


def listed(library, function, *args, room=None):
    """Nodes as CUDA lists them; without an array their number, else those that have room there."""
    count = ctypes.c_size_t(room or 0)
    array = (ctypes.c_void_p * room)(*[7] * room) if room else None
    assert library.call(function, *args[:1], array, *args[1:], ctypes.byref(count)) == 0
    return (count.value, list(array)) if room else count.value


def node_type(library, node):
    kind = ctypes.c_int(-1)
    status = library.call("cudaGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
    return kind.value if status == 0 else status


def test_an_empty_node_is_told_from_others(library, graph):
    node = ctypes.c_void_p()
    none = ctypes.c_size_t(0)
    assert library.call("cudaGraphAddEmptyNode", ctypes.byref(node), graph, None, none) == 0
    assert node_type(library, node.value) == 5  # cudaGraphNodeTypeEmpty
    assert node_type(library, None) == INVALID_VALUE
    assert library.call("cudaGraphDestroy", graph) == 0


@pytest.mark.parametrize("cuda", [12080, 13020])
def test_a_captured_graph_has_its_nodes_and_edges(library, cuda):
    """Two streams: the second one's kernel runs behind the first one's, and is waited for."""
    library.set_versions(cuda, 91000)
    streams = [handle(library, "cudaStreamCreate") for _ in range(2)]
    event, graph = handle(library, "cudaEventCreate"), ctypes.c_void_p()
    launch(library, streams[0])
    assert library.call("cudaStreamBeginCapture", streams[0], 0) == 0
    assert last_nodes(library, streams[0]) == []
    launch(library, streams[0])
    (first,) = last_nodes(library, streams[0])
    assert library.call("cudaEventRecord", event, streams[0]) == 0
    assert library.call("cudaStreamWaitEvent", streams[1], event, 0) == 0
    assert last_nodes(library, streams[1]) == [first]
    launch(library, streams[1])
    (second,) = last_nodes(library, streams[1])
    launch(library, streams[0])
    (third,) = last_nodes(library, streams[0])
    assert library.call("cudaEventRecord", event, streams[1]) == 0
    assert library.call("cudaStreamWaitEvent", streams[0], event, 0) == 0
    assert last_nodes(library, streams[0]) == [third, second]
    launch(library, streams[0])
    (fourth,) = last_nodes(library, streams[0])
    assert library.call("cudaStreamEndCapture", streams[0], ctypes.byref(graph)) == 0
    data = (None,) if cuda >= 13000 else ()
    behind = {
        node: listed(library, "cudaGraphNodeGetDependencies", ctypes.c_void_p(node), *data, room=2)
        for node in (first, second, third, fourth)
    }
    assert behind == {
        first: (0, [None, None]),
        second: (1, [first, None]),
        third: (1, [first, None]),
        fourth: (2, [third, second]),
    }
    assert {node_type(library, node) for node in behind} == {0}  # cudaGraphNodeTypeKernel
    assert listed(library, "cudaGraphGetNodes", graph) == 4
    all_nodes = [first, second, third, fourth]
    assert listed(library, "cudaGraphGetNodes", graph, room=6) == (4, [*all_nodes, None, None])
    assert listed(library, "cudaGraphGetNodes", graph, room=2) == (2, [first, second])
    assert library.call("cudaGraphDestroy", graph) == 0


def test_a_program_may_set_behind_which_nodes_the_next_one_comes(library):
    library.set_versions(13020, 91000)
    stream, graph = handle(library, "cudaStreamCreate"), ctypes.c_void_p()
    assert library.call("cudaStreamBeginCapture", stream, 0) == 0
    launch(library, stream)
    (first,) = last_nodes(library, stream)
    nodes = (ctypes.c_void_p * 1)(first)
    update = "cudaStreamUpdateCaptureDependencies"
    assert library.call(update, stream, None, None, ctypes.c_size_t(0), 1) == 0
    assert last_nodes(library, stream) == []
    launch(library, stream)
    (second,) = last_nodes(library, stream)
    assert library.call(update, stream, nodes, None, ctypes.c_size_t(1), 0) == 0
    assert last_nodes(library, stream) == [second, first]
    assert library.call("cudaStreamEndCapture", stream, ctypes.byref(graph)) == 0
    assert library.call(update, stream, nodes, None, ctypes.c_size_t(1), 0) == 401  # no capture
    assert library.call("cudaGraphDestroy", graph) == 0


UNSUPPORTED, INVALIDATED = 900, 901  # cudaErrorStreamCaptureUnsupported, ...Invalidated


@pytest.mark.parametrize("question", ["cudaStreamSynchronize", "cudaStreamQuery"])
def test_a_capture_whose_end_is_asked_for_is_invalid(library, question):
    """CUDA Programming Guide, "Prohibited and Unhandled Operations"."""
    streams = [handle(library, "cudaStreamCreate") for _ in range(3)]
    event, graph, status = handle(library, "cudaEventCreate"), ctypes.c_void_p(7), ctypes.c_int()

    def statuses():
        for stream in streams:
            assert library.call("cudaStreamIsCapturing", stream, ctypes.byref(status)) == 0
            yield status.value

    assert library.call("cudaStreamBeginCapture", streams[0], 0) == 0
    assert library.call("cudaEventRecord", event, streams[0]) == 0
    assert library.call("cudaStreamWaitEvent", streams[1], event, 0) == 0
    assert library.call(question, streams[2]) == 0  # another stream's
    assert list(statuses()) == [1, 1, 0]
    assert library.call(question, streams[1]) == UNSUPPORTED
    assert library.call("cudaStreamWaitEvent", streams[2], event, 0) == 0
    assert list(statuses()) == [2, 2, 2]
    assert library.call(question, streams[0]) == INVALIDATED
    assert library.call("cudaStreamEndCapture", streams[0], ctypes.byref(graph)) == INVALIDATED
    assert graph.value is None
    assert list(statuses()) == [0, 0, 0]
    assert library.call("cudaStreamBeginCapture", streams[1], 0) == 0
    assert library.call("cudaStreamEndCapture", streams[1], ctypes.byref(graph)) == 0
    assert library.call("cudaGraphDestroy", graph) == 0


GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # cudaStreamCaptureMode
UNMATCHED, CAPTURED_EVENT, WRONG_THREAD = 903, 907, 908


def in_a_thread(function):
    """What a function returns in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def capture_status(library, stream):
    status = ctypes.c_int()
    assert library.call("cudaStreamIsCapturing", stream, ctypes.byref(status)) == 0
    return status.value


def end_capture(library, stream):
    """The status of the end of a capture, whose graph is destroyed."""
    graph = ctypes.c_void_p()
    status = library.call("cudaStreamEndCapture", stream, ctypes.byref(graph))
    if graph:
        assert library.call("cudaGraphDestroy", graph) == 0
    return status


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("end", ["cudaDeviceSynchronize", "cuCtxSynchronize"])
def test_the_end_of_all_work_of_a_device_is_none_of_a_capture(library, end, mode):
    """CUDA Programming Guide, "Prohibited and Unhandled Operations": of no mode of a capture."""
    captured, other = (handle(library, "cudaStreamCreate") for _ in range(2))
    assert library.call("cudaStreamBeginCapture", captured, mode) == 0
    assert in_a_thread(lambda: library.call(end)) == UNSUPPORTED
    assert (capture_status(library, captured), capture_status(library, other)) == (2, 0)
    assert library.call(end) == UNSUPPORTED
    assert end_capture(library, captured) == INVALIDATED
    assert library.call(end) == 0


def test_the_end_of_another_device_s_work_may_be_awaited(tmp_path):
    library = private_library(tmp_path, count=2)
    stream = handle(library, "cudaStreamCreate")
    assert library.call("cudaStreamBeginCapture", stream, GLOBAL) == 0
    assert library.call("cudaSetDevice", 1) == 0
    assert library.call("cudaDeviceSynchronize") == 0
    assert library.call("cudaSetDevice", 0) == 0
    assert end_capture(library, stream) == 0


@pytest.mark.parametrize("question", ["cudaEventQuery", "cudaEventSynchronize"])
def test_a_captured_event_is_not_asked_for(library, question):
    stream, event = handle(library, "cudaStreamCreate"), handle(library, "cudaEventCreate")
    assert library.call("cudaStreamBeginCapture", stream, RELAXED) == 0
    assert library.call("cudaEventRecord", event, stream) == 0
    assert library.call(question, event) == CAPTURED_EVENT
    assert end_capture(library, stream) == INVALIDATED
    assert library.call(question, event) == CAPTURED_EVENT
    assert library.call("cudaEventRecord", event, stream) == 0
    assert library.call(question, event) == 0


@pytest.mark.parametrize("allocation", ["cudaMalloc", "cuMemAlloc_v2"])
@pytest.mark.parametrize(
    ("modes", "allowed", "allowed_in_another"),
    [
        ((GLOBAL, GLOBAL), False, False),
        ((GLOBAL, THREAD_LOCAL), False, True),
        ((GLOBAL, RELAXED), True, True),
        ((THREAD_LOCAL, GLOBAL), False, True),
        ((THREAD_LOCAL, THREAD_LOCAL), False, True),
        ((THREAD_LOCAL, RELAXED), True, True),
        ((RELAXED, GLOBAL), True, True),
        ((RELAXED, THREAD_LOCAL), True, True),
    ],
)
def test_memory_is_allocated_beside_a_capture_as_the_modes_allow(
    library, allocation, modes, allowed, allowed_in_another
):
    """CUDA Runtime API, "cudaThreadExchangeStreamCaptureMode": of a capture and of a thread."""
    (mode, thread_mode), stream = modes, handle(library, "cudaStreamCreate")

    def status():
        address, previous = ctypes.c_void_p(), ctypes.c_int(thread_mode)
        exchange = "cudaThreadExchangeStreamCaptureMode"
        assert library.call(exchange, ctypes.byref(previous)) == 0
        found = library.call(allocation, ctypes.byref(address), ctypes.c_size_t(512))
        assert library.call(exchange, ctypes.byref(previous)) == 0
        assert previous.value == thread_mode
        assert bool(address) == (found == 0)
        return found

    for call, is_allowed in ((status, allowed), (lambda: in_a_thread(status), allowed_in_another)):
        assert library.call("cudaStreamBeginCapture", stream, mode) == 0
        assert call() == (0 if is_allowed else UNSUPPORTED)
        assert end_capture(library, stream) == (0 if is_allowed else INVALIDATED)
    assert status() == 0


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_a_capture_ends_where_it_began(library, mode):
    streams, event = (
        [handle(library, "cudaStreamCreate") for _ in range(2)],
        handle(library, "cudaEventCreate"),
    )
    assert library.call("cudaStreamBeginCapture", streams[0], mode) == 0
    assert library.call("cudaEventRecord", event, streams[0]) == 0
    assert library.call("cudaStreamWaitEvent", streams[1], event, 0) == 0
    assert end_capture(library, streams[1]) == UNMATCHED
    in_another = in_a_thread(lambda: end_capture(library, streams[0]))
    assert in_another == (0 if mode == RELAXED else WRONG_THREAD)
    assert end_capture(library, streams[0]) == (401 if mode == RELAXED else 0)


def test_other_modes_are_refused(library):
    stream, mode = handle(library, "cudaStreamCreate"), ctypes.c_int(3)
    assert library.call("cudaStreamBeginCapture", stream, mode) == INVALID_VALUE
    exchange = library.call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert exchange == INVALID_VALUE


EXTERNAL = 1  # cudaEventRecordExternal, cudaEventWaitExternal
WAIT_NODE, RECORD_NODE = 6, 7  # cudaGraphNodeTypeWaitEvent, cudaGraphNodeTypeEventRecord


@pytest.fixture
def timed(library):
    """A stream, and a graph that records two events external to it, and waits for the first."""
    stream, graph = handle(library, "cudaStreamCreate"), ctypes.c_void_p()
    start, end = (handle(library, "cudaEventCreate") for _ in range(2))
    assert library.call("cudaStreamBeginCapture", stream, 0) == 0
    assert library.call("cudaEventRecordWithFlags", start, stream, EXTERNAL) == 0
    launch(library, stream)
    assert library.call("cudaStreamWaitEvent", stream, start, EXTERNAL) == 0
    assert library.call("cudaEventRecordWithFlags", end, stream, EXTERNAL) == 0
    nodes = last_nodes(library, stream)
    assert library.call("cudaEventQuery", start) == 0  # no work yet: it was not recorded
    assert library.call("cudaStreamEndCapture", stream, ctypes.byref(graph)) == 0
    assert [node_type(library, node) for node in nodes] == [RECORD_NODE]
    return stream, graph, start, end


def passed(library, start, end):
    """The milliseconds between two events, or the status."""
    time = ctypes.c_float(-1)
    return library.call("cudaEventElapsedTime", ctypes.byref(time), start, end) or time.value


def executable_of(library, graph, flags=0):
    """The executable graph; the graph is destroyed, as PyTorch does."""
    executable = ctypes.c_void_p()
    wanted = ctypes.c_ulonglong(flags)
    assert library.call("cudaGraphInstantiate", ctypes.byref(executable), graph, wanted) == 0
    assert library.call("cudaGraphDestroy", graph) == 0
    return executable


def test_events_external_to_a_graph_are_nodes_of_it(library, timed):
    _, graph, _, _ = timed
    _, nodes = listed(library, "cudaGraphGetNodes", graph, room=4)
    assert [node_type(library, node) for node in nodes] == [RECORD_NODE, 0, WAIT_NODE, RECORD_NODE]
    assert library.call("cudaGraphDestroy", graph) == 0


def test_events_external_to_a_graph_are_recorded_as_it_is_captured(library, timed):
    stream, graph, start, end = timed
    executable = executable_of(library, graph)
    assert library.call("cudaGraphLaunch", executable, stream) == 0
    assert library.call("cudaEventSynchronize", end) == 0
    assert passed(library, start, end) > 0


def test_a_graph_is_launched_whose_external_events_are_destroyed(library, timed):
    stream, graph, start, end = timed
    executable = executable_of(library, graph)
    for event in (start, end):
        assert library.call("cudaEventDestroy", event) == 0
    assert library.call("cudaGraphLaunch", executable, stream) == 0
    assert library.call("cudaGraphExecDestroy", executable) == 0


def test_events_are_external_to_a_graph_only_while_one_is_captured(library):
    stream, event = handle(library, "cudaStreamCreate"), handle(library, "cudaEventCreate")
    record = "cudaEventRecordWithFlags"
    assert library.call(record, event, stream, EXTERNAL) == INVALID_VALUE
    assert library.call("cudaStreamWaitEvent", stream, event, EXTERNAL) == INVALID_VALUE
    assert library.call(record, event, stream, 0) == 0
    assert library.call(record, event, stream, 2) == INVALID_VALUE


def test_an_executable_graph_tells_its_flags(library, graph):
    flags = ctypes.c_ulonglong(7)
    executable = executable_of(library, graph, flags=2 | 8)  # upload, and by the nodes' priority
    assert library.call("cudaGraphExecGetFlags", executable, ctypes.byref(flags)) == 0
    assert flags.value == 8
    assert library.call("cudaGraphExecGetFlags", None, ctypes.byref(flags)) == INVALID_VALUE


@pytest.mark.parametrize("call", ["(x + 1).item", "torch.cuda.synchronize"])
def test_a_capture_that_is_waited_for_ends_with_an_error(call):
    text = child(
        f"""
        import torch

        graph, x = torch.cuda.CUDAGraph(), torch.ones(1, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            for call in ({call}, graph.capture_end):
                try:
                    print(call())
                except RuntimeError as error:
                    print(str(error).splitlines()[0])
        print(torch.ones(2, device="cuda").sum().shape)
        """,
        warm=True,
    )
    assert text.splitlines() == [
        "CUDA error: operation not permitted when stream is capturing",
        "CUDA error: the stream's capture was invalidated",
        "torch.Size([])",
    ]


def test_the_time_of_a_graph_is_measured_between_external_events():
    require_release(2, 8, "torch.cuda.Event(external=True)")
    text = child(
        """
        import torch

        x = torch.zeros(1 << 20, device="cuda")
        start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            start.record()
            start.wait()
            y = x + 1
            end.record()
        print(end.query())
        graph.replay()
        end.synchronize()
        print(start.elapsed_time(end) > 0)
        """,
        warm=True,
    )
    assert text.split() == ["True", "True"]


REUSE = """
import torch

def stages(joined):
    side, stream = torch.cuda.Stream(), torch.cuda.current_stream()
    for _ in range(4):
        x = torch.empty(64 << 20, dtype=torch.uint8, device="cuda").zero_()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            x.add_(1)
        x.record_stream(side)
        if joined:
            stream.wait_stream(side)
        del x
    stream.wait_stream(side)

for joined in (False, True):
    graph = torch.cuda.CUDAGraph()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.cuda.graph(graph):
        stages(joined)
    # Not of the small pool: torch 2.13 makes the generator's numbers there for each capture.
    print(torch.cuda.memory_stats()["reserved_bytes.large_pool.peak"] >> 20)
    del graph
"""


@pytest.mark.parametrize(("setting", "reserved"), [("False", "256"), ("True", "64")])
def test_blocks_of_a_graph_that_other_streams_used_are_reused_where_its_edges_say_so(
    setting, reserved
):
    """The allocator's own rule: all later work has to come behind the last use."""
    require_release(2, 9, "the setting graph_capture_record_stream_reuse")
    if setting == "True" and RELEASE[:2] == (2, 9):
        reserved = "128"  # its own rule, by empty nodes that mark each free, finds half of them
    settings = f"graph_capture_record_stream_reuse:{setting}"
    assert child(REUSE, warm=True, PYTORCH_CUDA_ALLOC_CONF=settings).split() == ["256", reserved]
