"""cuFFT's, cuSOLVER's, cuSPARSE's and CUPTI's answers, by ctypes alone."""

import ctypes
import re

import pytest
from helpers.native_sources import NATIVE, SOURCES
from helpers.virtual_gpu import private_library

from pytest_gpumem.devices.cards import CARDS

NOTHING = ctypes.c_void_p()
FLOAT, DOUBLE, HALF, COMPLEX_FLOAT, COMPLEX_DOUBLE, COMPLEX_HALF = 0, 1, 2, 4, 5, 6  # cudaDataType


@pytest.fixture
def library(tmp_path):
    return private_library(tmp_path, "T4")


def asked(library):
    return {name for name, count in library.guesses().items() if count}


# -- the table of libraries whose sizes are estimates --


def test_every_library_that_notes_an_estimate_has_a_row_and_every_row_a_library(library):
    table = (NATIVE / "base" / "estimated_libraries.h").read_text()
    rows = re.findall(r"^ESTIMATED\((\w+)", table, flags=re.MULTILINE)
    calls = [re.findall(r"gm_note_sizes\((GM_\w+)\)", path.read_text()) for path in SOURCES]
    assert sorted(rows) == sorted({name for names in calls for name in names})
    assert len(library.estimated) == len(rows) == len({row.name for row in library.estimated})
    assert library.guesses() == {row.name: 0 for row in library.estimated}


def test_every_estimate_has_a_note_and_its_range_if_one_is_told(library):
    assert all(re.search("estimates?\\b|not include", row.note) for row in library.estimated)
    without_range = {row.name for row in library.estimated if not row.range}
    assert without_range == {"cuDNN's other plans", "cudaMallocAsync"}
    assert all("none to" in row.range for row in library.estimated if row.range)


# -- cuFFT --


def fft_plan(library, sizes, batch=1, kind=COMPLEX_FLOAT):
    """Return (status, bytes of the work area) of a plan, as PyTorch makes one."""
    plan = library.number("cufftCreate")
    assert library.call("cufftSetAutoAllocation", plan, 0) == 0
    n = (ctypes.c_longlong * len(sizes))(*sizes)
    one, size = ctypes.c_longlong(1), ctypes.c_size_t(77)
    side = NOTHING, one, one, kind
    many = ctypes.c_longlong(batch)
    out = ctypes.byref(size)
    status = library.call("cufftXtMakePlanMany", plan, len(sizes), n, *side, *side, many, out, kind)
    assert library.call("cufftXtExec", plan, NOTHING, NOTHING, -1) == 0
    assert library.call("cufftDestroy", plan) == 0
    return status, size.value


@pytest.mark.parametrize(
    ("sizes", "batch", "kind", "elements"),
    [
        ([512], 998, COMPLEX_FLOAT, 0),  # a power of two that fits into a block's shared memory
        ([4096], 1, COMPLEX_FLOAT, 0),
        ([8192], 1, COMPLEX_FLOAT, 8192 * 8),
        ([1000], 1, COMPLEX_FLOAT, 1000 * 8),
        ([64, 64], 3, COMPLEX_FLOAT, 64 * 64 * 3 * 8),
        ([8, 9, 10], 1, COMPLEX_DOUBLE, 8 * 9 * 10 * 16),
        ([1000], 1, COMPLEX_HALF, 1000 * 4),
        ([127 * 127], 1, COMPLEX_FLOAT, 127 * 127 * 8),
        ([131], 1, COMPLEX_FLOAT, 131 * 8 * 8),  # a prime above 127
        ([64, 131], 2, COMPLEX_FLOAT, 64 * 131 * 2 * 8 * 8),
    ],
)
def test_a_work_area_lies_at_a_bound_of_the_manuals(library, sizes, batch, kind, elements):
    """1 and 8 complex elements for each of the input."""
    assert asked(library) == set()
    assert fft_plan(library, sizes, batch, kind) == (0, elements)
    assert asked(library) == {"cuFFT"}


@pytest.mark.parametrize(
    ("sizes", "batch", "kind", "status"),
    [
        ([0], 1, COMPLEX_FLOAT, 4),
        ([8] * 4, 1, COMPLEX_FLOAT, 4),
        ([8], 0, COMPLEX_FLOAT, 4),
        ([8], 1, 10, 3),
    ],
)
def test_a_plan_that_cannot_be_is_refused(library, sizes, batch, kind, status):
    assert fft_plan(library, sizes, batch, kind) == (status, 77)


def test_a_plan_that_takes_its_own_memory_is_refused_by_name(library, capfd):
    plan = library.number("cufftCreate")
    assert library.call("cufftSetAutoAllocation", plan, 1) == 16
    assert "cufftSetAutoAllocation" in capfd.readouterr().err


def test_no_two_plans_have_the_same_handle(library):
    assert len({library.number("cufftCreate") for _ in range(100)}) == 100


# -- cuSOLVER --


def legacy(library, name, before, after=()):
    """Return the elements that a function with an int as its last result asks for."""
    size = ctypes.c_int(-7)
    function = f"cusolverDn{name}_bufferSize"
    assert library.call(function, NOTHING, *before, ctypes.byref(size), *after) == 0
    return size.value


A, N, M = NOTHING, 100, 300


@pytest.mark.parametrize("kind", "SDCZ")
def test_workspaces_are_what_lapack_documents(library, kind):
    """In elements; N columns, M rows."""
    matrix = A, M
    assert legacy(library, f"{kind}potrf", (0, N, *matrix)) == N * 64
    assert legacy(library, f"{kind}getrf", (M, N, *matrix)) == M * 64
    assert legacy(library, f"{kind}geqrf", (M, N, *matrix)) == N * 32
    assert legacy(library, f"{kind}sytrf", (N, *matrix)) == N * 64
    assert legacy(library, f"{kind}gesvd", (M, N)) == 3 * N + (M + N) * 32
    jacobi = 0, M, N, *matrix, A, A, M, A, N  # without vectors
    assert legacy(library, f"{kind}gesvdj", (0, *jacobi), (A,)) == M * N + M + N
    assert legacy(library, f"{kind}gesvdjBatched", jacobi, (A, 5)) == 5 * (M * N + M + N)


@pytest.mark.parametrize(("even", "orthogonal"), [("Ssyev", "Sor"), ("Zheev", "Zun")])
def test_workspaces_of_eigenvalues_and_orthogonal_matrices(library, even, orthogonal):
    assert legacy(library, f"{even}d", (0, 0, N, A, N, A)) == 2 * N + 1
    assert legacy(library, f"{even}d", (1, 0, N, A, N, A)) == 1 + 6 * N + 2 * N * N
    assert legacy(library, f"{even}j", (1, 0, N, A, N, A), (A,)) == 2 * N * N + 2 * N
    assert legacy(library, f"{even}jBatched", (1, 0, N, A, N, A), (A, 3)) == 3 * (2 * N * N + 2 * N)
    assert legacy(library, f"{orthogonal}gqr", (M, N, N, A, M, A)) == N * 32
    left, right = (0, 0, M, N, N, A, M, A, A, M), (1, 0, M, N, N, A, M, A, A, M)
    assert legacy(library, f"{orthogonal}mqr", left) == N * 32
    assert legacy(library, f"{orthogonal}mqr", right) == M * 32
    assert asked(library) == {"cuSOLVER"}


def test_the_64_bit_functions_count_in_bytes_and_need_no_host_memory(library):
    device, host = ctypes.c_size_t(7), ctypes.c_size_t(7)
    n, out = ctypes.c_int64(N), (ctypes.byref(device), ctypes.byref(host))
    for kind, size in ((FLOAT, 4), (DOUBLE, 8), (COMPLEX_FLOAT, 8), (COMPLEX_DOUBLE, 16)):
        args = A, A, 0, n, kind, A, n, kind, *out
        assert library.call("cusolverDnXpotrf_bufferSize", *args) == 0
        assert (device.value, host.value) == (N * 64 * size, 0)


def test_the_other_64_bit_functions_ask_for_what_their_namesakes_do(library):
    device, host = ctypes.c_size_t(), ctypes.c_size_t()
    n, batch, out = ctypes.c_int64(N), ctypes.c_int64(3), (ctypes.byref(device), ctypes.byref(host))
    matrix, values = (DOUBLE, A, n), (DOUBLE, A)

    def asks(name, *args):
        assert library.call(f"cusolverDn{name}_bufferSize", A, *args) == 0
        assert host.value == 0
        return device.value // 8  # elements

    assert asks("Xgeqrf", A, n, n, *matrix, *values, DOUBLE, *out) == 32 * N
    assert asks("Xsyevd", A, 0, 0, n, *matrix, *values, DOUBLE, *out) == 2 * N + 1
    batched = A, 0, 0, n, *matrix, *values, DOUBLE, *out, batch
    assert asks("XsyevBatched", *batched) == 3 * (N * N + 2 * N)
    vectors = *matrix, *matrix
    assert asks("Xgeev", A, 0, 1, n, *matrix, *values, *vectors, DOUBLE, *out) == (4 + 32) * N
    assert asks("Xsytrs", 0, n, n, *matrix, A, *matrix, *out) == N
    size = ctypes.c_int()
    strided = A, M, ctypes.c_longlong(M * N)
    args = 0, N, M, N, *strided, A, n, *strided, *strided, ctypes.byref(size), 4
    assert library.call("cusolverDnSgesvdaStridedBatched_bufferSize", A, *args) == 0
    assert size.value == 4 * (M * N + M + N)


def test_a_workspace_past_an_int_is_refused(library):
    size = ctypes.c_int(-7)
    args = 1, 0, 40_000, A, 40_000, A, ctypes.byref(size)
    assert library.call("cusolverDnSsyevd_bufferSize", A, *args) == 3
    assert size.value == -7


# -- cuSPARSE --


def test_a_sparse_matrix_tells_its_shape(library):
    matrix = ctypes.c_void_p()
    shape = [ctypes.c_int64(value) for value in (30, 20, 7)]
    rest = A, A, A, 1, 1, 0, FLOAT
    assert library.call("cusparseCreateCsr", ctypes.byref(matrix), *shape, *rest) == 0
    found = [ctypes.c_int64(-1) for _ in range(3)]
    out = [ctypes.byref(value) for value in found]
    assert library.call("cusparseSpMatGetSize", matrix, *out) == 0
    assert [value.value for value in found] == [30, 20, 7]
    assert library.call("cusparseDestroySpMat", matrix) == 0
    assert library.readbacks() == 0


def test_what_a_products_nonzeros_are_reads_zero_and_is_counted(library):
    matrix = ctypes.c_void_p()
    shape = [ctypes.c_int64(value) for value in (30, 20, 0)]
    rest = A, A, A, 1, 1, 0, FLOAT
    assert library.call("cusparseCreateCsr", ctypes.byref(matrix), *shape, *rest) == 0
    size, found = ctypes.c_size_t(9), ctypes.c_int64(-1)
    args = A, 0, 0, A, matrix, matrix, A, matrix, FLOAT, 0, A, ctypes.byref(size)
    assert library.call("cusparseSpGEMM_compute", *args, NOTHING) == 0
    assert size.value == 0
    out = ctypes.byref(ctypes.c_int64()), ctypes.byref(ctypes.c_int64()), ctypes.byref(found)
    assert library.call("cusparseSpMatGetSize", matrix, *out) == 0
    assert found.value == 0
    assert library.readbacks() == 1
    assert asked(library) == {"cuSPARSE"}


def sparse(library, shape, kind, index):
    matrix, sizes = ctypes.c_void_p(), [ctypes.c_int64(value) for value in shape]
    out = ctypes.byref(matrix)
    assert library.call("cusparseCreateCsr", out, *sizes, A, A, A, index, index, 0, kind) == 0
    return matrix


def dense(library, rows, columns, kind):
    matrix, sizes = ctypes.c_void_p(), [ctypes.c_int64(value) for value in (rows, columns, rows)]
    assert library.call("cusparseCreateDnMat", ctypes.byref(matrix), *sizes, A, kind, 1) == 0
    return matrix


@pytest.mark.parametrize(("end", "share"), [(0, 0), (1, 0), (2, 1)])
def test_a_sparse_products_workspace_is_none_or_copies(library, end, share):
    """Index type 3 has 8 bytes, 2 has 4."""
    library.take_sizes(end)
    size = ctypes.c_size_t(9)
    out = ctypes.byref(size)
    a = sparse(library, (30, 20, 70), COMPLEX_FLOAT, 3)
    half = sparse(library, (30, 20, 70), HALF, 2)
    copy, half_copy = 70 * (8 + 16) + 51 * 8, 70 * (2 + 8) + 51 * 4
    x, y = dense(library, 20, 5, HALF), dense(library, 30, 5, HALF)
    assert library.call("cusparseSpMM_bufferSize", A, 0, 0, A, half, x, A, y, FLOAT, 0, out) == 0
    assert size.value == share * (half_copy + 30 * 5 * 4)  # sums are in float
    assert library.call("cusparseSpMV_bufferSize", A, 0, A, half, x, A, y, FLOAT, 0, out) == 0
    assert size.value == share * (half_copy + 30 * 5 * 4)
    assert library.call("cusparseSDDMM_bufferSize", A, 0, 0, A, x, y, A, a, FLOAT, 0, out) == 0
    assert size.value == share * copy
    args = A, 0, 0, A, a, x, y, COMPLEX_FLOAT, 0, A, out
    assert library.call("cusparseSpSM_bufferSize", *args) == 0
    assert size.value == share * (copy + (20 + 30) * 5 * 8)
    assert library.call("cusparseSpSV_bufferSize", A, 0, A, a, x, y, FLOAT, 0, A, out) == 0
    assert size.value == share * (copy + (20 + 30) * 5 * 4)
    assert library.size_counts().bounded == 5
    assert asked(library) == {"cuSPARSE"}


def test_a_product_of_two_sparse_matrices_takes_every_product_twice_at_most(library):
    """cupy/cupy#7044: 600 x 600 doubles without a zero take some 6 GB."""
    library.take_sizes(2)
    size = ctypes.c_size_t(9)
    matrix = sparse(library, (600, 600, 360_000), DOUBLE, 2)
    args = A, 0, 0, A, matrix, matrix, A, matrix, DOUBLE, 0, A, ctypes.byref(size), NOTHING
    assert library.call("cusparseSpGEMM_workEstimation", *args) == 0
    assert size.value == 2 * (360_000 * 16 + 1201 * 4)
    assert library.call("cusparseSpGEMM_compute", *args) == 0
    assert 6e9 < size.value == 600**3 * 32 < 7e9


def test_other_sparse_workspaces_are_copies_of_indices_and_blocks_at_most(library):
    library.take_sizes(2)
    size, number = ctypes.c_size_t(9), ctypes.c_int(9)
    assert (
        library.call("cusparseXcoosort_bufferSizeExt", A, 5, 6, 100, A, A, ctypes.byref(size)) == 0
    )
    assert size.value == 100 * 12 + 12 * 4
    block = A, A, A, A, 4, A, ctypes.byref(number)
    assert library.call("cusparseDbsrsv2_bufferSize", A, 0, 0, 10, 20, *block) == 0
    assert number.value == 20 * (4 * 4 * 8 + 8) + 21 * 4
    assert library.call("cusparseDbsrsm2_bufferSize", A, 0, 0, 0, 10, 3, 20, *block) == 0
    assert number.value == 20 * (4 * 4 * 8 + 8) + 21 * 4
    block = A, A, A, A, 4096, A, ctypes.byref(number)
    assert library.call("cusparseDbsrsv2_bufferSize", A, 0, 0, 10, 20, *block) == 0
    assert number.value == 2**31 - 1  # as much as it can say
    sides = [(A, A, count, A, A, A) for count in (100, 50)]
    args = A, 5, 6, *sides[0], *sides[1], A, A, A, A, ctypes.byref(size)
    assert library.call("cusparseScsrgeam2_bufferSizeExt", *args) == 0
    assert size.value == 150 * 12 + 2 * 12 * 4


def test_a_product_with_two_nonzeros_in_four_takes_its_result_in_float_at_most(library):
    library.take_sizes(2)
    matrix, product, plan = (ctypes.create_string_buffer(512) for _ in range(3))
    sizes = [ctypes.c_int64(value) for value in (64, 96, 64)]
    args = A, matrix, *sizes, 16, 2, 1
    assert library.call("cusparseLtDenseDescriptorInit", *args) == 0
    args = A, product, 0, 0, A, A, A, matrix, 0
    assert library.call("cusparseLtMatmulDescriptorInit", *args) == 0
    assert library.call("cusparseLtMatmulPlanInit", A, plan, product, A) == 0
    size = ctypes.c_size_t(9)
    assert library.call("cusparseLtMatmulGetWorkspace", A, plan, ctypes.byref(size)) == 0
    assert size.value == 64 * 96 * 4
    buffer = ctypes.c_size_t(9)
    out = ctypes.byref(size), ctypes.byref(buffer)
    assert library.call("cusparseLtSpMMACompressedSize2", A, matrix, *out) == 0
    assert buffer.value == size.value == 64 * 96 // 2 * 2 + 64 * 96 // 8


# -- cuDNN --


def test_the_workspace_of_a_ctc_loss_is_what_its_variables_take(library):
    scores, loss, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    shape = (ctypes.c_int * 3)(50, 4, 20)
    assert library.call("cudnnCreateTensorDescriptor", ctypes.byref(scores)) == 0
    assert library.call("cudnnSetTensorNdDescriptor", scores, 0, 3, shape, shape) == 0
    assert library.call("cudnnCreateCTCLossDescriptor", ctypes.byref(loss)) == 0
    lengths = (ctypes.c_int * 4)(7, 30, 9, 1)
    args = A, scores, scores, A, lengths, A, 0, loss, ctypes.byref(size)
    assert library.call("cudnnGetCTCLossWorkspaceSize", *args) == 0
    assert size.value == 2 * 50 * 4 * (2 * 30 + 1) * 4
    assert library.call("cudnnSetCTCLossDescriptor_v9", loss, 0, 0, 0, 10) == 0
    args = A, 0, loss, scores, scores, ctypes.byref(size)
    assert library.call("cudnnGetCTCLossWorkspaceSize_v8", *args) == 0
    assert size.value == 2 * 50 * 4 * (2 * 10 + 1) * 4
    assert asked(library) == {"cuDNN's CTC loss"}


# -- NVML --


def test_nvml_answers_for_a_device_that_nothing_runs_on(library):
    handle, rates = ctypes.c_void_p(), (ctypes.c_uint * 2)(7, 7)
    assert library.call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(handle)) == 0
    assert library.call("nvmlDeviceGetUtilizationRates", handle, rates) == 0
    assert list(rates) == [0, 0]
    value = ctypes.c_uint(7)
    for name, *args in (("PowerUsage",), ("Temperature", 0)):
        value.value = 7
        assert library.call(f"nvmlDeviceGet{name}", handle, *args, ctypes.byref(value)) == 0
        assert value.value == 0
    assert library.call("nvmlDeviceGetClockInfo", handle, 1, ctypes.byref(value)) == 0
    assert value.value == 1500
    answers = []
    for capability in (0, 1, 2):  # reads, writes, NVLink
        args = handle, handle, capability, ctypes.byref(value)
        assert library.call("nvmlDeviceGetP2PStatus", *args) == 0
        answers.append(value.value)
    assert answers == [0, 0, 5]
    warmth = (ctypes.c_int * 3)(7, 7, 7)
    assert library.call("nvmlDeviceGetTemperatureV", handle, warmth) == 0
    assert warmth[2] == 0
    memory = (ctypes.c_uint64 * 5)()
    _, address = library.malloc(10 << 20)
    assert library.call("nvmlDeviceGetMemoryInfo_v2", handle, memory) == 0
    card = CARDS["T4"]
    assert list(memory)[1:3] == [card.total_memory, 0]
    assert memory[4] == card.context + (10 << 20) == memory[1] - memory[3]
    library.free(address)


# -- CUPTI --


def test_there_are_no_records_and_nothing_of_what_is_pushed(library):
    record, last = ctypes.c_void_p(1), ctypes.c_uint64(7)
    assert library.call("cuptiActivityEnable", 10) == 0
    args = A, ctypes.c_size_t(0), ctypes.byref(record)
    assert library.call("cuptiActivityGetNextRecord", *args) == 12  # MAX_LIMIT_REACHED
    assert record.value is None
    assert library.call("cuptiActivityPushExternalCorrelationId", 3, ctypes.c_uint64(5)) == 0
    assert library.call("cuptiActivityPopExternalCorrelationId", 3, ctypes.byref(last)) == 0
    assert last.value == 0


# -- all of them --


@pytest.mark.parametrize("name", ["cusolverDnCreate", "cusparseCreate", "cufftCreate"])
def test_there_is_no_handle_without_a_device(library, name):
    library.show(0)
    handle = ctypes.c_void_p(5)
    assert library.call(name, ctypes.byref(handle)) != 0
    assert handle.value == 5
