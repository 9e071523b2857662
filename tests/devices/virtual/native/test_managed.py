"""Managed memory (cudaMallocManaged), by ctypes alone: the host uses it, no device is charged."""

import ctypes

import pytest
from helpers.virtual_gpu import GIB, MIB, private_library, small_card

INVALID_VALUE, NO_DEVICE, INVALID_DEVICE = 1, 100, 101
ATTACH_GLOBAL, ATTACH_HOST = 1, 2
MANAGED = 3  # cudaMemoryTypeManaged
ON_HOST = -1
NOT_SUPPORTED = 801


@pytest.fixture
def library(tmp_path):
    library = private_library(tmp_path, small_card(100 * MIB), count=2)
    library.set_versions(13020, 92600)
    return library


def allocate(library, size, flags=ATTACH_HOST, function="cudaMallocManaged"):
    address = ctypes.c_void_p()
    status = library.call(function, ctypes.byref(address), ctypes.c_size_t(size), flags)
    return status, address.value


def location(device):
    """``cudaMemLocation``, as it is passed: in one register."""
    kind = 1 if device >= 0 else 2
    return ctypes.c_uint64(kind | device << 32 if device >= 0 else kind)


def test_it_is_the_hosts_and_takes_none_of_the_card(library):
    """More than the card has: what is not used costs nothing."""
    status, address = allocate(library, 4 * GIB)
    assert status == 0
    ctypes.memset(address + 3 * GIB, 7, 100)
    assert ctypes.string_at(address + 3 * GIB + 99, 2) == b"\7\0"
    assert library.account(0).charged == 0
    assert library.memory_info()[0] == 100 * MIB
    assert library.managed().bytes == library.managed().peak_bytes == 4 * GIB
    assert library.free(address) == 0
    assert (library.managed().bytes, library.managed().peak_bytes) == (0, 4 * GIB)
    library.forget_managed_peak()
    assert library.managed().peak_bytes == 0
    assert library.free(address) == INVALID_VALUE


def test_it_tells_its_kind_and_its_device(library):
    assert library.call("cudaSetDevice", 1) == 0
    _, address = allocate(library, MIB)
    out = (ctypes.c_int * 32)()
    assert library.call("cudaPointerGetAttributes", out, ctypes.c_void_p(address + 5)) == 0
    assert list(out[:2]) == [MANAGED, 1]
    assert ctypes.cast(out, ctypes.POINTER(ctypes.c_void_p))[1] == address + 5  # on the device
    assert ctypes.cast(out, ctypes.POINTER(ctypes.c_void_p))[2] == address + 5  # on the host
    kind, managed = ctypes.c_uint(), ctypes.c_int()
    pointer = ctypes.c_uint64(address)
    assert library.call("cuPointerGetAttribute", ctypes.byref(kind), 2, pointer) == 0
    assert library.call("cuPointerGetAttribute", ctypes.byref(managed), 8, pointer) == 0
    assert (kind.value, managed.value) == (2, 1)


def test_copies_to_and_from_it_are_copies(library):
    _, address = allocate(library, MIB)
    _, device = library.malloc(MIB)
    size = ctypes.c_size_t(4)
    to, on_device = ctypes.c_void_p(address), ctypes.c_void_p(device)
    assert library.call("cudaMemcpy", to, b"abcd", size, 4) == 0
    assert library.call("cudaMemcpy", on_device, to, size, 4) == 0
    assert library.call("cudaMemset", to, 0, size) == 0
    assert library.call("cudaMemcpy", to, on_device, size, 4) == 0
    assert ctypes.string_at(address, 4) == b"abcd"


@pytest.mark.parametrize(("size", "flags"), [(0, ATTACH_HOST), (8, 0), (8, 3), (8, 4)])
def test_wrong_arguments_are_refused(library, size, flags):
    assert allocate(library, size, flags)[0] == INVALID_VALUE


def test_none_is_given_where_no_device_is_seen(library):
    library.show(0)
    assert allocate(library, 8) == (NO_DEVICE, None)


def test_prefetches_and_advice_are_taken_and_not_told(library, capfd):
    _, address = allocate(library, MIB, ATTACH_GLOBAL)
    pointer, size, out = ctypes.c_void_p(address), ctypes.c_size_t(MIB), ctypes.c_int()
    assert library.call("cudaMemPrefetchAsync", pointer, size, location(1), 0, None) == 0
    for advice in range(1, 7):
        assert library.call("cudaMemAdvise", pointer, size, advice, location(-1)) == 0
    for advice in (0, 7):
        assert library.call("cudaMemAdvise", pointer, size, advice, location(0)) == INVALID_VALUE
    args = ctypes.byref(out), ctypes.c_size_t(4), 1, pointer, size
    assert library.call("cudaMemRangeGetAttribute", *args) == NOT_SUPPORTED
    assert "does not support cudaMemRangeGetAttribute" in capfd.readouterr().err


def test_cuda_12_names_a_device_by_its_number(library):
    library.set_versions(12060, 90501)
    _, address = allocate(library, MIB)
    pointer, size = ctypes.c_void_p(address), ctypes.c_size_t(MIB)
    for device in (1, ON_HOST):
        assert library.call("cudaMemPrefetchAsync", pointer, size, device, None) == 0
    assert library.call("cudaMemPrefetchAsync", pointer, size, 99, None) == INVALID_DEVICE
    assert library.call("cudaMemPrefetchAsync_v2", pointer, size, location(0), 0, None) == 0
    assert library.call("cudaMemAdvise", pointer, size, 3, 1) == 0
    assert library.call("cudaMemAdvise", pointer, size, 3, 99) == INVALID_DEVICE


def test_memory_of_another_kind_cannot_be_prefetched_or_advised(library):
    _, managed = allocate(library, MIB)
    _, device = library.malloc(MIB)
    for address, size in ((device, MIB), (managed, 2 * MIB), (managed + MIB, 1), (managed, 0)):
        args = ctypes.c_void_p(address), ctypes.c_size_t(size)
        prefetched = library.call("cudaMemPrefetchAsync", *args, location(0), 0, None)
        assert prefetched == INVALID_VALUE
        assert library.call("cudaMemAdvise", *args, 1, location(0)) == INVALID_VALUE
    args = ctypes.c_void_p(managed), ctypes.c_size_t(MIB)
    prefetched = library.call("cudaMemPrefetchAsync", *args, location(99), 0, None)
    assert prefetched == INVALID_DEVICE


def test_the_driver_has_the_same_memory(library):
    status, address = allocate(library, MIB, ATTACH_GLOBAL, "cuMemAllocManaged")
    pointer, size = ctypes.c_uint64(address), ctypes.c_size_t(MIB)
    assert status == 0
    assert library.call("cuMemPrefetchAsync", pointer, size, 1, None) == 0
    assert library.call("cuMemPrefetchAsync_v2", pointer, size, location(0), 0, None) == 0
    assert library.call("cuMemAdvise", pointer, size, 3, 1) == 0
    assert library.call("cuMemAdvise_v2", pointer, size, 1, location(1)) == 0
    assert library.call("cuStreamAttachMemAsync", None, pointer, size, ATTACH_HOST) == 0
