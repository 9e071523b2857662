"""Fourier transforms, linear algebra and sparse matrices on the virtual GPU: PyTorch's own code."""

import ctypes

import pytest
from helpers.sources import program
from helpers.virtual_gpu import CARD_80GIB, virtual_card

from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.sizes import format_size

C = "cuda"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def device():
    with virtual_card(CARD_80GIB) as device:
        yield device
        import torch

        torch.backends.cuda.cufft_plan_cache.clear()


@pytest.fixture
def notes(device, tmp_path):
    return lambda: [note.text for note in device.notes(tmp_path)]


def randn(*shape, **options):
    import torch

    return torch.randn(*shape, device=C, **options)


def train(*results):
    """Backward from what results have gradients; complex ones by their magnitude."""
    real = [r.abs() if r.is_complex() else r for r in results if r.requires_grad]
    sum(r.sum() for r in real).backward()


def largest(step):
    """Return the peak of allocated bytes while a step runs."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


# -- cuFFT --

TRANSFORMS = ["fft", "rfft", "fft2", "rfft2", "fftn", "rfftn", "ihfft"]
INVERSES = ["ifft", "irfft", "ifft2", "irfft2", "ifftn", "irfftn", "hfft"]


@pytest.mark.parametrize("name", [*TRANSFORMS, *INVERSES])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_transform_runs_forwards_and_backwards(device, name, dtype):
    import torch

    halved = name in {"irfft", "irfft2", "irfftn", "hfft"}
    size = (4, 16, 16, 17 if halved else 16)  # powers of two, which half precision needs
    kind = getattr(torch, dtype)
    if name in INVERSES:
        kind = {"float16": torch.chalf, "float32": torch.cfloat, "float64": torch.cdouble}[dtype]
    x = randn(*size, dtype=torch.cfloat if kind is torch.chalf else kind).to(kind)
    train(getattr(torch.fft, name)(x.requires_grad_()).to(torch.cfloat))
    assert x.grad.shape == x.shape
    assert device.trouble() is None


def test_a_spectrogram_and_back(device):
    import torch

    window = torch.ones(400, device=C)
    spectrum = torch.stft(randn(4, 16000), 400, window=window, return_complex=True)
    assert spectrum.shape == (4, 201, 161)
    assert torch.istft(spectrum, 400, window=window).shape == (4, 16000)
    assert device.trouble() is None


@pytest.mark.parametrize(("length", "elements"), [(1 << 20, 1), ((1 << 19) - 1, 8)])
def test_a_transforms_work_area_is_in_the_peak(device, notes, length, elements):
    """Of a size with small factors one complex element each; of a prime eight."""
    import torch

    x = randn(length, dtype=torch.complex64)
    held = [-(-length * 8 * times // 512) * 512 for times in (1, elements)]
    assert largest(lambda: torch.fft.fft(x)) == sum(held)
    plans = "memory that its plans keep outside of PyTorch's allocator is not counted"
    assert notes() == [f"the workspaces of cuFFT are estimates, and {plans}"]


# -- cuSOLVER, cuBLAS --

FACTORS = [
    "cholesky", "eigh", "eigvalsh", "qr", "svd", "svdvals", "inv", "det", "slogdet", "lu_factor",
    "lu", "cond", "pinv", "matrix_norm", "cholesky_ex", "inv_ex", "lu_factor_ex",
]  # fmt: skip
SHAPES = [(32, 32), (4, 32, 32), (300, 300), (2, 600, 600)]


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_a_factorisation_runs_forwards_and_backwards(device, name, dtype):
    import torch

    for shape in SHAPES:
        a = randn(*shape, dtype=getattr(torch, dtype)).requires_grad_()
        found = getattr(torch.linalg, name)(a)
        results = found if isinstance(found, tuple) else (found,)
        if dtype == "complex128" and name in {"eigh", "svd"}:
            results = results[-2:-1] if name == "svd" else results[:1]  # the values alone
        train(*results)
        assert a.grad.shape == a.shape
    assert device.trouble() is None


def solutions(torch, a, b):
    lu, pivots = torch.linalg.lu_factor(a)
    yield torch.linalg.solve(a, b)
    yield torch.linalg.lstsq(a, b).solution
    yield torch.linalg.solve_triangular(a, b, upper=True)
    yield torch.cholesky_solve(b, a)
    yield torch.cholesky_inverse(a)
    yield torch.linalg.lu_solve(lu, pivots, b)
    yield torch.linalg.householder_product(a, a.mean(-1).contiguous())
    yield torch.linalg.multi_dot([a, a, b]) if a.ndim == 2 else b


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_systems_are_solved_forwards_and_backwards(device, shape, dtype):
    import torch

    kind = getattr(torch, dtype)
    a, b = (randn(*shape, dtype=kind).requires_grad_() for _ in "ab")
    train(*solutions(torch, a, b))
    assert a.grad.shape == b.grad.shape == shape
    assert device.trouble() is None


def test_what_has_no_gradient(device):
    import torch

    for shape in SHAPES:
        a = randn(*shape)
        torch.linalg.ldl_solve(*torch.linalg.ldl_factor(a), a)
        torch.ormqr(a, randn(*shape[:-1]), a)
        torch.geqrf(a)
        torch.linalg.matrix_rank(a)
    for driver in ("gesvd", "gesvdj", "gesvda"):
        torch.linalg.svd(randn(3, 40, 30), driver=driver)
    torch.linalg.matrix_exp(randn(32, 32).requires_grad_()).sum().backward()
    torch.linalg.matrix_power(randn(32, 32), -3)
    assert device.trouble() is None


def test_what_looks_at_values_finds_zeros(device):
    """PyTorch asks the device whether all are finite, and reads zero: no."""
    import torch

    with pytest.raises(RuntimeError, match="infs or NaNs"):
        torch.linalg.eig(randn(8, 8))
    assert device.trouble() is None


def test_a_solvers_workspace_is_in_the_peak(device, notes):
    """QR of an n x n matrix: LAPACK's 32 n elements; its factors and reflectors are PyTorch's."""
    import torch

    n = 4096
    a = randn(n, n)
    element = 4
    expected = n * n * element + n * element + 32 * n * element + 512  # result, tau, work, info
    assert largest(lambda: torch.geqrf(a)) == pytest.approx(expected, abs=1024)
    assert notes() == ["the workspaces of cuSOLVER are estimates"]


def test_cudnns_ctc_loss(device, notes):
    """PyTorch takes it where the targets are 32-bit numbers, one after the other."""
    import torch

    scores = randn(50, 4, 20, requires_grad=True)
    targets = torch.randint(1, 20, (4 * 30,), dtype=torch.int32)
    lengths = [50] * 4, [30] * 4
    torch.nn.functional.ctc_loss(scores.log_softmax(2), targets, *lengths).backward()
    assert scores.grad.shape == scores.shape
    assert notes()[-1] == "the workspace of cuDNN's CTC loss is an estimate"
    assert device.trouble() is None


def test_rnns_are_noted_as_before(notes):
    import torch

    torch.nn.GRU(8, 8).cuda()(randn(3, 2, 8))
    assert notes() == ["the reserve space and workspace of cuDNN's RNN are estimates"]


def test_an_inference_has_the_gates_of_all_layers_of_an_rnn(device):
    """Four layers of an LSTM took 350 MiB on a GPU where each output has 18.4 MiB."""
    import torch

    x, taken = randn(2, 64, 60), []
    for layers in (1, 4):
        network = torch.nn.LSTM(60, 128, layers, bidirectional=True).cuda().eval()
        with torch.inference_mode():
            taken.append(largest(lambda: network(x)))  # noqa: B023 - called at once
    output, states = 2 * 64 * 2 * 128 * 4, 4 * 2 * 64 * 128 * 4
    # Of each further layer: four gates, an output between two, and its first and last states.
    assert taken[1] - taken[0] == 3 * (5 * output + states)
    assert device.trouble() is None


@pytest.mark.parametrize(("kind", "size"), [("GRU", 864_000_000), ("LSTM", 736_000_000)])
def test_reserve_spaces_of_recurrent_nets_are_those_of_a_p100(device, kind, size):
    """pytorch/pytorch#2895, of four layers; here with a thousandth of the values."""
    import torch

    net = getattr(torch.nn, kind)(16, 100, 4).cuda()
    output, _ = net(torch.zeros(8, 10, 16, device="cuda"))
    assert output.grad_fn._saved_result3.numel() == size // 1000


def test_batch_normalization_is_noted_where_cudnn_wants_a_workspace(notes):
    import torch

    norm, x = torch.nn.BatchNorm2d(8).cuda(), randn(2, 8, 6, 6, requires_grad=True)
    norm(x).sum().backward()
    norm.eval()(x.to(memory_format=torch.channels_last))
    assert notes() == []
    norm.train()(x.to(memory_format=torch.channels_last)).sum().backward()
    (note,) = notes()
    assert note == (
        "predictions do not include the workspaces of cuDNN's batch normalization with channels "
        "last, but their ranges do"
    )


# -- cuSPARSE --


def coo(torch, size=64):
    where = torch.arange(size, device=C).repeat(2, 1)
    values = torch.ones(size, device=C)
    return torch.sparse_coo_tensor(where, values, (size, size), is_coalesced=True)


def csr(torch, size=64):
    rows, columns = torch.arange(size + 1, device=C), torch.arange(size, device=C)
    values = torch.ones(size, device=C)
    return torch.sparse_csr_tensor(rows, columns, values, (size, size), check_invariants=False)


def bsr(torch, size=64):
    rows, columns = torch.arange(size // 4 + 1, device=C), torch.arange(size // 4, device=C)
    values = torch.ones(size // 4, 4, 4, device=C)
    return torch.sparse_bsr_tensor(rows, columns, values, (size, size), check_invariants=False)


@pytest.mark.parametrize("layout", [coo, csr, bsr])
def test_a_sparse_matrix_times_a_dense_one(device, notes, layout):
    import torch

    assert (layout(torch) @ randn(64, 32)).shape == (64, 32)
    assert (layout(torch) @ randn(64)).shape == (64,)
    assert torch.addmm(randn(64, 32), layout(torch), randn(64, 32)).shape == (64, 32)
    assert device.trouble() is None


@pytest.mark.parametrize("layout", [coo, csr])
def test_a_sparse_products_gradients(device, layout):
    import torch

    matrix, dense = layout(torch).requires_grad_(), randn(64, 32).requires_grad_()
    torch.sparse.mm(matrix, dense).sum().backward()
    assert matrix.grad.layout == matrix.layout
    assert dense.grad.shape == (64, 32)
    assert device.trouble() is None


def test_sampled_products_sums_and_solutions(device, notes):
    import torch

    assert torch.sparse.sampled_addmm(csr(torch), randn(64, 32), randn(32, 64)).shape == (64, 64)
    for layout in (csr, bsr):
        torch.triangular_solve(randn(64, 32), layout(torch))
        torch.triangular_solve(randn(64, 1), layout(torch))
    assert torch.sparse.sum(coo(torch), 1).shape == (64,)
    assert torch.sparse.softmax(coo(torch), 1)._nnz() == 64
    assert device.trouble() is None
    assert "predictions do not include the workspaces of cuSPARSE, but their ranges do" in notes()


@pytest.mark.parametrize("layout", [coo, csr])
def test_the_nonzeros_of_a_sum_or_product_are_the_most_that_they_can_be(device, notes, layout):
    """How many there are depends on values. None would hold every limit."""
    import torch

    left, right = layout(torch), layout(torch)
    total, product = left + right, left @ right
    assert product.shape == total.shape == (64, 64)
    assert total._nnz() == left._nnz() + right._nnz()
    assert product._nnz() == min(64 * 64, left._nnz() * right._nnz())
    assert any("assumed" in note for note in notes())
    assert device.trouble() is None


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr"])
def test_conversions_find_no_nonzeros(device, notes, layout):
    import torch

    to = getattr(torch.eye(64, device=C), f"to_sparse_{layout}" if layout != "coo" else "to_sparse")
    matrix = to((4, 4)) if layout == "bsr" else to()
    assert matrix.values().numel() == 0
    assert matrix.to_dense().shape == (64, 64)
    assert notes()
    assert device.trouble() is None


def test_an_embeddings_sparse_gradient(device):
    import torch

    embedding = torch.nn.Embedding(10, 4, sparse=True).cuda()
    embedding(torch.zeros(3, dtype=torch.long, device=C)).sum().backward()
    assert embedding.weight.grad.coalesce().shape == (10, 4)
    assert device.trouble() is None


@pytest.mark.parametrize(("cutlass", "card"), [(True, "A100-80GB"), (False, "H100")])
def test_a_matrix_with_two_nonzeros_in_four(monkeypatch, cutlass, card):
    """PyTorch's own kernels, which run on capability 8.x alone, and cuSPARSELt's."""
    with virtual_card(card) as device:
        import torch
        from torch.sparse import SparseSemiStructuredTensor

        monkeypatch.setattr(SparseSemiStructuredTensor, "_FORCE_CUTLASS", cutlass)
        matrix = torch.sparse.to_sparse_semi_structured(randn(128, 128, dtype=torch.float16))
        assert torch.mm(matrix, randn(128, 128, dtype=torch.float16)).shape == (128, 128)
        assert device.trouble() is None


@pytest.mark.parametrize("card", sorted(CARDS))
def test_sorting_and_embeddings_run_on_every_card(card):
    """CUB looks for the architecture that its kernels were compiled for; not every card's is."""
    with virtual_card(card) as device:
        import torch

        tokens = torch.zeros(4096, dtype=torch.int64, device="cuda")
        embedding = torch.nn.Embedding(1000, 8, device="cuda")
        embedding(tokens).sum().backward()
        tokens.sort()
        torch.cuda.synchronize()
        del embedding, tokens
        device.open(CARDS[card], 1)


def test_managed_memory_is_a_cpu_tensors_and_beside_the_peaks(device, notes):
    """As bitsandbytes' paged optimizers use it, with more than the card has."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # of earlier tests in this process
    cuda, size = ctypes.CDLL(None), 200 << 30
    address = ctypes.c_void_p()
    assert cuda.cudaMallocManaged(ctypes.byref(address), ctypes.c_size_t(size), 2) == 0
    state = torch.frombuffer(
        (ctypes.c_float * 1024).from_address(address.value), dtype=torch.float32
    )
    state += 1
    cuda.cudaMemPrefetchAsync(address, ctypes.c_size_t(4096), ctypes.c_uint64(1), 0, None)
    assert state.cuda().cpu().sum() == 1024
    assert torch.cuda.max_memory_reserved() == 2 << 20
    (note,) = notes()
    assert note == (
        "200.00 GiB of managed memory (cudaMallocManaged), outside PyTorch's allocator, "
        "are not in the peaks: a full GPU moves this memory to the host"
    )
    assert cuda.cudaFree(address) == 0


# -- the range of peaks with estimates --

RANGED = program("estimates.py")


def test_estimates_have_a_range(suite):
    session = suite.run("-v", "--gpumem-json=r.json", source=RANGED)
    assert session.outcomes == {"passed": 10, "failed": 1}
    measured = {
        (result.nodeid.partition("::")[2], result.part): result.measurement
        for result in read_report(suite.path / "r.json").results
    }
    one, again = measured["test_transform", ""], measured["test_transform_again", ""]
    size = 16 * 16384 * 8  # a complex copy of the input, which is half of that
    assert one.peaks == again.peaks  # although PyTorch keeps the plan
    assert one.range == again.range == measured["test_transform_again", "part"].range
    assert one.peaks[0].allocated - one.range.least[0].allocated == size
    assert one.range.most[0].allocated - one.peaks[0].allocated == 7 * size
    reason = "cuFFT's workspaces, from none to the most that its manual names"
    assert f"allocated 2.00 MiB to 18.00 MiB: {reason}" in session.flat
    # Of the estimate it is held to its limit, and fits.
    short = measured["test_that_may_not_fit", ""]
    assert short.range is None
    assert f"the step does not fit with the largest figures: {reason}" in short.note_texts
    assert measured["test_that_is_run_once", ""].range is None
    for name in ("recurrent", "solver", "loss"):
        spanned = measured[f"test_{name}", ""].range
        peak = measured[f"test_{name}", ""].peaks[0]
        low, high = spanned.least[0], spanned.most[0]
        assert low.allocated < peak.allocated < high.allocated
    # Where nothing is known but the most, limits are held to that.
    norm, matrix = (measured[f"test_{name}", ""] for name in ("norm", "sparse"))
    mask, workspace = 8 * 32 * 32 * 256 // 8, 64 * 8 + 256 * (64 * 8 + 4) + 8192
    assert norm.range.least == norm.peaks
    grown = norm.range.most[0].allocated - norm.peaks[0].allocated
    assert mask < grown < mask + workspace + 512
    assert norm.range.judged
    copy = 2**16 * (4 + 16) + (2**17 + 1) * 8 + 2**16 * 8 * 4
    assert matrix.range.least == matrix.peaks
    assert 0 <= matrix.range.most[0].allocated - matrix.peaks[0].allocated - copy < 512
    most = format_size(matrix.range.most[0].allocated)
    assert f"peak allocated of {most} at most is" in session.flat
    assert norm.note_texts[-1].endswith(
        "and one bit of each value; the largest figures are compared with limits"
    )
    assert measured["test_plain", ""].range is None
