"""The native library alone: which bytes of device memory are known, and when they are no more."""

import ctypes
import random

import pytest
from helpers.virtual_gpu import MIB, private_library, small_card

KEPT = 64 << 10
"""bytes: larger copies are not kept"""
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
INT32, FLOAT16, FLOAT32, FLOAT64 = 2, 6, 7, 8
SUM, PROD, MAX, MIN, AVG = range(5)


@pytest.fixture
def library(tmp_path):
    return private_library(tmp_path, small_card(256 * MIB), count=2)


@pytest.fixture
def block(library):
    return library.malloc(8 * MIB)[1]


def pointer(address):
    return ctypes.c_void_p(address)


def length(size):
    return ctypes.c_size_t(size)


def put(library, address, data, stream=None):
    assert (
        library.call(
            "cudaMemcpyAsync", pointer(address), data, length(len(data)), TO_DEVICE, stream
        )
        == 0
    )


def get(library, address, size):
    """What is read back there; None: nobody knows, zeros came, and the copy was counted."""
    before = library.counters().readbacks
    out = ctypes.create_string_buffer(b"\xff" * size, size)
    assert library.call("cudaMemcpy", out, pointer(address), length(size), TO_HOST) == 0
    if library.counters().readbacks == before:
        return out.raw
    assert out.raw == bytes(size)
    return None


def test_what_was_copied_there_is_read_back(library, block):
    put(library, block, b"twelve bytes")
    assert get(library, block, 12) == b"twelve bytes"
    assert get(library, block + 7, 5) == b"bytes"
    assert get(library, block, 13) is None
    assert get(library, block + 512, 1) is None


@pytest.mark.parametrize(("size", "known"), [(KEPT, True), (KEPT + 1, False)])
def test_large_copies_are_not_kept(library, block, size, known):
    put(library, block, b"x" * size)
    assert (get(library, block, 8) is not None) == known


def test_a_large_copy_makes_what_it_overwrites_unknown_and_leaves_the_rest(library, block):
    put(library, block, b"before")
    put(library, block + MIB, b"inside")
    put(library, block + 64, b"x" * 2 * MIB)
    assert get(library, block, 6) == b"before"
    assert get(library, block + MIB, 6) is None


LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaGraphLaunch",
    "cublasSgemm_v2",
    "cublasGemmEx",
    "cublasLtMatmul",
    "cudnnBackendExecute",
    "cudnnBatchNormalizationForwardTrainingEx",
    "cudnnRNNForward",
)


@pytest.mark.parametrize("function", LAUNCHES)
def test_a_kernel_may_have_written_anywhere(library, block, function):
    put(library, block, b"known")
    zeros = [ctypes.c_void_p()] * 8
    library.call(function, *zeros)
    assert get(library, block, 5) is None


def test_a_kernel_of_another_device_as_well(library, block):
    put(library, block, b"known")
    assert library.call("cudaSetDevice", 1) == 0
    library.call("cudaLaunchKernel", *[ctypes.c_void_p()] * 8)
    assert get(library, block, 5) is None


def test_a_freed_block_is_forgotten(library, block):
    put(library, block, b"known")
    assert library.free(block) == 0
    status, again = library.malloc(8 * MIB)
    assert (status, again) == (0, block)
    assert get(library, block, 5) is None


def test_hiding_the_devices_forgets_all(library, block):
    put(library, block, b"known")
    library.show(0)
    library.show(2)
    assert get(library, block, 5) is None


def test_copies_between_devices_carry_what_is_known(library, block):
    put(library, block, b"known")
    assert library.call("cudaSetDevice", 1) == 0
    _, other = library.malloc(MIB)
    args = (pointer(other), 1, pointer(block), 0, length(5), None)
    assert library.call("cudaMemcpyPeerAsync", *args) == 0
    assert get(library, other, 5) == b"known"
    args = (pointer(other), 1, pointer(block + 100), 0, length(5), None)
    assert library.call("cudaMemcpyPeerAsync", *args) == 0
    assert get(library, other, 5) is None


def test_what_memset_writes_is_known(library, block):
    put(library, block, b"0123456789")
    assert library.call("cudaMemset", pointer(block + 2), 65, length(3)) == 0
    assert get(library, block, 10) == b"01AAA56789"
    assert library.call("cudaMemset", pointer(block), 0, length(KEPT + 1)) == 0
    assert get(library, block, 10) is None


def test_a_captured_copy_writes_nothing_yet(library, block):
    put(library, block, b"known")
    stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
    assert library.call("cudaStreamCreate", ctypes.byref(stream)) == 0
    assert library.call("cudaStreamBeginCapture", stream, 0) == 0
    put(library, block, b"later", stream)
    assert library.call("cudaStreamEndCapture", stream, ctypes.byref(graph)) == 0
    assert get(library, block, 5) == b"known"
    library.call("cudaGraphLaunch", graph, stream)
    assert get(library, block, 5) is None


def test_it_knows_what_a_plain_array_of_bytes_would(library, block):
    """Random writes, copies and reads in 4 KiB, against a list of bytes (None: unknown)."""
    chance, room = random.Random(0), 4096
    model = [None] * room
    for _ in range(20_000):
        start, size = chance.randrange(room), chance.choice([1, 3, 8, 60, 700])
        size = min(size, room - start)
        match chance.randrange(5):
            case 0:
                data = chance.randbytes(size)
                put(library, block + start, data)
                model[start : start + size] = data
            case 1:
                source = chance.randrange(room - size + 1)
                args = (pointer(block + start), pointer(block + source), length(size))
                assert library.call("cudaMemcpy", *args, ON_DEVICE) == 0
                known = model[source : source + size]
                model[start : start + size] = [None] * size if None in known else known
            case 2:
                assert library.call("cuMemsetD32Async", pointer(block + start), 1, length(1)) == 0
                model[start : start + 4] = [None] * len(model[start : start + 4])
            case _:
                found, known = get(library, block + start, size), model[start : start + size]
                assert found == (None if None in known else bytes(known))


# -- collectives: every rank is taken to hold what this one holds --


def communicator(library, ranks, rank):
    made = ctypes.c_void_p()
    unique = (ctypes.c_char * 128)()

    class UniqueId(ctypes.Structure):
        _fields_ = (("bytes", ctypes.c_char * 128),)

    identity = UniqueId.from_buffer_copy(unique)
    assert library.call("ncclCommInitRank", ctypes.byref(made), ranks, identity, rank) == 0
    return made


def test_a_gathered_value_is_every_ranks(library, block):
    group = communicator(library, 4, 1)
    put(library, block, b"abc")
    args = (pointer(block), pointer(block + 512), length(3), 1, group, None)
    assert library.call("ncclAllGather", *args) == 0
    assert get(library, block + 512, 12) == b"abc" * 4
    assert get(library, block + 512 + 12, 1) is None


def test_a_broadcast_value_is_kept_by_root_and_receiver(library, block):
    for rank in (0, 1):
        group = communicator(library, 4, rank)
        put(library, block, b"abc")
        args = (pointer(block), pointer(block), length(3), 1, 0, group, None)
        assert library.call("ncclBroadcast", *args) == 0
        assert get(library, block, 3) == b"abc"
    args = (pointer(block), pointer(block + 512), length(3), 1, 0, group, None)
    assert library.call("ncclBroadcast", *args) == 0  # a receiver that had nothing of its own
    assert get(library, block + 512, 3) is None


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ((ctypes.c_int32, INT32, SUM, 3), 12),
        ((ctypes.c_int32, INT32, SUM, -3), -12),
        ((ctypes.c_int32, INT32, PROD, -3), 81),
        ((ctypes.c_int32, INT32, MAX, 3), 3),
        ((ctypes.c_int32, INT32, AVG, 3), None),
        ((ctypes.c_float, FLOAT32, SUM, 2.0), 8.0),
        ((ctypes.c_float, FLOAT32, SUM, 0.1), None),  # depends on the order
        ((ctypes.c_float, FLOAT32, MIN, 0.1), ctypes.c_float(0.1).value),
        ((ctypes.c_float, FLOAT32, SUM, 1e30), None),
        ((ctypes.c_float, FLOAT32, SUM, float("nan")), None),
        ((ctypes.c_double, FLOAT64, SUM, -5.0), -20.0),
        ((ctypes.c_uint16, FLOAT16, SUM, 7), None),
        ((ctypes.c_uint16, FLOAT16, MAX, 7), 7),
    ],
)
def test_a_reduced_value_is_known_where_it_is_certain(library, block, case, expected):
    kind, code, operation, value = case
    group = communicator(library, 4, 2)
    put(library, block, bytes(kind(value)))
    args = (pointer(block), pointer(block), length(1), code, operation, group, None)
    assert library.call("ncclAllReduce", *args) == 0
    found = get(library, block, ctypes.sizeof(kind))
    assert (found and kind.from_buffer_copy(found).value) == expected


def test_what_another_rank_sends_is_not_known(library, block):
    group = communicator(library, 4, 2)
    put(library, block, b"abcd")
    assert library.call("ncclSend", pointer(block), length(4), 1, 1, group, None) == 0
    assert get(library, block, 4) == b"abcd"
    assert library.call("ncclRecv", pointer(block), length(2), 1, 1, group, None) == 0
    assert get(library, block, 2) is None
    assert get(library, block + 2, 2) == b"cd"


def test_ranks_that_are_devices_of_this_process_may_hold_different_values(library, block):
    groups = (ctypes.c_void_p * 2)()
    assert library.call("ncclCommInitAll", groups, 2, None) == 0
    put(library, block, b"abcd")
    args = (pointer(block), pointer(block), length(4), 1, 0, ctypes.c_void_p(groups[1]), None)
    assert library.call("ncclBroadcast", *args) == 0
    assert get(library, block, 4) is None
