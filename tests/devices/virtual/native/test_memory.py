"""The native library's accounts of device memory, by ctypes alone: no torch."""

import ctypes
import mmap
import random
import threading
import time

import pytest
from helpers.paths import TESTS
from helpers.virtual_gpu import GIB, MIB, PAGE, private_library, run_python, small_card

OUT_OF_MEMORY = 2
INVALID_VALUE = 1
PINNED, DEVICE = 1, 2
TO_HOST = 2


@pytest.fixture
def library(tmp_path):
    return private_library(tmp_path, small_card(64 * MIB), count=16)


def use(library, device):
    assert library.call("cudaSetDevice", device) == 0


@pytest.mark.parametrize("size", [1, 512, PAGE - 1, PAGE])
def test_an_allocation_is_charged_in_units_of_two_mib(library, size):
    status, address = library.malloc(size)
    assert status == 0
    assert address % PAGE == 0
    assert library.account(0).charged == PAGE
    assert library.free(address) == 0
    assert library.account(0).charged == 0


def test_one_byte_more_than_a_unit_is_charged_two(library):
    _, address = library.malloc(PAGE + 1)
    assert library.account(0).charged == 2 * PAGE
    library.free(address)


def test_the_capacity_is_the_cards_memory_less_its_context_to_the_byte(library):
    library.set_card(small_card(64 * MIB, context=10 * MIB))
    assert library.malloc(54 * MIB + 1) == (OUT_OF_MEMORY, 0)
    status, address = library.malloc(54 * MIB)
    assert status == 0
    assert library.malloc(1) == (OUT_OF_MEMORY, 0)
    assert library.memory_info() == (0, 64 * MIB)
    assert library.account(0).failures == 2
    library.free(address)


def test_what_is_left_of_less_than_a_unit_cannot_be_had(library):
    library.set_card(small_card(5 * MIB))
    found = [library.malloc(1) for _ in range(3)]
    assert [status for status, _ in found] == [0, 0, OUT_OF_MEMORY]
    assert library.memory_info() == (1 * MIB, 5 * MIB)


def test_beside_earlier_memory_addresses_have_the_order_of_an_empty_device(library):
    """Else free blocks of one size would be chosen in another order."""
    sizes = [PAGE, 3 * PAGE, PAGE, 2 * PAGE]

    def order():
        blocks = [library.malloc(size)[1] for size in sizes]
        library.free(blocks.pop(0))
        blocks.append(library.malloc(PAGE)[1])
        for block in blocks:
            library.free(block)
        return [sorted(blocks).index(block) for block in blocks]

    alone = order()
    left = [library.malloc(2 * PAGE)[1] for _ in range(4)]
    for address in left[::2]:  # holes between what is left
        library.free(address)
    assert order() != alone
    library.begin_apart(0)
    assert order() == alone
    for address in left[1::2]:
        library.free(address)
    library.begin_apart(0)
    assert order() == alone


def test_a_device_that_is_nearly_full_hands_out_the_addresses_that_are_left(library):
    library.set_card(small_card(900 * GIB))
    whole = library.malloc(600 * GIB)[1]
    library.begin_apart(0)
    status, part = library.malloc(300 * GIB)
    assert status == 0
    assert library.free(whole) == library.free(part) == 0
    assert library.malloc(800 * GIB)[0] == 0


def test_a_refused_allocation_charges_nothing(library):
    library.malloc(65 * MIB)
    account = library.account(0)
    assert (account.charged, account.peak_charged, account.mallocs) == (0, 0, 0)


def test_no_size_overflows(library):
    for size in ((1 << 64) - 1, 1 << 63, (1 << 40) + 1):
        assert library.malloc(size) == (OUT_OF_MEMORY, 0)
    assert library.account(0).charged == 0


def test_nothing_is_given_for_nothing(library):
    assert library.malloc(0) == (0, 0)
    assert library.free(0) == 0
    assert library.account(0).mallocs == 0


def test_room_is_made_beyond_the_card_and_taken_back(library):
    library.make_room(0, 10 * MIB)
    assert library.memory_info() == (74 * MIB, 74 * MIB)
    _, address = library.malloc(74 * MIB)
    assert address
    library.free(address)
    library.make_room(0, 0)
    assert library.malloc(65 * MIB)[0] == OUT_OF_MEMORY


def test_each_device_has_memory_of_its_own(library):
    blocks = []
    for device in (0, 5, 15):
        use(library, device)
        status, address = library.malloc(64 * MIB)
        assert status == 0
        blocks.append(address)
        assert library.malloc(1)[0] == OUT_OF_MEMORY
    assert library.account(1).charged == 0
    for address in blocks:  # also while another device is the current one
        assert library.free(address) == 0
    assert [library.account(device).charged for device in (0, 5, 15)] == [0, 0, 0]


def test_the_current_device_is_each_threads_own(library):
    use(library, 3)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(library.number("cudaGetDevice")))
    thread.start()
    thread.join()
    assert seen == [0]
    assert library.number("cudaGetDevice") == 3


def test_addresses_go_down_without_gaps_and_the_highest_hole_that_fits_is_filled_first(library):
    """As CUDA's driver does on Linux: PyTorch's allocator breaks ties by address."""
    first, second, third = (library.malloc(size * PAGE)[1] for size in (2, 3, 2))
    assert [first - second, second - third] == [3 * PAGE, 2 * PAGE]
    library.free(second)
    assert library.malloc(4 * PAGE)[1] == third - 4 * PAGE  # the hole is a page too small
    assert library.malloc(2 * PAGE)[1] == first - 2 * PAGE  # at the hole's upper end
    library.free(third)
    library.free(first)
    assert library.malloc(2 * PAGE)[1] == first
    assert library.malloc(PAGE + 1)[1] == third + PAGE


def test_allocations_of_a_page_go_up_and_the_lowest_hole_is_filled_first(library):
    """PyTorch's segments for small blocks: 16 networks on an L40S reserve so much, to a byte."""
    large = library.malloc(2 * PAGE)[1]
    first, second, third = (library.malloc(size)[1] for size in (1, PAGE, 3))
    assert [second - first, third - second] == [PAGE, PAGE]
    assert third < large
    library.free(second)
    library.free(first)
    assert [library.malloc(1)[1] for _ in range(3)] == [first, second, third + PAGE]


def test_a_block_can_be_freed_once_and_by_its_first_address_alone(library):
    _, address = library.malloc(3 * PAGE)
    assert library.free(address + PAGE) == INVALID_VALUE
    assert library.free(address + 1) == INVALID_VALUE
    assert library.free(address) == 0
    assert library.free(address) == INVALID_VALUE
    assert library.account(0).frees == 1


def test_an_address_of_nobody_is_refused(library):
    assert library.free(0x1234000) == INVALID_VALUE
    assert library.call("cudaGetLastError") == INVALID_VALUE
    assert library.call("cudaGetLastError") == 0


def test_a_block_is_found_by_any_address_in_it(library):
    _, address = library.malloc(5 * PAGE)
    base, size = ctypes.c_size_t(), ctypes.c_size_t()
    outs = ctypes.byref(base), ctypes.byref(size)
    for inside in (address, address + 1, address + 5 * PAGE - 1):
        assert library.call("cuMemGetAddressRange_v2", *outs, ctypes.c_size_t(inside)) == 0
        assert (base.value, size.value) == (address, 5 * PAGE)
    behind = ctypes.c_size_t(address + 5 * PAGE)
    assert library.call("cuMemGetAddressRange_v2", *outs, behind) == INVALID_VALUE
    library.free(address)
    assert library.call("cuMemGetAddressRange_v2", *outs, ctypes.c_size_t(address)) != 0


def pointer(library, address):
    """Return (type, device) of cudaPointerGetAttributes."""
    out = (ctypes.c_int * 16)()  # 24 bytes with CUDA 12, 56 with CUDA 13
    assert library.call("cudaPointerGetAttributes", out, ctypes.c_void_p(address)) == 0
    return out[0], out[1]


def test_a_pointer_tells_where_it_points(library):
    use(library, 2)
    _, address = library.malloc(PAGE)
    use(library, 0)
    assert pointer(library, address + 7) == (DEVICE, 2)
    here = ctypes.create_string_buffer(8)
    assert pointer(library, ctypes.addressof(here))[0] == 0


def test_pinned_memory_is_known_from_its_first_to_its_last_byte(library):
    host = ctypes.c_void_p()
    assert library.call("cudaHostAlloc", ctypes.byref(host), ctypes.c_size_t(5000), 0) == 0
    ctypes.memset(host.value, 1, 5000)
    assert pointer(library, host.value)[0] == PINNED
    assert pointer(library, host.value + 4999)[0] == PINNED
    assert library.account(0).charged == 0
    assert library.call("cudaFreeHost", ctypes.c_void_p(host.value + 8)) == INVALID_VALUE
    assert library.call("cudaFreeHost", host) == 0
    assert library.call("cudaFreeHost", host) == INVALID_VALUE


def resident(address, size):
    """Return how many of these pages use the host's memory."""
    pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    start, length = ctypes.c_void_p(address), ctypes.c_size_t(size)
    assert ctypes.CDLL(None, use_errno=True).mincore(start, length, pages) == 0
    return sum(page & 1 for page in pages)


@pytest.mark.parametrize(("start", "size"), [(0, 8 * MIB), (100, 8 * MIB - 200)])
def test_a_large_copy_of_unknown_bytes_to_pinned_memory_takes_no_memory(library, start, size):
    """A model's offloaded activations are as large as on a GPU."""
    host, whole = ctypes.c_void_p(), 8 * MIB
    assert library.call("cudaHostAlloc", ctypes.byref(host), ctypes.c_size_t(whole), 0) == 0
    ctypes.memset(host.value, 1, whole)
    _, device = library.malloc(whole)
    to = ctypes.c_void_p(host.value + start)
    copied = ctypes.c_size_t(size)
    assert library.call("cudaMemcpy", to, ctypes.c_void_p(device), copied, TO_HOST) == 0
    # A huge page may lie around each end.
    assert resident(host.value + 2 * MIB, 4 * MIB) == 0
    expected = b"\1" * start + bytes(size) + b"\1" * (whole - start - size)
    assert ctypes.string_at(host.value, whole) == expected
    assert library.readbacks() == 1
    ctypes.memset(host.value, 2, whole)
    assert ctypes.string_at(host.value, whole) == b"\2" * whole
    assert library.call("cudaFreeHost", host) == 0


def test_a_copy_of_unknown_bytes_to_registered_memory_writes_zeros(library, tmp_path):
    """Pages of a file would read as the file if they were given back."""
    size = 2 * MIB
    file = tmp_path / "shared"
    file.write_bytes(b"x" * size)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), size) as shared:
        start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(shared)))
        assert library.call("cudaHostRegister", start, ctypes.c_size_t(size), 0) == 0
        _, device = library.malloc(size)
        pair = ctypes.c_void_p(device), ctypes.c_size_t(size)
        assert library.call("cudaMemcpy", start, *pair, TO_HOST) == 0
        assert library.call("cudaHostUnregister", start) == 0
        assert ctypes.string_at(start.value, size) == bytes(size)


def test_memory_of_the_callers_own_is_pinned_while_it_is_registered(library):
    here = ctypes.create_string_buffer(10000)
    address = ctypes.c_void_p(ctypes.addressof(here))
    assert library.call("cudaHostRegister", address, ctypes.c_size_t(10000), 0) == 0
    assert pointer(library, address.value + 100)[0] == PINNED
    assert library.call("cudaFreeHost", address) == INVALID_VALUE
    assert library.call("cudaHostUnregister", address) == 0
    assert pointer(library, address.value)[0] == 0
    assert library.call("cudaHostUnregister", address) == 713  # cudaErrorHostMemoryNotRegistered


def test_memory_is_registered_once(library):
    data = ctypes.create_string_buffer(10_000)
    start = ctypes.addressof(data)
    whole = ctypes.c_void_p(start), ctypes.c_size_t(10_000), 0
    part = ctypes.c_void_p(start + 9_000), ctypes.c_size_t(100), 0
    assert library.call("cudaHostRegister", *whole) == 0
    assert library.call("cudaHostRegister", *whole) == 712
    assert library.call("cudaHostRegister", *part) == 712
    assert library.call("cudaHostUnregister", ctypes.c_void_p(start)) == 0
    assert library.call("cudaHostRegister", *part) == 0


def test_copies_of_what_nobody_wrote_are_zeros_and_counted(library):
    _, address = library.malloc(PAGE)
    here, there = ctypes.create_string_buffer(b"12345678"), ctypes.create_string_buffer(9)
    device, size = ctypes.c_void_p(address + 512), ctypes.c_size_t(8)
    assert library.call("cudaMemcpy", ctypes.c_void_p(address), here, size, 1) == 0
    assert library.readbacks() == 0
    assert library.call("cudaMemcpy", there, here, size, 4) == 0
    assert there.value == b"12345678"
    assert library.call("cudaMemcpy", here, device, size, 4) == 0
    assert here.raw == b"\0" * 8 + b"\0"
    assert library._figures("readbacks", 2) == [1, 8]  # and their bytes


class Model:
    """What the library does, said in Python: the lowest page, or the top of the highest hole.

    Pages are counted from the region's end, so they are negative.
    """

    REGION = -(1 << 19)

    def __init__(self, capacity):
        self.capacity = capacity
        self.live = {}

    @property
    def charged(self):
        return sum(self.live.values()) * PAGE

    def malloc(self, size):
        pages = -(-size // PAGE)
        if self.charged + pages * PAGE > self.capacity:
            return None
        if pages == 1:
            start = self.REGION
            while start in self.live:
                start += 1
            self.live[start] = 1
            return start
        top = 0
        for start in sorted(self.live, reverse=True):
            if top - (start + self.live[start]) >= pages:
                break
            top = start
        self.live[top - pages] = pages
        return top - pages


@pytest.mark.parametrize("seed", [1, 2])
def test_ten_thousand_allocations_and_frees_agree_with_a_model(library, seed):
    chance = random.Random(seed)
    capacity = 2 * GIB
    library.set_card(small_card(capacity))
    model, live = Model(capacity), []
    _, address = library.malloc(2 * PAGE)
    base = address + 2 * PAGE  # the region's end
    library.free(address)
    refused = 0
    for _ in range(10_000):
        if live and chance.random() < 0.45:
            address = live.pop(chance.randrange(len(live)))
            assert library.free(address) == 0
            del model.live[(address - base) // PAGE]
        else:
            size = int(chance.lognormvariate(15.5, 1.5)) + 1
            status, address = library.malloc(size)
            expected = model.malloc(size)
            refused += expected is None
            assert status == (OUT_OF_MEMORY if expected is None else 0)
            if expected is not None:
                assert (address - base) // PAGE == expected
                live.append(address)
        assert library.account(0).charged == model.charged
    assert refused > 10
    assert len(live) > 20


def test_threads_that_allocate_at_once_never_get_the_same_address(library):
    """Eight threads take all there is, free it and take again; accounts stay exact."""
    pages = 4096
    library.set_card(small_card(pages * PAGE))
    taken, faults = [[] for _ in range(8)], []
    start = threading.Barrier(8)

    def work(mine):
        start.wait()
        for _ in range(3):
            while (found := library.malloc(PAGE))[0] == 0:
                mine.append(found[1])
            start.wait()
            if mine is taken[0]:
                together = sorted(address for some in taken for address in some)
                if len(set(together)) != pages or len(together) != pages:
                    faults.append(len(set(together)))
            start.wait()
            while mine:
                if library.free(mine.pop()):
                    faults.append("free")
            start.wait()

    threads = [threading.Thread(target=work, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    account = library.account(0)
    assert (account.charged, account.peak_charged) == (0, pages * PAGE)
    assert account.mallocs == account.frees == 3 * pages


def test_the_cost_of_an_allocation_does_not_grow_with_live_blocks(library):
    """A scan would cost 400 times more with 40,000 blocks than with 100; see benchmarks/."""
    library.set_card(small_card(512 * GIB))

    def seconds(rounds=300):
        begin = time.thread_time()
        for _ in range(rounds):
            pointer(library, library.malloc(1)[1])
        return time.thread_time() - begin

    seconds()
    few = min(seconds() for _ in range(5))
    for _ in range(40_000):
        library.malloc(1)
    many = min(seconds() for _ in range(5))
    assert many < 20 * few


def test_without_address_space_it_says_so(tmp_path):
    """Not a plain out of memory: no step would fit, and nobody would know why."""
    done = run_python(
        """
        import resource, sys
        sys.path.insert(0, sys.argv[2])
        from helpers.virtual_gpu import private_library
        library = private_library(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
        print(library.malloc(1)[0], list(library.unsupported()))
        """,
        str(tmp_path),
        str(TESTS),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ['cudaMalloc without 1 TiB of address space")
