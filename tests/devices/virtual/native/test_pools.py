"""cudaMallocAsync's pools and memory shared between processes, by ctypes alone."""

import ctypes
import multiprocessing
from itertools import pairwise

import pytest
from helpers.shared_memory import (
    Handle,
    exchange,
    handle_of,
    in_another_process,
    open_handle,
    read,
    write,
)
from helpers.virtual_gpu import MIB, private_library, small_card

INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE, INVALID_DEVICE, NOT_SUPPORTED = 1, 2, 100, 101, 801
UNINITIALIZED = 201
THRESHOLD, RESERVED, RESERVED_HIGH, USED, USED_HIGH = 4, 5, 6, 7, 8  # cudaMemPoolAttr
KEEP_ALL = (1 << 64) - 1
NULL = ctypes.c_void_p()


@pytest.fixture
def library(tmp_path):
    return private_library(tmp_path, small_card(100 * MIB), count=2)


@pytest.fixture
def pool(library):
    """Device 0's pool, set up as PyTorch does."""
    handle = ctypes.c_void_p()
    assert library.call("cudaDeviceGetDefaultMemPool", ctypes.byref(handle), 0) == 0
    set_(library, handle, THRESHOLD, KEEP_ALL)
    return handle


def set_(library, pool, attribute, value):
    raw = ctypes.c_uint64(value)
    assert library.call("cudaMemPoolSetAttribute", pool, attribute, ctypes.byref(raw)) == 0


def get(library, pool, attribute):
    raw = ctypes.c_uint64(77)
    assert library.call("cudaMemPoolGetAttribute", pool, attribute, ctypes.byref(raw)) == 0
    return raw.value


def take(library, size):
    address = ctypes.c_void_p(1)
    size = ctypes.c_size_t(size)
    return library.call("cudaMallocAsync", ctypes.byref(address), size, NULL), address.value


def give(library, address):
    return library.call("cudaFreeAsync", ctypes.c_void_p(address), NULL)


def figures(library, pool):
    return [get(library, pool, which) for which in (USED, USED_HIGH, RESERVED, RESERVED_HIGH)]


def test_a_pool_keeps_what_was_freed_until_it_is_trimmed(library, pool):
    _, first = take(library, 33 * MIB)
    _, second = take(library, 100)
    used = 33 * MIB + 512
    assert figures(library, pool) == [used, used, 64 * MIB, 64 * MIB]
    assert library.account(0).charged == 64 * MIB
    assert give(library, first) == 0
    assert figures(library, pool) == [512, used, 64 * MIB, 64 * MIB]
    assert library.call("cudaMemPoolTrimTo", pool, ctypes.c_size_t(10 * MIB)) == 0
    assert get(library, pool, RESERVED) == 10 * MIB
    assert library.call("cudaMemPoolTrimTo", pool, ctypes.c_size_t(0)) == 0
    assert get(library, pool, RESERVED) == 2 * MIB
    assert give(library, second) == 0
    assert library.call("cudaMemPoolTrimTo", pool, ctypes.c_size_t(0)) == 0
    assert library.account(0).charged == 0
    assert library.guesses()["cudaMallocAsync"] == 2


def test_highs_are_reset_to_the_present(library, pool):
    _, first = take(library, 33 * MIB)
    assert give(library, first) == 0
    set_(library, pool, USED_HIGH, 0)
    set_(library, pool, RESERVED_HIGH, 0)
    assert figures(library, pool) == [0, 0, 64 * MIB, 64 * MIB]
    one = ctypes.c_uint64(1)
    args = pool, USED_HIGH, ctypes.byref(one)
    assert library.call("cudaMemPoolSetAttribute", *args) == INVALID_VALUE


def test_without_a_threshold_nothing_is_kept(library, pool):
    set_(library, pool, THRESHOLD, 0)
    _, address = take(library, 33 * MIB)
    assert give(library, address) == 0
    assert library.account(0).charged == 0


def test_a_pool_grows_by_less_where_the_device_has_less(library, pool):
    assert take(library, 95 * MIB)[0] == 0
    assert get(library, pool, RESERVED) == 96 * MIB
    assert take(library, 5 * MIB)[0] == 0
    assert get(library, pool, RESERVED) == 100 * MIB
    assert take(library, 1) == (OUT_OF_MEMORY, None)


def test_what_is_taken_lies_apart_and_on_its_device(library, pool):
    size = 3 * MIB + 100
    blocks = [take(library, size)[1] for _ in range(8)]
    assert give(library, blocks[3]) == 0
    blocks[3] = take(library, 1)[1]
    starts = sorted(set(blocks) - {blocks[3]})
    assert all(b - a >= size for a, b in pairwise(starts))
    assert not any(start <= blocks[3] < start + size for start in starts)
    assert all(address % 512 == 0 for address in blocks)
    out = (ctypes.c_int * 32)()
    assert library.call("cudaPointerGetAttributes", out, ctypes.c_void_p(blocks[0] + 5)) == 0
    assert (out[0], out[1]) == (2, 0)  # cudaMemoryTypeDevice
    for address in blocks[1:]:
        assert give(library, address) == 0
    assert library.free(blocks[0]) == 0  # cudaFree may be given it
    assert give(library, blocks[0]) == INVALID_VALUE
    assert get(library, pool, USED) == 0


def test_cuda_free_async_frees_what_cuda_malloc_gave(library):
    _, address = library.malloc(5 * MIB)
    assert give(library, address) == 0
    assert library.account(0).charged == 0


def test_each_device_has_a_pool_of_its_own(library, pool):
    other = ctypes.c_void_p()
    assert library.call("cudaDeviceGetDefaultMemPool", ctypes.byref(other), 1) == 0
    assert library.call("cudaSetDevice", 1) == 0
    assert take(library, MIB)[0] == 0
    assert library.call("cudaSetDevice", 0) == 0
    assert get(library, pool, USED) == 0
    assert get(library, other, USED) == MIB
    args = ctypes.byref(other), 16
    assert library.call("cudaDeviceGetDefaultMemPool", *args) == INVALID_DEVICE


def test_none_is_taken_where_nobody_sees_a_device(library):
    library.show(0)
    assert take(library, MIB) == (NO_DEVICE, None)


def test_memory_of_a_captured_graph_is_refused_by_name(library, capfd):
    stream, graph, address = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    assert library.call("cudaStreamCreate", ctypes.byref(stream)) == 0
    assert library.call("cudaStreamBeginCapture", stream, 0) == 0
    args = ctypes.byref(address), ctypes.c_size_t(MIB), stream
    assert library.call("cudaMallocAsync", *args) == NOT_SUPPORTED
    assert library.call("cudaStreamEndCapture", stream, ctypes.byref(graph)) == 0
    assert "while a graph is captured" in capfd.readouterr().err


# -- memory shared between processes --


def test_opened_memory_belongs_to_its_device_and_takes_none(library, tmp_path):
    assert library.call("cudaSetDevice", 1) == 0
    _, address = library.malloc(10 * MIB)
    status, raw = handle_of(library, address + 5)
    assert status == 0
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    other = tmp_path / "other"
    other.mkdir()
    child = context.Process(target=in_another_process, args=(other, raw, there))
    child.start()
    assert here.poll(60)
    closed = [0, 0, INVALID_VALUE]
    assert here.recv() == [0, 2, 1, 0, True, *closed, INVALID_DEVICE]
    child.join()


def test_bytes_of_shared_memory_are_unknown_until_it_is_freed(library, tmp_path):
    _, address = library.malloc(10 * MIB)
    write(library, address, b"first")
    _, raw = handle_of(library, address)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    folder = tmp_path / "other"
    folder.mkdir()
    child = context.Process(target=exchange, args=(folder, raw, there))
    child.start()
    here.send(b"reply")
    assert here.poll(60)
    assert here.recv() is None  # another process may have written there meanwhile
    write(library, address, b"again")
    assert library.call("cudaMemset", ctypes.c_void_p(address), 0, ctypes.c_size_t(5)) == 0
    assert read(library, address, 5) is None
    assert library.free(address) == 0
    _, new = library.malloc(10 * MIB)
    assert new == address
    write(library, address, b"after")
    assert read(library, address, 5) == b"after"
    child.join()
    assert child.exitcode == 0


def test_a_process_cannot_open_its_own_memory(library):
    _, address = library.malloc(MIB)
    _, raw = handle_of(library, address)
    assert open_handle(library, raw)[0] == UNINITIALIZED


def test_what_is_no_memory_of_a_device_has_no_handle_and_no_handle_opens_it(library):
    assert handle_of(library, 0x1000)[0] == INVALID_VALUE
    assert open_handle(library, bytes(64))[0] == INVALID_VALUE
    assert library.call("cudaIpcCloseMemHandle", NULL) == INVALID_VALUE


def test_an_event_of_another_process_has_happened(library):
    event, opened = ctypes.c_void_p(), ctypes.c_void_p()
    raw = ctypes.create_string_buffer(64)
    assert library.call("cudaEventCreate", ctypes.byref(event)) == 0
    assert library.call("cudaIpcGetEventHandle", raw, event) == 0
    handle = Handle.from_buffer_copy(raw.raw)
    assert library.call("cudaIpcOpenEventHandle", ctypes.byref(opened), handle) == 0
    assert library.call("cudaEventQuery", opened) == 0
    wrong = Handle.from_buffer_copy(bytes(64))
    args = ctypes.byref(opened), wrong
    assert library.call("cudaIpcOpenEventHandle", *args) == INVALID_VALUE
