"""The driver's virtual memory management, by ctypes alone: what is created is charged."""

import ctypes

import pytest
from helpers.virtual_gpu import MIB, PAGE, private_library, small_card

INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED = 1, 2, 801


@pytest.fixture
def library(tmp_path):
    return private_library(tmp_path, small_card(64 * MIB), count=2)


def size_t(value):
    return ctypes.c_size_t(value)


def reserve(library, size):
    address = ctypes.c_size_t()
    nothing = size_t(0), size_t(0), ctypes.c_uint64(0)
    status = library.call("cuMemAddressReserve", ctypes.byref(address), size_t(size), *nothing)
    return status, address.value


def create(library, size, device=0, place=1, handles=0):
    """``place``: CU_MEM_LOCATION_TYPE_DEVICE is 1; ``handles``: kinds of handles to export."""
    properties = (ctypes.c_int * 8)(1, handles, place, device)  # pinned
    handle = ctypes.c_void_p()
    out, nothing = ctypes.byref(handle), ctypes.c_uint64(0)
    return library.call("cuMemCreate", out, size_t(size), properties, nothing), handle


def mapped(library, address, size, handle):
    args = size_t(address), size_t(size), size_t(0), handle, ctypes.c_uint64(0)
    return library.call("cuMemMap", *args)


def unmap(library, address, size):
    return library.call("cuMemUnmap", size_t(address), size_t(size))


def release(library, handle):
    return library.call("cuMemRelease", handle)


def charged(library, device=0):
    return library.account(device).charged


def test_reserving_addresses_takes_no_memory(library):
    status, address = reserve(library, 1 << 36)
    assert status == 0
    assert address % PAGE == 0
    assert charged(library) == 0
    assert library.call("cuMemAddressFree", size_t(address), size_t(1 << 36)) == 0
    assert library.call("cuMemAddressFree", size_t(address), size_t(1 << 36)) == INVALID_VALUE


def test_memory_is_charged_from_its_creation_until_nobody_refers_to_it(library):
    _, address = reserve(library, 20 * MIB)
    status, handle = create(library, 20 * MIB)
    assert status == 0
    assert charged(library) == 20 * MIB
    assert mapped(library, address, 20 * MIB, handle) == 0
    assert release(library, handle) == 0
    assert charged(library) == 20 * MIB  # still mapped
    assert unmap(library, address, 20 * MIB) == 0
    assert charged(library) == 0


def test_memory_that_was_never_mapped_goes_with_its_release(library):
    _, handle = create(library, 4 * MIB)
    assert release(library, handle) == 0
    assert charged(library) == 0


def test_creation_shares_the_capacity_with_cuda_malloc(library):
    _, block = library.malloc(40 * MIB)
    assert create(library, 26 * MIB)[0] == OUT_OF_MEMORY
    status, handle = create(library, 24 * MIB)
    assert status == 0
    assert library.malloc(1)[0] == OUT_OF_MEMORY
    release(library, handle)
    library.free(block)


def test_each_device_creates_its_own(library):
    _, handle = create(library, 64 * MIB, device=1)
    assert (charged(library, 0), charged(library, 1)) == (0, 64 * MIB)
    assert create(library, PAGE, device=2)[0] == 101  # two are shown
    release(library, handle)


def test_one_unmapping_undoes_several_mappings(library):
    _, address = reserve(library, 8 * MIB)
    for at in range(4):
        _, handle = create(library, PAGE)
        assert mapped(library, address + at * PAGE, PAGE, handle) == 0
        release(library, handle)
    assert charged(library) == 8 * MIB
    assert unmap(library, address + PAGE, 2 * PAGE) == 0
    assert charged(library) == 4 * MIB
    assert unmap(library, address + 3 * PAGE, PAGE) == 0
    assert unmap(library, address, PAGE) == 0
    assert charged(library) == 0


def test_a_mapping_overlaps_no_other_and_stays_inside_its_reservation(library):
    _, address = reserve(library, 8 * MIB)
    _, small = create(library, PAGE)
    _, large = create(library, 2 * PAGE)
    assert mapped(library, address + PAGE, PAGE, small) == 0
    assert mapped(library, address + PAGE, PAGE, small) == INVALID_VALUE
    assert mapped(library, address, 2 * PAGE, large) == INVALID_VALUE  # its end lies in the other
    assert mapped(library, address + 3 * PAGE, 2 * PAGE, large) == INVALID_VALUE
    assert mapped(library, 0x1000000, PAGE, small) == INVALID_VALUE


def test_what_is_not_mapped_cannot_be_unmapped(library):
    _, address = reserve(library, 8 * MIB)
    assert unmap(library, address, PAGE) == INVALID_VALUE


def test_mapped_memory_belongs_to_its_device(library):
    _, address = reserve(library, 4 * MIB)
    _, handle = create(library, 4 * MIB, device=1)
    mapped(library, address, 4 * MIB, handle)
    out = (ctypes.c_int * 32)()
    args = out, ctypes.c_void_p(address + 4 * MIB - 1)
    assert library.call("cudaPointerGetAttributes", *args) == 0
    assert (out[0], out[1]) == (2, 1)  # cudaMemoryTypeDevice


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE + 4096])
def test_sizes_are_multiples_of_the_granularity(library, size):
    granularity = library.number(
        "cuMemGetAllocationGranularity", (ctypes.c_int * 8)(1, 0, 1, 0), 0, kind=ctypes.c_size_t
    )
    assert granularity == PAGE
    assert create(library, size)[0] == INVALID_VALUE
    assert reserve(library, size)[0] == INVALID_VALUE


def test_memory_for_a_fabric_is_not_supported_as_on_a_machine_without_one(library):
    assert create(library, PAGE, handles=8)[0] == NOT_SUPPORTED
    assert library.unsupported() == {}


def test_memory_of_the_host_is_refused_by_name(library, capfd):
    assert create(library, PAGE, place=2)[0] == NOT_SUPPORTED
    assert "cuMemCreate" in capfd.readouterr().err
    assert "cuMemCreate (in host memory)" in library.unsupported()
