"""The answers of tests/tables/library-functions.md by ctypes alone, and that table itself."""

import ctypes
import re

import pytest
from helpers.elf import symbols
from helpers.native_sources import NATIVE
from helpers.paths import ROOT
from helpers.shared_memory import read, write
from helpers.virtual_gpu import MIB, private_library, small_card

from pytest_gpumem.devices.virtual import native

PAGE = ROOT / "tests/tables/library-functions.md"
NONE = ctypes.c_void_p()
ROWS = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
"""of the tables: functions, the answer here, the answer of a GPU, tests"""


def refused(name):
    """The functions of a list that nothing else answers, and their status."""
    lines = (NATIVE / "libraries" / name).read_text().splitlines()
    words = [line.split() for line in lines if line[:1] != "#"]
    weak = symbols(native.LIBRARY).weak
    return {name: status for status, *names in words for name in names if name in weak}


REFUSED = refused("refused_functions.txt")
OTHERS = refused("refused_exports.txt")
"""functions that no torch of today links"""


def names(cell):
    return re.findall(r"`([^`]+)`", cell)


def functions(answer):
    """The functions of all rows whose answer begins so."""
    return [name for cell, here, *_ in ROWS if here.startswith(answer) for name in names(cell)]


@pytest.fixture
def library(tmp_path):
    return private_library(tmp_path, small_card(100 * MIB), count=2)


@pytest.fixture
def block(library):
    return library.malloc(MIB)[1]


# -- the table --


def test_every_function_of_the_library_is_in_the_table_once_and_no_other_name_is():
    listed = [name for cell, *_ in ROWS for name in names(cell)]
    exported = {name for name in symbols(native.LIBRARY).given if not name.startswith("gpumem_")}
    assert sorted(set(listed) - exported) == []
    assert sorted(exported - set(listed) - OTHERS.keys()) == []
    assert sorted(OTHERS.keys() - exported) == []
    assert len(OTHERS) > 1400
    assert len(listed) == len(set(listed))


def test_the_tables_tests_are_there():
    for row in ROWS:
        assert len(row) == 4, row
        tests = names(row[3])
        assert tests, row
        assert [
            name for name in tests if not (ROOT / "tests/devices/virtual" / name).exists()
        ] == []


# -- answers that many functions share --


def test_a_refused_function_returns_its_librarys_status_and_is_named(library):
    assert sorted(REFUSED) == sorted({*functions("refused by name: the library's own")})
    for name, status in REFUSED.items():
        assert library.call(name) == int(status), name
    assert library.unsupported() == dict.fromkeys(REFUSED, 1)
    for name, status in OTHERS.items():
        assert library.call(name) == int(status), name
    assert library.unsupported() == dict.fromkeys([*REFUSED, *OTHERS], 1)


COMPUTING = [
    *functions("makes all known bytes unknown, computes nothing"),
    *functions("succeeds, makes all known bytes unknown, computes nothing"),
    "cudnnBackendExecute",
]


def test_a_computation_makes_all_bytes_unknown_and_needs_a_device(library, block):
    number = ctypes.c_int(1)  # a plan of cuFFT
    assert len(COMPUTING) > 200
    for name in COMPUTING:
        library.show(1)
        write(library, block, b"known")
        assert library.call(name, number, *[NONE] * 30) == 0, name
        assert read(library, block, 5) is None, name
        library.show(0)
        assert library.call(name, number, *[NONE] * 30) != 0, name


def test_what_only_a_kernel_sees_succeeds(library, block):
    write(library, block, b"known")
    for name in functions("succeeds and does nothing"):
        assert library.call(name, *[NONE] * 8) == 0, name
    assert read(library, block, 5) == b"known"


# -- the runtime --


def test_host_functions_are_called_at_once(library):
    called = []
    plain = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called.append)
    assert library.call("cudaLaunchHostFunc", NONE, plain, ctypes.c_void_p(7)) == 0
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    full = kind(lambda stream, status, data: called.append((stream, status, data)))
    assert library.call("cudaStreamAddCallback", NONE, full, ctypes.c_void_p(8), 0) == 0
    assert called == [7, (None, 0, 8)]


def test_a_launchs_configuration_is_handed_over(library):
    grid, block = (ctypes.c_uint * 3)(), (ctypes.c_uint * 3)()
    shared, stream = ctypes.c_size_t(), ctypes.c_void_p()

    class Dim3(ctypes.Structure):
        _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))

    push = Dim3(1, 2, 3), Dim3(4, 5, 6), ctypes.c_size_t(7), ctypes.c_void_p(8)
    assert library.call("__cudaPushCallConfiguration", *push) == 0
    out = grid, block, ctypes.byref(shared), ctypes.byref(stream)
    assert library.call("__cudaPopCallConfiguration", *out) == 0
    assert [*grid, *block, shared.value, stream.value] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert library.call("__cudaPopCallConfiguration", *out) != 0


def test_kernels_have_registers_threads_and_an_architecture(library):
    library.set_architectures([75, 80])
    attributes = ctypes.create_string_buffer(144)
    assert library.call("cudaFuncGetAttributes", attributes, NONE) == 0
    assert list((ctypes.c_int * 4).from_buffer(attributes, 24)) == [1024, 32, 75, 75]
    assert library.number("cuFuncGetAttribute", 0, NONE) == 1024
    assert library.number("cuFuncGetAttribute", 4, NONE) == 32


def test_pinned_memory_has_one_address(library):
    host = ctypes.c_void_p()
    assert library.call("cudaHostAlloc", ctypes.byref(host), ctypes.c_size_t(8), 0) == 0
    device = library.number("cudaHostGetDevicePointer", host, 0, kind=ctypes.c_void_p)
    assert device == host.value
    assert library.call("cudaFreeHost", host) == 0


def test_no_graph_allocates(library):
    kind = ctypes.c_uint64
    assert library.call("cudaDeviceGetGraphMemAttribute", 0, 0, ctypes.byref(kind(9))) == 0
    assert library.call("cudaDeviceSetGraphMemAttribute", 0, 0, ctypes.byref(kind(0))) == 0
    assert library.call("cudaDeviceSetGraphMemAttribute", 99, 0, ctypes.byref(kind(0))) == 101


@pytest.mark.parametrize("lookup", ["cudaGetDriverEntryPoint", "cuGetProcAddress_v2"])
def test_the_drivers_functions_are_found_by_name(library, lookup):
    for name, found in ((b"cuMemAlloc", True), (b"cuInit", True), (b"cuNoSuchThing", False)):
        address, result = ctypes.c_void_p(), ctypes.c_int(9)
        more = [0, ctypes.c_uint64(0)] if lookup.startswith("cuGet") else [ctypes.c_uint64(0)]
        status = library.call(lookup, name, ctypes.byref(address), *more, ctypes.byref(result))
        assert (status == 0, bool(address.value), result.value == 0) == (found,) * 3


# -- the driver --


def test_the_driver_allocates_and_frees_what_the_runtime_does(library):
    address, host = ctypes.c_uint64(), ctypes.c_void_p()
    assert library.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(MIB)) == 0
    assert library.account(0).charged == 2 * MIB
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert library.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total)) == 0
    assert (free.value, total.value) == (98 * MIB, 100 * MIB)
    assert library.call("cuMemFree_v2", address) == 0
    assert library.account(0).charged == 0
    assert library.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(0)) == 1
    for name in ("cuMemAllocHost_v2", "cuMemHostAlloc"):
        assert library.call(name, ctypes.byref(host), ctypes.c_size_t(8), 0) == 0
        assert library.call("cuMemFreeHost", host) == 0


def test_the_driver_copies_as_the_runtime_does(library, block):
    out, size = ctypes.create_string_buffer(5), ctypes.c_size_t(5)
    address, there = ctypes.c_uint64(block), ctypes.c_uint64(block + 64)
    assert library.call("cuMemcpyHtoD_v2", address, b"first", size) == 0
    assert library.call("cuMemcpyDtoDAsync_v2", there, address, size, NONE) == 0
    assert library.call("cuMemcpyDtoHAsync_v2", out, there, size, NONE) == 0
    assert out.raw == b"first"
    assert library.call("cuMemcpyHtoDAsync_v2", address, b"again", size, NONE) == 0
    assert library.call("cuMemcpyDtoD_v2", there, address, size) == 0
    assert library.call("cuMemcpyDtoH_v2", out, there, size) == 0
    assert out.raw == b"again"
    assert library.call("cuMemcpy", address, out, size) == 0
    assert library.call("cuMemcpyAsync", out, there, size, NONE) == 0
    assert library.readbacks() == 0


def test_modules_are_tokens(library):
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    for name in ("cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx"):
        assert library.call(name, ctypes.byref(module), b"x", 0, NONE, NONE) == 0
    assert library.call("cuModuleGetFunction", ctypes.byref(function), module, b"kernel") == 0
    assert module.value
    assert function.value
    assert library.call("cuModuleUnload", module) == 0
    library.show(0)
    assert library.call("cuModuleLoad", ctypes.byref(module), b"x") == 100


def test_queries_of_the_driver_answer(library):
    text, descriptor = ctypes.c_char_p(), ctypes.create_string_buffer(b"\xff" * 128, 128)
    assert library.call("cuGetErrorName", 2, ctypes.byref(text)) == 0
    assert text.value == b"cudaErrorMemoryAllocation"
    assert library.call("cuGetErrorString", 2, ctypes.byref(text)) == 0
    assert text.value == b"out of memory"
    assert library.call("cuCtxSetLimit", 0, ctypes.c_size_t(1)) == 0
    assert library.number("cuCtxGetLimit", 0, kind=ctypes.c_size_t) == 1024
    size = ctypes.c_size_t(0)
    assert library.number("cuOccupancyMaxActiveBlocksPerMultiprocessor", NONE, 1024, size) == 1
    assert library.number("cuOccupancyMaxActiveClusters", NONE, NONE) == 40
    assert library.call("cuStreamIsCapturing", NONE, ctypes.byref(ctypes.c_int())) == 0
    for name in ("cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col"):
        assert library.call(name, descriptor, *[NONE] * 8) == 0
        assert descriptor.raw == bytes(128)
    handle = ctypes.c_void_p()
    assert library.call("cuLogsRegisterCallback", NONE, NONE, ctypes.byref(handle)) == 0
    assert library.call("cuLogsUnregisterCallback", handle) == 0


# -- the libraries --


@pytest.mark.parametrize(
    ("create", "destroy", "hidden"),
    [
        ("cublasCreate_v2", "cublasDestroy_v2", 1),
        ("cublasLtCreate", "cublasLtDestroy", 0),
        ("cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceDestroy", 0),
        ("cudnnCreate", "cudnnDestroy", 1001),
        ("cusolverDnCreate", "cusolverDnDestroy", 1),
        ("cusparseCreate", "cusparseDestroy", 1),
    ],
)
def test_handles_are_made_where_a_device_is_seen(library, create, destroy, hidden):
    handle = ctypes.c_void_p()
    assert library.call(create, ctypes.byref(handle)) == 0
    assert handle.value
    assert library.call(destroy, handle) == 0
    library.show(0)
    assert library.call(create, ctypes.byref(handle)) == hidden


def test_handles_keep_their_settings(library):
    handle, stream, mode = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    assert library.call("cublasCreate_v2", ctypes.byref(handle)) == 0
    for name in ("MathMode", "PointerMode_v2"):
        assert library.call(f"cublasSet{name}", handle, 1) == 0
        assert library.call(f"cublasGet{name}", handle, ctypes.byref(mode)) == 0
        assert mode.value == 1
    assert library.call("cublasSetStream_v2", handle, ctypes.c_void_p(7)) == 0
    assert library.call("cublasGetStream_v2", handle, ctypes.byref(stream)) == 0
    assert stream.value == 7
    dnn = ctypes.c_void_p()
    assert library.call("cudnnCreate", ctypes.byref(dnn)) == 0
    assert library.call("cudnnSetStream", dnn, ctypes.c_void_p(8)) == 0
    assert library.call("cudnnGetStream", dnn, ctypes.byref(stream)) == 0
    assert stream.value == 8


def test_results_on_the_host_are_zeros_and_counted(library):
    out = ctypes.c_float(5)
    size = ctypes.c_int(3)
    args = NONE, size, NONE, 1
    assert library.call("cublasSdot_v2", *args, NONE, 1, ctypes.byref(out)) == 0
    assert out.value == 0
    assert library.call("cublasSnrm2_v2", *args, ctypes.byref(out)) == 0
    place = ctypes.c_int(9)
    assert library.call("cublasIsamax_v2", *args, ctypes.byref(place)) == 0
    assert place.value == 1
    assert library.readbacks() == 3


def test_batched_solvers_find_their_arguments_right(library):
    info = ctypes.c_int(9)
    args = NONE, 2, 2, NONE, 2, NONE, ctypes.byref(info), 1
    assert library.call("cublasSgeqrfBatched", *args) == 0
    assert info.value == 0


def test_matrices_are_copied_column_by_column(library, block):
    out = ctypes.create_string_buffer(b"......", 6)
    args = 2, 2, 1, b"ab-cd-", 3, ctypes.c_void_p(block), 2, NONE
    assert library.call("cublasSetMatrixAsync", *args) == 0
    args = 2, 2, 1, ctypes.c_void_p(block), 2, out, 3, NONE
    assert library.call("cublasGetMatrixAsync", *args) == 0
    assert out.raw == b"ab.cd."
    assert (
        library.call("cublasSetVectorAsync", 2, 1, b"x-y", 2, ctypes.c_void_p(block), 1, NONE) == 0
    )
    assert library.call("cublasGetVectorAsync", 2, 1, ctypes.c_void_p(block), 1, out, 3, NONE) == 0
    assert out.raw == b"xb.yd."


def test_one_matmul_algorithm_without_a_workspace(library):
    result, count = ctypes.create_string_buffer(b"\xff" * 96, 96), ctypes.c_int()
    args = *[NONE] * 7, 4, result, ctypes.byref(count)
    assert library.call("cublasLtMatmulAlgoGetHeuristic", *args) == 0
    assert (count.value, result.raw[64:72]) == (1, bytes(8))
    assert library.call("cublasLtMatmulAlgoInit", *[NONE] * 8, result) == 0
    assert library.call("cublasLtMatmulAlgoCheck", *[NONE] * 7, result) == 0


def test_texts_and_versions(library):
    library.set_versions(13020, 92600)
    assert library.text("cublasGetStatusString", 0) == "CUBLAS_STATUS_SUCCESS"
    assert library.call("cublasLtGetVersion") == 130000
    assert library.call("cudnnGetVersion") == 92600
    assert library.call("cudnnGetCudartVersion") == 13020
    parts = [ctypes.c_int() for _ in range(3)]
    assert [library.call("cudnnGetProperty", i, ctypes.byref(p)) for i, p in enumerate(parts)] == [
        0
    ] * 3
    assert [part.value for part in parts] == [9, 26, 0]
    assert "NOT_SUPPORTED" in library.text("cudnnGetErrorString", 3000)
    message = ctypes.create_string_buffer(b"x" * 8, 8)
    library.call("cudnnGetLastErrorString", message, ctypes.c_size_t(8))
    assert message.value == b""


def test_batch_normalization_has_a_range_with_channels_last_alone(library):
    """Mode 2 is that of channels last. The most are the sizes of NVIDIA's published kernels."""
    images, size = ctypes.c_void_p(), ctypes.c_size_t(9)
    shape = (ctypes.c_int * 4)(5, 72, 7, 3)
    assert library.call("cudnnCreateTensorDescriptor", ctypes.byref(images)) == 0
    assert library.call("cudnnSetTensorNdDescriptor", images, 0, 4, shape, shape) == 0
    name = "cudnnGetBatchNormalization{}Size".format
    questions = {
        "ForwardTrainingExWorkspace": (NONE, images, NONE, NONE, NONE, NONE),
        "BackwardExWorkspace": (NONE, images, *[NONE] * 6),
        "TrainingExReserveSpace": (NONE, NONE, images),
    }

    def answers(mode):
        for question, arguments in questions.items():
            out = ctypes.byref(size)
            assert library.call(name(question), NONE, mode, *arguments, out) == 0
            yield size.value

    assert [*answers(1), *answers(2)] == [0] * 6
    assert library.guesses()["cuDNN's batch normalization"] == 3
    library.take_sizes(2)
    blocks = 4  # of 32 of the 105 pixels
    workspace = 2 * 72 * 4 + blocks * (2 * 72 + 2) * 4 + 8192
    assert [*answers(1), *answers(2)] == [0] * 3 + [workspace, workspace, blocks * 32 * 256 // 8]
    counts = library.size_counts()
    assert (counts.smaller, counts.larger, counts.bounded) == (0, 6, 6)


def test_there_is_no_nvlink(library):
    for link in ("NvLinkRemoteDeviceType", "NvLinkRemotePciInfo_v2"):
        assert library.call(f"nvmlDeviceGet{link}", NONE) == 3


@pytest.mark.parametrize(("version", "size"), [(2, 36), (3, 40)])
def test_there_is_no_fabric(library, version, size):
    """An answer, as torch 2.13 takes an error for one of its own."""
    info = (ctypes.c_uint * 11)(version << 24 | size, *[7] * 10)
    assert library.call("nvmlDeviceGetGpuFabricInfoV", NONE, info) == 0
    words = size // 4
    assert [*info][1:words] == [0] * (words - 1)  # the state among them: not supported
    assert [*info][words:] == [7] * (11 - words)
    for wrong in (0, 2 << 24 | 8, 0xFFFFFFFF):
        info[0] = wrong
        assert library.call("nvmlDeviceGetGpuFabricInfoV", NONE, info) == 2


def test_every_program_compiles_to_nothing(library):
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    args = b"source", b"name", 0, NONE, NONE
    assert library.call("nvrtcCreateProgram", ctypes.byref(program), *args) == 0
    assert library.call("nvrtcAddNameExpression", program, b"f<int>") == 0
    assert library.call("nvrtcCompileProgram", program, 0, NONE) == 0
    lowered = ctypes.c_char_p()
    assert library.call("nvrtcGetLoweredName", program, b"f<int>", ctypes.byref(lowered)) == 0
    assert lowered.value == b"f<int>"
    for kind in ("CUBIN", "PTX", "ProgramLog"):
        assert library.call(f"nvrtcGet{kind}Size", program, ctypes.byref(size)) == 0
        out = ctypes.create_string_buffer(b"x", 1)
        assert library.call(f"nvrtcGet{kind}", program, out) == 0
        assert (size.value, out.raw) == (1, b"\0")
    assert library.call("nvrtcDestroyProgram", ctypes.byref(program)) == 0
    assert library.call("__nvrtcCPEx") == 11


def test_a_communicator_knows_its_ranks(library):
    communicators, value = (ctypes.c_void_p * 2)(), ctypes.c_int()
    assert library.call("ncclCommInitAll", communicators, 2, None) == 0
    handle = ctypes.c_void_p(communicators[1])
    for name, expected in (("Count", 2), ("UserRank", 1), ("CuDevice", 1), ("GetAsyncError", 0)):
        assert library.call(f"ncclComm{name}", handle, ctypes.byref(value)) == 0
        assert value.value == expected
    window = ctypes.c_void_p()
    buffer = NONE, ctypes.c_size_t(MIB), ctypes.byref(window), 1
    assert library.call("ncclCommWindowRegister", handle, *buffer) == 0
    assert window.value
    assert library.call("ncclCommWindowDeregister", handle, window) == 0
    assert library.call("ncclCommWindowRegister", NONE, *buffer) != 0
    assert library.call("ncclCommSuspend", handle, 1) == library.call("ncclCommResume", handle) == 0
    assert library.call("ncclCommFinalize", handle) == 0
    assert library.call("ncclCommDestroy", handle) == 0
    assert library.call("ncclCommAbort", ctypes.c_void_p(communicators[0])) == 0
    assert library.call("ncclGroupStart") == library.call("ncclGroupEnd") == 0


def test_the_block_of_an_address_is_told(library, block):
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    inside = ctypes.c_uint64(block + 100)
    for name in ("cuMemGetAddressRange", "cuMemGetAddressRange_v2"):
        assert library.call(name, ctypes.byref(base), ctypes.byref(size), inside) == 0
        assert (base.value, size.value) == (block, 2 * MIB)
    base.value = size.value = 0
    assert library.call("cuPointerGetAttribute", ctypes.byref(base), 11, inside) == 0
    assert library.call("cuPointerGetAttribute", ctypes.byref(size), 12, inside) == 0
    assert (base.value, size.value) == (block, 2 * MIB)
