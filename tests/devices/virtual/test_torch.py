"""What of PyTorch runs on the virtual GPU, each in small; what does not is refused by name."""

import pytest
from helpers.semaphores import need_semaphores
from helpers.virtual_gpu import CARD_80GIB, virtual_card

C = "cuda"


@pytest.fixture
def device():
    with virtual_card(CARD_80GIB, count=2) as device:
        yield device


def train(model, *inputs, **options):
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(*inputs).float().square().mean().backward()
        optimizer.step()
    assert all(parameter.grad is not None for parameter in model.parameters())


def randn(*shape, **options):
    import torch

    return torch.randn(*shape, device=C, **options)


def linear(torch):
    train(torch.nn.Linear(8, 8).cuda(), randn(2, 8))


def fused_adam(torch):
    train(torch.nn.Linear(8, 8).cuda(), randn(2, 8), fused=True)


def conv(torch):
    train(torch.nn.Conv2d(3, 8, 3).cuda(), randn(2, 3, 16, 16))


def conv_channels_last(torch):
    last = {"memory_format": torch.channels_last}
    x = randn(2, 3, 16, 16).to(**last)
    model = torch.nn.Conv2d(3, 8, 3).cuda().to(**last)
    assert model(x).is_contiguous(**last)
    train(model, x)


def conv_benchmark(torch):
    with torch.backends.cudnn.flags(benchmark=True):
        conv(torch)


def transposed_conv_3d(torch):
    train(torch.nn.ConvTranspose3d(3, 8, 3).cuda(), randn(2, 3, 8, 8, 8))


def batch_norm(torch):
    train(torch.nn.BatchNorm2d(3).cuda(), randn(2, 3, 8, 8))


def group_and_layer_norm(torch):
    train(torch.nn.GroupNorm(2, 8).cuda(), randn(2, 8, 4, 4))
    train(torch.nn.LayerNorm(8).cuda(), randn(2, 8))


def embeddings(torch):
    where = torch.randint(0, 9, (4, 4), device=C)
    train(torch.nn.Embedding(10, 16).cuda(), where)
    train(torch.nn.EmbeddingBag(10, 16).cuda(), where)


def encoder_layer(torch):
    train(torch.nn.TransformerEncoderLayer(64, 4, batch_first=True).cuda(), randn(2, 8, 64))


def lstm(torch):
    model = torch.nn.LSTM(32, 64, 2).cuda()  # with dropout PyTorch keeps cuDNN's state for good
    model(randn(5, 3, 32))[0].sum().backward()


def gru_in_half(torch):
    torch.nn.GRU(32, 64).cuda().half()(randn(5, 3, 32).half())[0].sum().backward()


def ctc(torch):
    scores = randn(50, 16, 20, requires_grad=True)
    targets, lengths = torch.randint(1, 20, (16, 30)), [torch.full((16,), n) for n in (50, 30)]
    torch.nn.functional.ctc_loss(scores.log_softmax(2), targets, *lengths).backward()


def cross_entropy(torch):
    scores = randn(8, 10, requires_grad=True)
    where = torch.randint(0, 10, (8,), device=C)
    torch.nn.functional.cross_entropy(scores, where).backward()


def attention(backend):
    def run(torch):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q = randn(2, 4, 128, 64, dtype=torch.bfloat16, requires_grad=True)
        with sdpa_kernel(getattr(SDPBackend, backend)):
            attend = torch.nn.functional.scaled_dot_product_attention
            attend(q, q, q, is_causal=True).sum().backward()

    return run


def autocast_with_scaler(torch):
    model, scaler = torch.nn.Linear(64, 64).cuda(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with torch.autocast("cuda", torch.float16):
            out = model(randn(8, 64))
            assert out.dtype == torch.float16
        scaler.scale(out.sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def int8_and_float8(torch):
    zeros = torch.zeros(32, 32, device=C)
    torch._int_mm(zeros.to(torch.int8), zeros.to(torch.int8))
    small, one = zeros.to(torch.float8_e4m3fn), torch.ones((), device=C)
    torch._scaled_mm(small, small.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def reductions_and_sorts(torch):
    x = randn(10, 5000)
    torch.sort(x), torch.topk(x, 5), torch.cumsum(x, 1), torch.multinomial(x.abs(), 5)
    torch.bincount(torch.randint(0, 5, (1000,), device=C))


def values_of_the_device_are_zeros(torch):
    x = randn(100)
    assert x.sum().item() == 0.0
    assert torch.nonzero(x).shape == (0, 1)
    assert torch.unique(x.long()).numel() == 0


def runtime_compiled_kernels(torch):
    torch.erfinv(torch.rand(10, device=C))


def torchvision_nms(torch):
    ops = pytest.importorskip("torchvision.ops")
    ops.nms(torch.rand(10, 4, device=C), torch.rand(10, device=C), 0.5)


def graph_capture(torch):
    model, x = torch.nn.Linear(64, 64).cuda(), randn(8, 64)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).sum().backward()
    before = torch.cuda.memory_allocated()
    graph.replay()
    assert torch.cuda.memory_allocated() == before
    pools = {tuple(s["segment_pool_id"]) for s in torch.cuda.memory_snapshot()}
    assert len(pools) > 1  # what was captured lies in a pool of its own


@pytest.mark.filterwarnings("ignore::UserWarning")
def graphed_callables(torch):
    model = torch.cuda.make_graphed_callables(torch.nn.Linear(64, 64).cuda(), (randn(8, 64),))
    model(randn(8, 64)).sum().backward()


def queries(torch):
    free, total = torch.cuda.mem_get_info()
    assert total == 80 << 30
    assert free == total - torch.cuda.memory_reserved()
    found = torch.cuda.get_device_properties(0)
    assert (found.major, found.minor, found.multi_processor_count) == (9, 0, 132)
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_name() == found.name
    assert torch.cuda.is_bf16_supported()
    assert "80.00 GiB" in torch.cuda.memory_summary() or torch.cuda.memory_summary()
    assert torch.cuda.nccl.version()


def event_times(torch):
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for event in events:
        event.record()
    torch.cuda.synchronize()
    assert events[0].query()
    assert events[0].elapsed_time(events[1]) >= 0


def random_states(torch):
    torch.cuda.manual_seed(3)
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())


def peers(torch):
    assert torch.cuda.can_device_access_peer(0, 1)
    assert randn(10).to("cuda:1").device.index == 1


def data_parallel(torch):
    torch.nn.DataParallel(torch.nn.Linear(8, 8).cuda(), [0, 1])(randn(4, 8)).sum().backward()


def model_over_two_devices(torch):
    first, second = torch.nn.Linear(8, 8).to("cuda:0"), torch.nn.Linear(8, 8).to("cuda:1")
    second(first(randn(4, 8)).to("cuda:1")).sum().backward()
    assert first.weight.grad.device.index == 0


def sparse(torch):
    eye = torch.eye(32, device=C)
    torch.sparse.mm(eye.to_sparse(), randn(32, 32))
    assert (eye.to_sparse() @ randn(32, 4)).shape == (32, 4)


def data_loader_with_workers(torch):
    need_semaphores()
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, num_workers=1, pin_memory=True, multiprocessing_context="fork"
    )
    assert [batch.cuda(non_blocking=True).shape[0] for (batch,) in loader] == [4, 4]


def transforms_and_solutions(torch):
    torch.fft.irfft2(torch.fft.rfft2(randn(4, 64, 64, requires_grad=True))).sum().backward()
    torch.linalg.solve(randn(32, 32), randn(32, 4, requires_grad=True)).sum().backward()


def files_read_by_the_device(torch):
    if not hasattr(torch.cuda.gds, "gds_register_buffer"):
        pytest.skip(f"torch {torch.__version__} has no gds_register_buffer")
    torch.cuda.gds.gds_register_buffer(randn(10).untyped_storage())


STEPS = [
    linear, fused_adam, conv, conv_channels_last, conv_benchmark, transposed_conv_3d, batch_norm,
    group_and_layer_norm, embeddings, encoder_layer, lstm, gru_in_half, ctc, cross_entropy,
    autocast_with_scaler, int8_and_float8, reductions_and_sorts, values_of_the_device_are_zeros,
    runtime_compiled_kernels, torchvision_nms, graph_capture, graphed_callables, queries,
    event_times, random_states, peers, data_parallel, model_over_two_devices, sparse,
    data_loader_with_workers, transforms_and_solutions,
]  # fmt: skip
NAMED = {
    **{step.__name__: step for step in STEPS},
    **{
        f"attention-{name}": attention(f"{name.upper()}_ATTENTION" if name != "math" else "MATH")
        for name in ("flash", "efficient", "math", "cudnn")
    },
}
MISSING = {"gds": (files_read_by_the_device, "cuFileBufRegister")}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", NAMED)
def test_it_runs(device, name):
    import torch

    NAMED[name](torch)
    assert device.trouble() is None


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MISSING)
@pytest.mark.xfail(strict=True, reason="the virtual GPU does not do this yet")
def test_it_does_not_run_yet(device, name):
    import torch

    MISSING[name][0](torch)
    assert device.trouble() is None


@pytest.mark.parametrize("name", MISSING)
def test_what_does_not_run_is_named(device, name):
    """Whatever becomes of the step: its figures are said to be worthless, by function name."""
    import contextlib

    import torch

    step, function = MISSING[name]
    with contextlib.suppress(RuntimeError):
        step(torch)
    assert function in device.trouble()
