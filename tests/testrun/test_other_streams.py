"""Memory that a GPU may keep until it is at work no more: a range of peaks, or a warning."""

import re

import pytest

HEAD = """
SMALL = []

def use_on_another_stream(count, then=lambda stream: None, mib=10):
    stream = torch.cuda.Stream()
    SMALL[:] = [torch.ones(1, device="cuda")]
    for _ in range(count):
        tensor = torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
        use(tensor, stream)
        del tensor
        then(stream)
    SMALL.clear()

def use(tensor, stream):
    tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        tensor.zero_()

def nothing(stream):
    pass

def wait_for_it(stream):
    stream.synchronize()

def wait_for_the_device(stream):
    torch.cuda.synchronize()

def wait_for_its_event(stream):
    stream.record_event().synchronize()

def wait_through_the_default_stream(stream):
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.current_stream().synchronize()

def wait_for_an_event_behind_it(stream):
    torch.cuda.current_stream().wait_event(stream.record_event())
    torch.cuda.current_stream().record_event().synchronize()

def read_behind_it(stream):
    with torch.cuda.stream(stream):
        SMALL[0].item()

def copy_behind_it(stream):
    with torch.cuda.stream(stream):
        torch.empty(1).copy_(SMALL[0], non_blocking=True)

def empty_the_cache(stream):
    torch.cuda.empty_cache()

def wait_for_the_driver(stream):
    import ctypes
    ctypes.CDLL(None).cuCtxSynchronize()

def ask(stream):
    assert stream.query() and stream.record_event().query()

def wait_for_a_third(stream):
    torch.cuda.Stream().synchronize()

def wait_for_an_earlier_event(stream):
    SMALL[1:] and SMALL[1].synchronize()
    SMALL[1:] = [torch.cuda.Stream().record_event()]

def let_it_wait_for_the_default_stream(stream):
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().synchronize()
"""
NOTE = re.compile(
    r"(allocated .* MiB, )?reserved [\d.]+ MiB to ([\d.]+) MiB: other streams may use tensors "
    r"longer \(record_stream\)"
)


def session_of(suite, call, mark=""):
    source = f"{HEAD}\n@pytest.mark.gpu_memory({mark})\ndef test_it():\n    {call}\n"
    return suite.run("-vv", source=source)


def most_of(session):
    """Return the largest peak reserved of the range, in MiB; peak allocated has no range.

    PyTorch counts a tensor as freed when the program drops it (test_caching_allocator.py).
    """
    found = NOTE.search(session.flat)
    assert found, session.out
    assert found[1] is None, session.out
    return float(found[2])


@pytest.mark.parametrize(
    "then",
    [
        *("nothing", "ask", "wait_for_a_third", "wait_for_an_earlier_event"),
        "let_it_wait_for_the_default_stream",
    ],
)
def test_without_a_wait_a_gpu_may_keep_them_all(suite, then):
    session = session_of(suite, f"use_on_another_stream(8, {then})")
    assert session.outcomes == {"passed": 1}
    assert session.table["test_it"]["allocated"] == "10.00"
    assert most_of(session) == 82.00


@pytest.mark.parametrize(
    "then",
    [
        *("wait_for_it", "wait_for_the_device", "wait_for_its_event", "wait_for_the_driver"),
        *("wait_through_the_default_stream", "wait_for_an_event_behind_it", "read_behind_it"),
        *("copy_behind_it", "empty_the_cache"),
    ],
)
def test_a_wait_ends_them(suite, then):
    session = session_of(suite, f"use_on_another_stream(8, {then})")
    assert session.outcomes == {"passed": 1}
    assert "other streams" not in session.out


def test_what_is_free_in_between_may_lead_to_more(suite):
    """A free block that the next request divides is too small for a later one."""
    body = """def mib(size): return torch.empty(size << 20, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    tensor = mib(100)
    use(tensor, stream)
    del tensor
    first = mib(30)  # in the tensor's memory, where that is free at once
    second = mib(60)  # in the tensor's memory, where that is free by now
    stream.synchronize()
    third = mib(100)"""
    source = f"{HEAD}\n@pytest.mark.gpu_memory\ndef test_it():\n    {body}\n"
    session = suite.run("-vv", source=source)
    assert session.table["test_it"]["reserved"] == "200.00"
    assert most_of(session) == 230.00  # 190 where the memory is free at the wait


def test_behind_no_work_an_event_is_over_with_the_one_before(suite):
    """The program has waited for all that the stream does: it uses no tensor any more."""
    body = """stream = torch.cuda.Stream()
    tensors = [torch.empty(10 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
    for tensor in tensors:
        use(tensor, stream)
    {wait}
    del tensor
    for _ in range(4):
        tensors.pop()
        SMALL.append(torch.empty(10 << 20, dtype=torch.uint8, device="cuda"))
    SMALL.clear()"""

    def session(wait):
        source = f"{HEAD}\n@pytest.mark.gpu_memory\ndef test_it():\n    {body.format(wait=wait)}\n"
        return suite.run("-vv", source=source)

    assert "other streams" not in session("stream.synchronize()").out
    assert "other streams" in session("pass").out


def test_a_wait_ends_those_of_before(suite):
    session = session_of(
        suite, "for _ in range(2): use_on_another_stream(3); torch.cuda.synchronize()"
    )
    assert most_of(session) == 32.00


GRAPHS = {
    "a graph that stays": """graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
    use_on_another_stream(8)""",
    "two graphs with one pool": """graph, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
    with torch.cuda.graph(second, pool=graph.pool()):
        kept = torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
    use_on_another_stream(8)""",
    "a graph that is gone": """graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
    del graph
    torch.cuda.empty_cache()
    use_on_another_stream(8)""",
    "a pool": """pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
    use_on_another_stream(8)""",
}


@pytest.mark.parametrize("body", GRAPHS.values(), ids=GRAPHS)
def test_memory_of_cuda_graphs_has_a_pool_of_its_own_at_the_upper_end_too(suite, body):
    source = f"{HEAD}\n@pytest.mark.gpu_memory\ndef test_it():\n    {body}\n"
    session = suite.run("-vv", source=source)
    reserved = float(session.table["test_it"]["reserved"])
    beside = 0 if "empty_cache" in body else reserved - 12
    assert most_of(session) == 82 + beside, session.out


NO_POOLS = f"""{HEAD}
import contextlib

@contextlib.contextmanager
def refused(pool, device=None):
    raise RuntimeError("torch.cuda.MemPool doesn't currently support expandable_segments.")
    yield

@pytest.fixture(autouse=True)
def no_pools(monkeypatch):
    monkeypatch.setattr(torch.cuda, "use_mem_pool", refused)

@pytest.mark.gpu_memory
def test_it():
"""


def test_where_there_are_no_pools_no_range_is_told(suite):
    """So it is with torch 2.7 in expandable segments."""
    session = suite.run("-vv", source=f"{NO_POOLS}    {GRAPHS['a graph that stays']}\n")
    assert session.outcomes == {"passed": 1}
    assert "this torch has no pools of memory in expandable segments: other" in session.flat


def test_limits_are_held_to_the_largest_figure(suite):
    call = "use_on_another_stream(8)"
    assert session_of(suite, call, "max_reserved_gib=0.1").outcomes == {"passed": 1}
    session = session_of(suite, call, "max_reserved_gib=0.05")
    assert session.outcomes == {"failed": 1}
    assert "peak reserved of 82.00 MiB at most is 30.80 MiB over" in session.flat


def test_before_it_gives_up_pytorch_waits_for_other_streams(suite):
    session = session_of(suite, "use_on_another_stream(8)", "max_gib=0.05")
    assert session.outcomes == {"passed": 1}
    assert most_of(session) == 42.00


REUSES = """stream = torch.cuda.Stream()
    SMALL[:] = [torch.ones(1, device="cuda")]
    with_room = torch.empty(20 << 20, dtype=torch.uint8, device="cuda")
    del with_room  # a segment of 20 MiB, which two tensors share
    kept = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    tensor = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    use(tensor, stream)
    del tensor
    torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    assert kept is not None
    SMALL.clear()"""


def test_a_limit_that_holds_by_an_event_has_a_note(suite):
    """pytorch#189504: after its wait PyTorch looks for no block in a segment that is in use."""
    said = "the limit holds because other streams were idle"
    tight = session_of(suite, REUSES, "max_gib=0.03")
    assert tight.outcomes == {"passed": 1}
    assert f"{said}: on a GPU, PyTorch may run out of memory at a request of 8.00 MiB" in tight.flat
    assert said not in session_of(suite, REUSES, "max_gib=1").flat
    # Here the wait frees a whole segment of 30 MiB too, whose room PyTorch asks for anew.
    more = REUSES.replace(
        "    SMALL[:] =",
        """    large = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
    use(large, stream)
    SMALL[:] =""",
    ).replace("del tensor", "del tensor, large")
    assert said not in session_of(suite, more, "max_gib=0.058").flat
    waits = REUSES.replace("del tensor\n", "del tensor\n    stream.synchronize()\n")
    assert said not in session_of(suite, waits, "max_gib=0.03").flat


def test_a_part_has_its_own_range(suite):
    body = """with gpu_memory.measure("part"):
        use_on_another_stream(2)
    torch.cuda.synchronize()
    use_on_another_stream(4)"""
    source = f"{HEAD}\n@pytest.mark.gpu_memory\ndef test_it(gpu_memory):\n    {body}\n"
    session = suite.run("-vv", source=source)
    assert [found[1] for found in NOTE.findall(session.flat)] == ["42.00", "22.00"]


def test_those_of_an_earlier_test_are_not_counted(suite):
    source = f"""{HEAD}
@pytest.mark.gpu_memory
def test_first():
    use_on_another_stream(8)

@pytest.mark.gpu_memory
def test_second():
    torch.ones(1, device="cuda")
"""
    session = suite.run("-vv", source=source)
    assert len(NOTE.findall(session.flat)) == 1


def test_memory_freed_on_its_own_stream_has_no_range(suite):
    call = """with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(4):
            torch.empty(10 << 20, dtype=torch.uint8, device="cuda")"""
    assert "other streams" not in session_of(suite, call).out


def test_a_range_of_some_bytes_has_no_note(suite):
    session = session_of(suite, "use_on_another_stream(8, wait_for_it, mib=0)")
    assert "other streams" not in session.out
    call = "use_on_another_stream(2, mib=0); SMALL[:] = [torch.ones(1, device='cuda')]"
    assert "other streams" not in session_of(suite, call).out


def test_two_streams_that_use_one_tensor_keep_it_until_both_are_awaited(suite):
    body = """first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for awaited in (first, second, second):
        tensor = torch.empty(10 << 20, dtype=torch.uint8, device="cuda")
        use(tensor, first)
        use(tensor, second)
        del tensor
        awaited.synchronize()"""
    source = f"{HEAD}\n@pytest.mark.gpu_memory\ndef test_it():\n    {body}\n"
    session = suite.run("-vv", source=source)
    assert most_of(session) == 20.00


def test_where_no_range_is_told_a_note_warns(suite):
    warning = "a GPU may keep them until the program has waited for these streams"
    assert warning in session_of(suite, "use_on_another_stream(8)", "max_leak_mib=100").flat
    assert warning not in session_of(suite, "use_on_another_stream(8)").flat
    awaited = "use_on_another_stream(8, wait_for_it)"
    assert warning not in session_of(suite, awaited, "max_leak_mib=100").flat


PINNED = "a GPU may keep this memory until the copies are done, so peak pinned"


def pinned_session(suite, count, *then, mark=""):
    """The session of a test that copies pinned tensors without waiting for the copies."""
    lines = [
        f"for _ in range({count}):",
        "    batch = torch.empty(4 << 20, dtype=torch.uint8, pin_memory=True)",
        '    on_gpu = batch.to("cuda", non_blocking=True)',
        "    del batch",
        *(f"    {line}" for line in then),
    ]
    body = "\n".join(f"    {line}" for line in lines)
    source = f"@pytest.mark.gpu_memory({mark})\ndef test_it():\n{body}\n"
    return suite.run("-vv", source=source)


def test_pinned_memory_that_is_used_again_before_its_copy_is_awaited_has_a_warning(suite):
    assert PINNED in pinned_session(suite, 2).flat


def test_that_warning_does_not_depend_on_nccl_in_an_earlier_test(suite):
    source = """
@pytest.mark.gpu_memory(devices=2)
def test_first():
    from torch.nn.parallel.comm import broadcast
    broadcast(torch.ones(4, device="cuda:0"), [0, 1])

@pytest.mark.gpu_memory
def test_second():
    for _ in range(2):
        batch = torch.empty(4 << 20, dtype=torch.uint8, pin_memory=True)
        on_gpu = batch.to("cuda", non_blocking=True)
        del batch
"""
    session = suite.run("-vv", source=source)
    assert session.outcomes == {"passed": 2}
    assert PINNED in session.flat


def test_pinned_memory_of_a_copy_that_was_awaited_has_none(suite):
    assert PINNED not in pinned_session(suite, 2, "torch.cuda.synchronize()").flat
    assert PINNED not in pinned_session(suite, 2, "on_gpu[0].item()").flat


def test_pinned_memory_that_is_not_used_again_has_none(suite):
    assert PINNED not in pinned_session(suite, 1).flat
