"""The bytes that device memory holds: which are known, when they are no more, what they cost."""

import ctypes
import mmap
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.paths import ROOT, TESTS
from helpers.virtual_gpu import (
    MIB,
    Values,
    private_library,
    run_python,
    small_card,
    values_of,
)

from pytest_gpumem.devices.virtual.library import CopyFaults

LARGEST = 512 << 10
"""bytes: larger copies are not carried out"""
BACKED = 256 * MIB
"""bytes of the host's memory that device memory takes at most"""
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
    before = library.readbacks()
    out = ctypes.create_string_buffer(b"\xff" * size, size)
    assert library.call("cudaMemcpy", out, pointer(address), length(size), TO_HOST) == 0
    if library.readbacks() == before:
        return out.raw
    assert out.raw == bytes(size)
    return None


def test_what_was_copied_there_is_read_back(library, block):
    put(library, block, b"twelve bytes")
    assert get(library, block, 12) == b"twelve bytes"
    assert get(library, block + 7, 5) == b"bytes"
    assert get(library, block, 13) is None
    assert get(library, block + 512, 1) is None


@pytest.mark.parametrize(("size", "known"), [(LARGEST, True), (LARGEST + 1, False)])
def test_large_copies_are_not_carried_out(library, block, size, known):
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
    config = ctypes.create_string_buffer(64)  # of a launch: the first argument of some
    library.call(function, config, *[ctypes.c_void_p()] * 8)
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


def test_a_live_block_is_known_behind_the_test_that_wrote_it(library, block):
    """As fixtures of wider scope hold it: between two tests the devices are hidden."""
    put(library, block, b"known")
    library.show(0)
    library.show(2)
    assert get(library, block, 5) == b"known"


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
    assert library.call("cudaMemset", pointer(block), 1, length(LARGEST + 1)) == 0
    assert get(library, block, 10) is None
    assert get(library, block + LARGEST, 1) is None


def test_zeros_are_known_however_many_and_take_no_host_memory(library, block):
    put(library, block, b"before")
    put(library, block + 5 * MIB, b"inside")
    put(library, block + 8 * MIB - 6, b"behind")
    backed = values_of(library).backed
    assert library.call("cudaMemset", pointer(block + 3), 0, length(8 * MIB - 6)) == 0
    assert get(library, block, 8 * MIB) == b"bef" + bytes(8 * MIB - 6) + b"ind"
    assert values_of(library).backed < backed
    assert values_of(library).known == 8 * MIB


@pytest.mark.parametrize(("bits", "element"), [(8, b"\x21"), (16, b"\x21C"), (32, b"\x21Ce\x87")])
def test_the_drivers_memsets_write_elements(library, block, bits, element):
    for name, more in ((f"cuMemsetD{bits}_v2", ()), (f"cuMemsetD{bits}Async", (None,))):
        put(library, block, bytes(40))
        value = ctypes.c_uint(0x87654321)
        assert library.call(name, pointer(block + 8), value, length(4), *more) == 0
        assert get(library, block, 40) == (bytes(8) + element * 4).ljust(40, b"\0")


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


def test_the_bytes_lie_at_their_addresses(library, block):
    """A CPU tensor over them reads what a copy wrote, and zeros where nothing was written."""
    put(library, block + 8, b"12345")
    assert ctypes.string_at(block + 6, 9) == b"\0\x0012345\0\0"


def test_freed_memory_goes_back_to_the_host(library, block):
    for offset in range(0, 8 * MIB, LARGEST):
        put(library, block + offset, b"x" * LARGEST)
    assert values_of(library) == Values(known=8 * MIB, backed=8 * MIB)
    assert library.free(block) == 0
    assert values_of(library) == Values(known=0, backed=0)
    _, again = library.malloc(8 * MIB)
    assert again == block
    assert ctypes.string_at(block, 8) == bytes(8)


def test_copies_of_any_number_take_so_much_of_the_hosts_memory_and_no_more(tmp_path):
    library = private_library(tmp_path, small_card(4 << 30))
    _, block = library.malloc(2 << 30)
    data = b"x" * LARGEST
    for offset in range(0, 2 * BACKED, LARGEST):
        put(library, block + offset, data)
    assert values_of(library) == Values(known=BACKED, backed=BACKED)
    assert get(library, block + BACKED - 1, 1) == b"x"
    assert get(library, block + BACKED, 1) is None
    library.call("cudaLaunchKernel", *[ctypes.c_void_p()] * 8)  # none is known any more
    put(library, block + BACKED, data)
    assert values_of(library) == Values(known=LARGEST, backed=LARGEST)


def test_a_copy_of_a_large_model_takes_none(tmp_path):
    library = private_library(tmp_path, small_card(80 << 30))
    size = 60 << 30
    _, block = library.malloc(size)
    weights = ctypes.c_void_p()  # of the host, which are never written
    assert library.call("cudaMallocManaged", ctypes.byref(weights), length(size), 1) == 0
    before = resident()
    args = pointer(block), weights, length(size)
    assert library.call("cudaMemcpy", *args, TO_DEVICE) == 0
    assert resident() - before < MIB
    assert get(library, block, 8) is None


def resident():
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * mmap.PAGESIZE


def test_where_writable_memory_is_limited_there_is_memory_and_nothing_is_known(tmp_path):
    """ulimit -d counts address space that was never used."""
    code = """
    import ctypes, resource, sys
    from helpers.virtual_gpu import private_library

    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    library = private_library(sys.argv[1])
    status, address = library.malloc(1 << 30)
    pointer, size = ctypes.c_void_p(address), ctypes.c_size_t(5)
    out = ctypes.create_string_buffer(5)
    print(status, library.call("cudaMemcpy", pointer, b"known", size, 1))
    print(library.call("cudaMemset", pointer, 0, size), library.readbacks())
    print(library.call("cudaMemcpy", out, pointer, size, 2), out.raw, library.readbacks())
    """
    done = run_python(code, str(tmp_path), PYTHONPATH=f"{TESTS}:{ROOT}")
    assert done.stdout.splitlines() == ["0 0", "0 0", f"0 {bytes(5)} 1"], done.stderr


def test_mapped_memory_holds_bytes_until_it_is_unmapped(library):
    address, memory = ctypes.c_uint64(), ctypes.c_void_p()
    size, nothing = length(2 * MIB), ctypes.c_uint64(0)
    assert (
        library.call("cuMemAddressReserve", ctypes.byref(address), size, size, nothing, nothing)
        == 0
    )
    properties = (ctypes.c_int * 8)(1, 0, 1, 0)
    assert library.call("cuMemCreate", ctypes.byref(memory), size, properties, nothing) == 0
    assert library.call("cuMemMap", address, size, length(0), memory, nothing) == 0
    put(library, address.value, b"known")
    assert get(library, address.value, 5) == b"known"
    assert library.call("cuMemUnmap", address, size) == 0
    assert values_of(library) == Values(known=0, backed=0)


# -- values that Python computes over the same addresses --


def test_while_values_are_computed_an_operators_launch_leaves_them_known(library, block):
    library.compute_values(1)
    put(library, block, b"known")
    library.count_operators(1)
    library.call("cudaLaunchKernel", *[ctypes.c_void_p()] * 8)
    assert get(library, block, 5) == b"known"
    library.count_operators(-1)  # a kernel of Triton's, say
    library.call("cudaLaunchKernel", *[ctypes.c_void_p()] * 8)
    assert get(library, block, 5) is None
    put(library, block, b"known")
    library.count_operators(1)
    library.compute_values(0)
    library.call("cudaLaunchKernel", *[ctypes.c_void_p()] * 8)
    assert get(library, block, 5) is None
    library.count_operators(-1)


def test_setting_cudnns_dropout_makes_its_states_unknown_alone(library, block):
    put(library, block, b"knownstate")
    null = ctypes.c_void_p()
    states = ctypes.c_void_p(block + 5), ctypes.c_size_t(5)
    library.call("cudnnRestoreDropoutDescriptor")
    assert get(library, block, 10) == b"knownstate"
    library.call("cudnnSetDropoutDescriptor", null, null, ctypes.c_float(0.5), *states)
    assert get(library, block, 5) == b"known"
    assert get(library, block, 10) is None


def test_python_writes_where_the_limits_allow_it(library, block):
    assert library.open_for_writing(block, LARGEST)
    ctypes.memmove(block, b"computed", 8)
    assert library.is_known(block, LARGEST)
    assert get(library, block, 8) == b"computed"
    assert not library.open_for_writing(block, LARGEST + 1)
    assert not library.is_known(block, 1)
    library.set_value_limits(8 * MIB, 13 * MIB, 4 * MIB)
    assert library.open_for_writing(block, 4 * MIB)
    assert not library.open_for_writing(block, 8 * MIB)
    assert library.value_budget() == MIB
    assert not library.open_for_writing(block, 2 * MIB)
    assert library.open_for_writing(block, MIB)
    assert not library.open_for_writing(block, MIB)
    assert library.open_for_writing(block, LARGEST)
    library.forget(block, 4)
    assert not library.is_known(block, 5)
    assert library.is_known(block + 4, 4)


def test_beyond_the_most_pieces_new_ones_are_unknown_and_the_others_stay(library):
    """Each of these is a tensor of one element, in a block of 512 bytes of PyTorch's allocator."""
    most, step = 1 << 18, 512
    block = library.malloc((most + 8) * step)[1]
    for piece in range(most):
        assert library.open_for_writing(block + piece * step, 4)
    assert library.is_known(block + (most - 1) * step, 4)
    library.open_for_writing(block + (most + 1) * step, 4)
    assert not library.is_known(block + (most + 1) * step, 4)
    assert library.is_known(block, 4)
    assert library.is_known(block + (most - 1) * step, 4)
    library.forget(block, 4)
    library.open_for_writing(block + (most + 1) * step, 4)
    assert library.is_known(block + (most + 1) * step, 4)


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
                if abs(source - start) < size:
                    continue  # they overlap, which CUDA does not define
                args = (pointer(block + start), pointer(block + source), length(size))
                assert library.call("cudaMemcpy", *args, ON_DEVICE) == 0
                model[start : start + size] = model[source : source + size]
            case 2:
                value = chance.choice([0, 7])
                assert library.call("cudaMemset", pointer(block + start), value, length(size)) == 0
                model[start : start + size] = [value] * size
            case _:
                found, known = get(library, block + start, size), model[start : start + size]
                assert found == (None if None in known else bytes(known))


# -- copies to the host that Python computed --


def test_queued_copies_come_in_their_order_whatever_is_known_there(library, block):
    put(library, block, b"stale")
    library.queue_copy(b"first")
    library.queue_copy(b"2nd")
    assert get(library, block, 5) == b"first"
    assert get(library, block + 512, 3) == b"2nd"
    assert get(library, block, 5) == b"stale"
    assert not library.drop_queued_copies()


def test_a_copy_of_another_size_takes_nothing_and_is_a_fault(library, block):
    library.queue_copy(b"eight...")
    assert get(library, block, 4) is None
    assert get(library, block, 5) is None
    assert get(library, block, 8) == b"eight..."
    fault = CopyFaults(left=0, strays=2, stray_size=4, expected_size=8)
    assert library.drop_queued_copies() == fault
    assert library.drop_queued_copies() == CopyFaults()


def test_a_copy_takes_the_form_of_its_size(library, block):
    for _ in range(2):
        library.queue_copy(b"byte", b"in eight", b"1")
    assert get(library, block, 8) == b"in eight"
    assert get(library, block, 2) is None
    assert get(library, block, 4) == b"byte"
    assert library.drop_queued_copies() == CopyFaults(strays=1, stray_size=2, expected_size=1)


def test_what_is_queued_and_not_taken_is_dropped_and_is_a_fault(library, block):
    for content in (b"a", b"b", b"c"):
        library.queue_copy(content)
    assert get(library, block, 1) == b"a"
    assert library.drop_queued_copies() == CopyFaults(left=2)
    assert get(library, block, 1) is None


def test_only_copies_to_the_host_take_what_is_queued(library, block):
    library.queue_copy(b"known")
    put(library, block, b"other")
    assert library.call("cudaMemcpy", pointer(block + 8), pointer(block), length(5), ON_DEVICE) == 0
    assert get(library, block, 5) == b"known"
    assert get(library, block + 8, 5) == b"other"


def test_a_captured_copy_takes_nothing(library, block):
    """It is made when its graph is launched, and as often: nobody knows what it brings then."""
    stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
    assert library.call("cudaStreamCreate", ctypes.byref(stream)) == 0
    assert library.call("cudaStreamBeginCapture", stream, 0) == 0
    library.queue_copy(b"later")
    out = ctypes.create_string_buffer(5)
    args = (out, pointer(block), length(5), TO_HOST, stream)
    assert library.call("cudaMemcpyAsync", *args) == 0
    assert library.call("cudaStreamEndCapture", stream, ctypes.byref(graph)) == 0
    library.call("cudaGraphLaunch", graph, stream)
    assert out.raw == bytes(5)
    assert library.drop_queued_copies() == CopyFaults(left=1)


def test_each_thread_has_a_queue_of_its_own(library, block):
    """An operator of autograd's thread must not take what the main thread's operator will read."""
    library.queue_copy(b"main!")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(get, library, block, 5).result() is None
        pool.submit(library.queue_copy, b"theirs").result()
        assert get(library, block, 5) == b"main!"
        assert pool.submit(library.drop_queued_copies).result() == CopyFaults(left=1)
    assert not library.drop_queued_copies()


# -- collectives: every rank is taken to hold what this one holds, where no other rank joins --


class UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


def communicator(library, ranks, rank, identity=None):
    made = ctypes.c_void_p()
    identity = identity or UniqueId()
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


# -- collectives of ranks that have all joined: threads here, or devices of this process --


def devices_of_this_process(library, ranks):
    """The communicators of ranks that call a collective one after the other, on one thread."""
    groups = (ctypes.c_void_p * ranks)()
    assert library.call("ncclCommInitAll", groups, ranks, None) == 0
    return [ctypes.c_void_p(group) for group in groups]


@pytest.fixture(params=["threads", "devices"])
def both_ranks(request, library, block):
    """Call a collective on two ranks; each has a part of the block."""
    identity = UniqueId()
    if request.param == "threads":
        assert library.call("ncclGetUniqueId", ctypes.byref(identity)) == 0
        groups = [communicator(library, 2, rank, identity) for rank in (0, 1)]
    else:
        groups = devices_of_this_process(library, 2)
    with ThreadPoolExecutor(2 if request.param == "threads" else 1) as pool:

        def collective(name, given, *options, size):
            """Return what each rank has then, of so many bytes; of ``given`` None is unknown."""
            for rank, content in enumerate(given):
                library.forget(block + 2048 * rank, 2048)
                if content is not None:
                    put(library, block + 2048 * rank, content)

            def call(rank):
                start = block + 2048 * rank
                args = (pointer(start), pointer(start + 1024), *options, groups[rank], None)
                assert library.call(name, *args) == 0

            list(pool.map(call, (0, 1)))
            return [get(library, block + 2048 * rank + 1024, size) for rank in (0, 1)]

        yield collective
    for group in groups:
        assert library.call("ncclCommDestroy", group) == 0


@pytest.mark.parametrize(
    ("case", "values", "expected"),
    [
        ((ctypes.c_int8, 0, SUM), (100, 100), -56),
        ((ctypes.c_uint8, 1, PROD), (3, 5), 15),
        ((ctypes.c_int32, INT32, MIN), (-3, 2), -3),
        ((ctypes.c_uint32, 3, MAX), (1, 2**32 - 1), 2**32 - 1),
        ((ctypes.c_int64, 4, SUM), (2**62, 2**62), -(2**63)),
        ((ctypes.c_uint64, 5, MAX), (1, 2**64 - 1), 2**64 - 1),
        ((ctypes.c_float, FLOAT32, AVG), (0.5, 1.0), 0.75),
        ((ctypes.c_double, FLOAT64, SUM), (0.25, 4.0), 4.25),
        ((ctypes.c_int32, INT32, 5), (1, 1), None),  # an operation of its own
        ((ctypes.c_uint16, FLOAT16, SUM), (7, 7), None),
    ],
)
def test_ranks_reduce_what_each_of_them_gives(both_ranks, case, values, expected):
    kind, code, operation = case
    given = [bytes(kind(value)) for value in values]
    size = ctypes.sizeof(kind)
    results = both_ranks("ncclAllReduce", given, length(1), code, operation, size=size)
    found = [result and kind.from_buffer_copy(result).value for result in results]
    assert found == [expected] * 2


def test_ranks_exchange_what_each_of_them_gives(both_ranks):
    given = (b"abcd", b"wxyz")
    assert both_ranks("ncclAllGather", given, length(4), 1, size=8) == [b"abcdwxyz"] * 2
    for root in (0, 1):
        assert both_ranks("ncclBroadcast", given, length(4), 1, root, size=4) == [given[root]] * 2
    given = (bytes([1, 2, 3, 4]), bytes([10, 20, 30, 40]))
    results = both_ranks("ncclReduceScatter", given, length(2), 1, SUM, size=2)
    assert results == [bytes([11, 22]), bytes([33, 44])]
    assert both_ranks("ncclReduce", given, length(4), 1, MAX, 1, size=4) == [None, given[1]]


def test_what_a_rank_does_not_know_no_rank_knows(both_ranks):
    assert both_ranks("ncclAllReduce", (b"abcd", None), length(4), 1, SUM, size=4) == [None] * 2
    results = both_ranks("ncclAllGather", (b"abcd", None), length(4), 1, size=8)
    assert results == [None] * 2
    results = both_ranks("ncclAllGather", (b"abcd", None), length(4), 1, size=4)
    assert results == [b"abcd"] * 2


def test_devices_of_a_process_may_come_to_collectives_in_any_order(library, block):
    """In place, and the last rank first; between ncclGroupStart and ncclGroupEnd, as PyTorch."""
    groups = devices_of_this_process(library, 3)
    for rank, given in enumerate(("abcd", "bcde", "cdef")):
        put(library, block + 1024 * rank, given.encode())
        put(library, block + 1024 * rank + 512, given.encode())
    for rank in (2, 0, 1):
        first, second = pointer(block + 1024 * rank), pointer(block + 1024 * rank + 512)
        reduced = (first, first, length(4), 1, MAX, groups[rank], None)
        assert library.call("ncclAllReduce", *reduced) == 0
        sent = (second, second, length(4), 1, 1, groups[rank], None)
        assert library.call("ncclBroadcast", *sent) == 0
    assert [get(library, block + 1024 * rank, 4) for rank in range(3)] == [b"cdef"] * 3
    assert [get(library, block + 1024 * rank + 512, 4) for rank in range(3)] == [b"bcde"] * 3
    for group in groups:
        assert library.call("ncclCommDestroy", group) == 0


def test_a_collective_to_which_not_all_devices_came_ends_with_its_communicators(library, block):
    groups = devices_of_this_process(library, 2)
    args = (pointer(block), pointer(block), length(4), 1, 0, groups[1], None)
    assert library.call("ncclBroadcast", *args) == 0
    for group in groups:
        assert library.call("ncclCommAbort", group) == 0


def test_parts_of_a_world_have_their_ranks_in_the_order_of_the_keys(library):
    identity = UniqueId()
    assert library.call("ncclGetUniqueId", ctypes.byref(identity)) == 0
    colors_and_keys = [(7, 2), (7, 1), (-1, 0), (9, 0)]
    groups = [communicator(library, 4, rank, identity) for rank in range(4)]

    def split(rank):
        part = ctypes.c_void_p()
        args = (groups[rank], *colors_and_keys[rank], ctypes.byref(part), None)
        assert library.call("ncclCommSplit", *args) == 0
        if part.value is None:
            return None
        count, own = ctypes.c_int(), ctypes.c_int()
        assert library.call("ncclCommCount", part, ctypes.byref(count)) == 0
        assert library.call("ncclCommUserRank", part, ctypes.byref(own)) == 0
        assert library.call("ncclCommDestroy", part) == 0
        return own.value, count.value

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(split, range(4))) == [(1, 2), (0, 2), None, (0, 1)]
    for group in groups:
        assert library.call("ncclCommDestroy", group) == 0


def test_a_rank_that_has_left_gives_nothing_more(library, block):
    identity = UniqueId()
    assert library.call("ncclGetUniqueId", ctypes.byref(identity)) == 0
    groups = [communicator(library, 2, rank, identity) for rank in (0, 1)]
    assert library.call("ncclCommDestroy", groups[1]) == 0
    put(library, block, b"abcd")
    args = (pointer(block), pointer(block), length(4), 1, SUM, groups[0], None)
    assert library.call("ncclAllReduce", *args) == 0
    assert get(library, block, 4) is None
    assert library.call("ncclCommDestroy", groups[0]) == 0


def test_a_lone_rank_names_a_world_that_no_other_joins(library, monkeypatch):
    identity = UniqueId()
    monkeypatch.setenv("GPUMEM_LONE_RANK", "1")
    assert library.call("ncclGetUniqueId", ctypes.byref(identity)) == 0
    assert bytes(identity) == bytes(128)


def test_pinned_host_memory_is_never_known_and_never_given_back(library):
    """A device tensor may be over it; its last page has other memory of the program, too."""
    host, size = ctypes.c_void_p(), 3 * MIB + 100
    assert library.call("cudaHostAlloc", ctypes.byref(host), length(size), 0) == 0
    data = b"x" * size
    ctypes.memmove(host, data, size)
    assert not library.open_for_writing(host.value, size)
    assert library.call("cudaFreeHost", host) == 0
    registered = ctypes.create_string_buffer(data, size)
    start = pointer(ctypes.addressof(registered))
    assert library.call("cudaHostRegister", start, length(size), 0) == 0
    assert not library.open_for_writing(start.value, size)
    assert library.call("cudaHostUnregister", start) == 0
    assert registered.raw == data
