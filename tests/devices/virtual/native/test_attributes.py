"""What the native library answers of itself, by ctypes alone: properties, attributes, errors."""

import ctypes
import struct
import sys

import pytest
from helpers.virtual_gpu import MIB, private_library, small_card

from pytest_gpumem.devices.cards import CARDS

NO_DEVICE, INVALID_DEVICE, NOT_SUPPORTED = 100, 101, 801

# offsetof(struct cudaDeviceProp, ...) in driver_types.h of nvidia-cuda-runtime-cu12 12.6 and of
# nvidia-cuda-runtime 13.2; i: int, Q: size_t
SIZES = {12: 1032, 13: 1008}
OFFSETS = {
    12: {
        "totalGlobalMem": (288, "Q"),
        "sharedMemPerBlock": (296, "Q"),
        "regsPerBlock": (304, "i"),
        "warpSize": (308, "i"),
        "maxThreadsPerBlock": (320, "i"),
        "major": (360, "i"),
        "minor": (364, "i"),
        "multiProcessorCount": (388, "i"),
        "pciBusID": (584, "i"),
        "unifiedAddressing": (604, "i"),
        "memoryBusWidth": (612, "i"),
        "l2CacheSize": (616, "i"),
        "maxThreadsPerMultiProcessor": (624, "i"),
        "sharedMemPerMultiprocessor": (640, "Q"),
        "regsPerMultiprocessor": (648, "i"),
        "cooperativeLaunch": (688, "i"),
        "sharedMemPerBlockOptin": (696, "Q"),
        "maxBlocksPerMultiProcessor": (712, "i"),
        "reservedSharedMemPerBlock": (720, "Q"),
        "memoryPoolsSupported": (744, "i"),
        "clusterLaunch": (772, "i"),
    },
    13: {
        "totalGlobalMem": (288, "Q"),
        "sharedMemPerBlock": (296, "Q"),
        "regsPerBlock": (304, "i"),
        "warpSize": (308, "i"),
        "maxThreadsPerBlock": (320, "i"),
        "major": (360, "i"),
        "minor": (364, "i"),
        "multiProcessorCount": (384, "i"),
        "pciBusID": (568, "i"),
        "unifiedAddressing": (588, "i"),
        "memoryBusWidth": (592, "i"),
        "l2CacheSize": (596, "i"),
        "maxThreadsPerMultiProcessor": (604, "i"),
        "sharedMemPerMultiprocessor": (624, "Q"),
        "regsPerMultiprocessor": (632, "i"),
        "cooperativeLaunch": (668, "i"),
        "sharedMemPerBlockOptin": (672, "Q"),
        "maxBlocksPerMultiProcessor": (688, "i"),
        "reservedSharedMemPerBlock": (696, "Q"),
        "memoryPoolsSupported": (720, "i"),
        "clusterLaunch": (748, "i"),
    },
}
FUNCTION = {12: "cudaGetDeviceProperties_v2", 13: "cudaGetDeviceProperties"}


@pytest.fixture
def library(tmp_path):
    return private_library(tmp_path, "H100", count=2)


def properties(library, cuda, device=1):
    """Return cudaDeviceProp's fields by name, and the bytes that nobody wrote."""
    raw = ctypes.create_string_buffer(b"\xaa" * 2048, 2048)
    assert library.call(FUNCTION[cuda], raw, device) == 0
    fields = {
        name: struct.unpack_from(kind, raw.raw, offset)[0]
        for name, (offset, kind) in OFFSETS[cuda].items()
    }
    return {**fields, "name": raw.raw[:256].split(b"\0")[0].decode()}, raw.raw


@pytest.mark.parametrize("cuda", [12, 13])
@pytest.mark.parametrize("name", ["H100", "T4", "RTX 3090"])
def test_the_properties_are_the_cards_in_either_layout(library, cuda, name):
    card = CARDS[name]
    library.set_card(card)
    found, raw = properties(library, cuda)
    assert found == {
        "name": card.device_name,
        "totalGlobalMem": card.total_memory,
        "sharedMemPerBlock": 48 * 1024,
        "regsPerBlock": 65536,
        "warpSize": 32,
        "maxThreadsPerBlock": 1024,
        "major": card.capability[0],
        "minor": card.capability[1],
        "multiProcessorCount": card.sm_count,
        "pciBusID": 2,
        "unifiedAddressing": 1,
        "memoryBusWidth": card.memory_bus_width,
        "l2CacheSize": card.l2_cache_size,
        "maxThreadsPerMultiProcessor": card.limits.max_threads_per_sm,
        "sharedMemPerMultiprocessor": card.limits.shared_memory_per_sm,
        "regsPerMultiprocessor": card.limits.registers_per_sm,
        "cooperativeLaunch": 1,
        "sharedMemPerBlockOptin": card.limits.shared_memory_per_block_optin,
        "maxBlocksPerMultiProcessor": card.limits.max_blocks_per_sm,
        "reservedSharedMemPerBlock": card.limits.reserved_shared_memory_per_block,
        "memoryPoolsSupported": 1,
        "clusterLaunch": int(card.capability >= (9, 0)),
    }
    assert raw[SIZES[cuda] :] == b"\xaa" * (2048 - SIZES[cuda])  # it writes no byte more


@pytest.mark.parametrize("cuda", [12, 13])
def test_what_pytorch_keeps_can_be_written_anew(library, cuda):
    kept = ctypes.create_string_buffer(SIZES[cuda])
    library.fill_properties(ctypes.addressof(kept), 1, cuda)
    assert kept.raw == properties(library, cuda)[1][: SIZES[cuda]]


def test_each_device_has_an_id_of_its_own(library):
    uuids = {properties(library, 13, device)[1][256:272] for device in range(16)}
    assert len(uuids) == 16


def test_there_is_no_seventeenth_device(library):
    raw = ctypes.create_string_buffer(2048)
    for device in (-1, 16):
        assert library.call("cudaGetDeviceProperties", raw, device) == INVALID_DEVICE
        assert library.call("cudaSetDevice", device) == INVALID_DEVICE
    assert library.number("cudaGetDeviceCount") == 16


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (1, 1024),  # cudaDevAttrMaxThreadsPerBlock
        (8, 48 * 1024),  # cudaDevAttrMaxSharedMemoryPerBlock
        (10, 32),  # cudaDevAttrWarpSize
        (16, 132),  # cudaDevAttrMultiProcessorCount
        (39, 2048),  # cudaDevAttrMaxThreadsPerMultiProcessor
        (75, 9),  # cudaDevAttrComputeCapabilityMajor
        (76, 0),  # cudaDevAttrComputeCapabilityMinor
        (81, 228 * 1024),  # cudaDevAttrMaxSharedMemoryPerMultiprocessor
        (97, 227 * 1024),  # cudaDevAttrMaxSharedMemoryPerBlockOptin
        (106, 32),  # cudaDevAttrMaxBlocksPerMultiprocessor
    ],
)
def test_attributes_are_the_cards(library, number, value):
    for function in ("cudaDeviceGetAttribute", "cuDeviceGetAttribute"):
        assert library.number(function, number, 0) == value


def test_an_attribute_that_nobody_knows_is_refused(library, capfd):
    value = ctypes.c_int(7)
    assert library.call("cudaDeviceGetAttribute", ctypes.byref(value), 9999, 0) != 0
    assert value.value == 7
    assert "cudaDeviceGetAttribute" in capfd.readouterr().err


def test_function_attributes_are_written_whole(library):
    raw = ctypes.create_string_buffer(b"\xaa" * 160, 160)
    assert library.call("cudaFuncGetAttributes", raw, None) == 0
    assert struct.unpack_from("iiii", raw.raw, 24) == (1024, 32, 90, 90)
    assert raw.raw[56:144] == b"\0" * 88  # sizeof(struct cudaFuncAttributes) is 144
    assert raw.raw[144:] == b"\xaa" * 16


@pytest.mark.parametrize(
    ("block", "shared", "blocks"),
    [(1024, 0, 2), (128, 0, 16), (32, 0, 32), (128, 100 * 1024, 2), (128, 228 * 1024, 0)],
)
def test_occupancy_follows_the_sms_limits(library, block, shared, blocks):
    name = "cudaOccupancyMaxActiveBlocksPerMultiprocessor"
    assert library.number(name, None, block, ctypes.c_size_t(shared)) == blocks


@pytest.mark.parametrize(
    ("status", "name", "words"),
    [
        (0, "cudaSuccess", "no error"),
        (2, "cudaErrorMemoryAllocation", "out of memory"),
        (100, "cudaErrorNoDevice", "only in tests marked gpu_memory; --gpumem-visible=session"),
        (101, "cudaErrorInvalidDevice", "devices=N"),
        (801, "cudaErrorNotSupported", "the virtual GPU does not support this"),
        (31337, "cudaErrorUnknown", "unknown error"),
    ],
)
def test_errors_have_cudas_names_and_tell_what_to_do(library, status, name, words):
    assert library.text("cudaGetErrorName", status) == name
    assert words in library.text("cudaGetErrorString", status)


def test_the_last_error_is_kept_until_it_is_read(library):
    assert library.call("cudaSetDevice", 99) == INVALID_DEVICE
    assert library.call("cudaPeekAtLastError") == INVALID_DEVICE
    assert library.call("cudaGetLastError") == INVALID_DEVICE
    assert library.call("cudaGetLastError") == 0


def test_versions_are_those_that_pytorch_was_built_for(library):
    library.set_versions(12060, 99901)  # an installed cuDNN that is newer would be told
    assert library.number("cudaRuntimeGetVersion") == 12060
    assert library.number("cudaDriverGetVersion") == 12060
    assert library.call("cudnnGetVersion") == 99901
    version = ctypes.c_int()
    parts = [
        (library.call("cudnnGetProperty", kind, ctypes.byref(version)), version.value)[1]
        for kind in range(3)
    ]
    assert parts == [9, 99, 1]


# ---- hidden and shown ----


def test_a_hidden_device_gives_no_memory_and_runs_nothing(library):
    library.show(0)
    assert library.malloc(512)[0] == NO_DEVICE
    stream = ctypes.c_void_p()
    assert library.call("cudaStreamCreate", ctypes.byref(stream)) == NO_DEVICE
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert library.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total)) == NO_DEVICE
    assert library.call("cublasCreate_v2", ctypes.byref(stream)) != 0
    assert library.call("cudnnCreate", ctypes.byref(stream)) != 0


def test_a_hidden_devices_memory_can_still_be_freed(library):
    """A tensor may die after its test has ended."""
    _, address = library.malloc(512)
    library.show(0)
    assert library.free(address) == 0
    assert library.account(0).charged == 0


def test_the_driver_and_nvml_see_no_device_while_it_is_hidden(library):
    library.show(0)
    assert library.call("cuInit", 0) == NO_DEVICE
    count = ctypes.c_int(7)
    assert library.call("cuDeviceGetCount", ctypes.byref(count)) == NO_DEVICE
    assert count.value == 0
    assert library.call("nvmlInit_v2") != 0
    assert "marked tests" in library.text("nvmlErrorString", library.call("nvmlInit_v2"))


def test_the_driver_and_nvml_see_the_devices_that_are_shown(library):
    assert library.call("cuInit", 0) == 0
    assert library.number("cuDeviceGetCount") == 2
    assert library.number("cuDeviceGet", 1) == 1
    assert library.call("cuDeviceGet", ctypes.byref(ctypes.c_int()), 2) == INVALID_DEVICE
    assert library.call("nvmlInit_v2") == 0
    assert library.number("nvmlDeviceGetCount_v2", kind=ctypes.c_uint) == 2


def test_the_runtime_counts_truly_whether_shown_or_not(library):
    """PyTorch asks once in a process and keeps the answer."""
    library.show(0)
    assert library.number("cudaGetDeviceCount") == 16


def test_showing_says_how_many_were_shown_before(library):
    assert library.show(3) == 2
    assert library.show(0) == 3
    assert library.show(99) == 0
    assert library.show(0) == 16


# ---- what is not supported ----

REFUSED = "cuGreenCtxCreate"


def test_what_is_not_supported_is_refused_said_once_and_kept(library, capfd):
    assert library.unsupported() == {}
    for _ in range(3):
        assert library.call(REFUSED) == NOT_SUPPORTED
    said = capfd.readouterr().err
    assert said == f"pytest-gpumem: the virtual GPU does not support {REFUSED}\n"
    assert library.unsupported() == {REFUSED: 3}


def test_a_driver_function_that_is_not_there_is_not_found(library):
    function, result = ctypes.c_void_p(1), ctypes.c_int()
    outs = ctypes.byref(function), 12000, ctypes.c_uint64(0), ctypes.byref(result)
    assert library.call("cudaGetDriverEntryPointByVersion", b"cuNoSuchThing", *outs) != 0
    assert (function.value, result.value) == (None, 1)
    assert library.call("cudaGetDriverEntryPointByVersion", b"cuMemCreate", *outs) == 0
    assert function.value
    assert result.value == 0
    assert library.call("cuGetProcAddress_v2", b"cuCtxPushCurrent", *outs) == 0


# ---- streams, events, capture ----


def test_a_stream_joins_the_capture_whose_event_it_waits_for(library):
    first, second, event = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    library.call("cudaStreamCreate", ctypes.byref(first))
    library.call("cudaStreamCreate", ctypes.byref(second))
    library.call("cudaEventCreate", ctypes.byref(event))
    status, graph = ctypes.c_int(), ctypes.c_void_p()

    def capturing(stream):
        assert library.call("cudaStreamIsCapturing", stream, ctypes.byref(status)) == 0
        return status.value

    assert library.call("cudaStreamBeginCapture", first, 0) == 0
    assert (capturing(first), capturing(second)) == (1, 0)
    library.call("cudaEventRecord", event, first)
    library.call("cudaStreamWaitEvent", second, event, 0)
    assert capturing(second) == 1
    assert library.call("cudaStreamEndCapture", first, ctypes.byref(graph)) == 0
    assert (capturing(first), capturing(second)) == (0, 0)
    assert graph.value
    library.call("cudaGraphDestroy", graph)


def test_an_event_after_a_capture_can_be_waited_for(library):
    """The event of an ended capture is an ordinary one, as any that was not captured."""
    stream, event, graph = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    library.call("cudaStreamCreate", ctypes.byref(stream))
    library.call("cudaEventCreate", ctypes.byref(event))
    library.call("cudaStreamBeginCapture", stream, 0)
    library.call("cudaStreamEndCapture", stream, ctypes.byref(graph))
    library.call("cudaEventRecord", event, stream)
    assert library.call("cudaEventSynchronize", event) == 0
    assert library.call("cudaStreamWaitEvent", stream, event, 0) == 0
    library.call("cudaGraphDestroy", graph)


def test_the_time_between_two_events_passes(library):
    events = [ctypes.c_void_p(), ctypes.c_void_p()]
    for event in events:
        library.call("cudaEventCreate", ctypes.byref(event))
    elapsed = ctypes.c_float(-1)
    assert library.call("cudaEventElapsedTime", ctypes.byref(elapsed), *events) != 0
    for event in events:
        library.call("cudaEventRecord", event, None)
    assert library.call("cudaEventElapsedTime", ctypes.byref(elapsed), *events) == 0
    assert elapsed.value >= 0


# ---- peers ----


def test_peers_reach_each_other_once(library):
    can = library.number("cudaDeviceCanAccessPeer", 0, 1)
    assert can == 1
    assert library.number("cudaDeviceCanAccessPeer", 0, 0) == 0
    assert library.call("cudaDeviceEnablePeerAccess", 1, 0) == 0
    assert library.call("cudaDeviceEnablePeerAccess", 1, 0) == 704  # already enabled
    assert library.call("cudaDeviceEnablePeerAccess", 0, 0) == INVALID_DEVICE


def test_a_context_reserved_for_the_card_is_not_free(tmp_path):
    library = private_library(tmp_path, small_card(64 * MIB, context=10 * MIB))
    assert library.memory_info() == (54 * MIB, 64 * MIB)


@pytest.mark.parametrize(
    ("constants", "function", "field"),
    [
        ("LIMITS", "value_limits", "small"),
        ("CAPACITIES", "capacities", "devices"),
        ("CAPACITIES", "capacities", "card"),
        ("CAPACITIES", "capacities", "account"),
    ],
)
def test_a_library_of_another_version_is_refused(tmp_path, monkeypatch, constants, function, field):
    module = "pytest_gpumem.devices.virtual.library"
    own = getattr(sys.modules[module], constants)
    monkeypatch.setattr(f"{module}.{constants}", own._replace(**{field: 1}))
    with pytest.raises(OSError, match=rf"another version \(its gpumem_{function} has \("):
        private_library(tmp_path)


def test_a_library_that_does_not_tell_its_sizes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("ctypes.CDLL.__getattr__", older_library)
    with pytest.raises(OSError, match=r"its gpumem_capacities has \(0, 0"):
        private_library(tmp_path)


def older_library(library, name):
    if name.endswith("capacities"):
        message = f"{library._name}: undefined symbol: {name}"
        raise AttributeError(message)
    return library[name]
