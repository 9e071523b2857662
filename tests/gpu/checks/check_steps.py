"""Steps that a bare script and marked tests run alike; of nothing but torch and torchvision."""

import contextlib

# ruff: noqa: N812, PLR0913, PLR0917 - PyTorch's own names, and one loop for all that trains
import gc
import os

import torch
from torch import nn
from torch.nn import functional as F

MIB = 1 << 20
STEPS = {}
FAKE = bool(os.environ.get("GPUMEM_FAKE_GPU"))


def step(function):
    STEPS[function.__name__] = function
    return function


def normal(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad)


def empty(mib, device="cuda"):
    return torch.empty(int(mib * MIB), dtype=torch.uint8, device=device)


def train(model, data, loss, optimizer=None, steps=2, amp=None):
    scaler = torch.amp.GradScaler("cuda", enabled=amp is torch.float16)
    for _ in range(steps):
        with torch.autocast("cuda", dtype=amp, enabled=amp is not None):
            value = loss(model(*data))
        scaler.scale(value).backward()
        if optimizer is not None:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)


def mse(y):
    return y.float().square().mean()


def mlp(width=2048, depth=3):
    layers = [x for _ in range(depth) for x in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).cuda()


def convs(kind, norm, channels=64, depth=3):
    layers, inputs = [], 3
    for _ in range(depth):
        layers += [kind(inputs, channels, 3, padding=1), norm(channels), nn.ReLU()]
        inputs = channels
    return nn.Sequential(*layers).cuda()


@step
def mm_float32():
    normal(4096, 4096) @ normal(4096, 4096)


@step
def mm_bfloat16():
    normal(4096, 4096).bfloat16() @ normal(4096, 4096).bfloat16()


@step
def linear_bias_split_k():
    F.linear(normal(64, 32768).half(), normal(64, 32768).half(), normal(64).half())


@step
def mlp_adamw():
    model = mlp()
    train(model, (normal(512, 2048),), mse, torch.optim.AdamW(model.parameters()))


@step
def mlp_fused_adam():
    model = mlp()
    train(model, (normal(512, 2048),), mse, torch.optim.Adam(model.parameters(), fused=True))


@step
def mlp_amp_scaler():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, (normal(1024, 2048),), mse, optimizer, amp=torch.float16)


@step
def mlp_checkpointed():
    from torch.utils.checkpoint import checkpoint

    model = mlp(depth=6)

    def run(x):
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    train(run, (normal(4096, 2048),), mse)


@step
def conv2d_float32():
    model = convs(nn.Conv2d, nn.BatchNorm2d)
    train(model, (normal(16, 3, 112, 112),), mse, torch.optim.SGD(model.parameters(), 0.1))


@step
def conv2d_channels_last_amp():
    model = convs(nn.Conv2d, nn.BatchNorm2d).to(memory_format=torch.channels_last)
    x = normal(16, 3, 112, 112).contiguous(memory_format=torch.channels_last)
    train(model, (x,), mse, amp=torch.bfloat16)


@step
def conv3d_bfloat16():
    model = convs(nn.Conv3d, nn.BatchNorm3d, 32, 2).bfloat16()
    train(model, (normal(2, 3, 16, 64, 64).bfloat16(),), mse)


@step
def conv2d_benchmark():
    torch.backends.cudnn.benchmark = True
    try:
        model = convs(nn.Conv2d, nn.BatchNorm2d)
        train(model, (normal(16, 3, 96, 96),), mse)
    finally:
        torch.backends.cudnn.benchmark = False


@step
def resnet50():
    import torchvision

    model = torchvision.models.resnet50(weights=None).cuda()
    x, y = normal(32, 3, 224, 224), torch.randint(1000, (32,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, (x,), lambda out: F.cross_entropy(out, y), optimizer)


def attention(backend, dtype, grad=True):
    from torch.nn.attention import sdpa_kernel

    with sdpa_kernel(backend):
        q, k, v = (normal(4, 16, 1024, 64, dtype=dtype, grad=grad) for _ in range(3))
        F.scaled_dot_product_attention(q, k, v, is_causal=True).float().sum().backward()


@step
def attention_flash():
    from torch.nn.attention import SDPBackend

    attention(SDPBackend.FLASH_ATTENTION, torch.float16)


@step
def attention_efficient():
    from torch.nn.attention import SDPBackend

    attention(SDPBackend.EFFICIENT_ATTENTION, torch.float32)


@step
def attention_cudnn():
    from torch.nn.attention import SDPBackend

    attention(SDPBackend.CUDNN_ATTENTION, torch.bfloat16)


@step
def attention_math():
    from torch.nn.attention import SDPBackend

    attention(SDPBackend.MATH, torch.float32)


@step
def transformer_layer():
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True).cuda()
    optimizer = torch.optim.AdamW(layer.parameters())
    train(layer, (normal(16, 256, 512),), mse, optimizer, amp=torch.bfloat16)


@step
def embedding_cross_entropy():
    model = nn.Sequential(nn.Embedding(32000, 512), nn.Linear(512, 32000)).cuda()
    ids = torch.randint(0, 32000, (4, 512), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, (ids,), lambda y: F.cross_entropy(y.view(-1, 32000), ids.view(-1)), optimizer)


@step
def lstm():
    model = nn.LSTM(256, 512, 2, batch_first=True).cuda()
    for _ in range(2):
        model(normal(32, 64, 256))[0].square().mean().backward()


@step
def sort_gather_unique():
    values, order = normal(4_000_000).sort()
    torch.gather(values.cumsum(0), 0, order).topk(1000)
    torch.randint(0, 1000, (1_000_000,), device="cuda").unique(return_counts=True)
    (normal(1_000_000) > 0).nonzero()


@step
def fft():
    torch.fft.rfft2(normal(8, 512, 512)).abs().sum()


@step
def linear_algebra():
    a = normal(512, 512)
    torch.linalg.svd(a @ a.T)
    torch.linalg.cholesky(a @ a.T + 600 * torch.eye(512, device="cuda"))


@step
def double_backward():
    model = mlp(1024, 2)
    x = normal(256, 1024, grad=True)
    (g,) = torch.autograd.grad(mse(model(x)), x, create_graph=True)
    g.square().sum().backward()


@step
def gradients_of_inputs():
    model = mlp(1024, 2)
    for _ in range(3):
        x = normal(1024, 1024, grad=True)
        torch.autograd.grad(mse(model(x)), [x, *model.parameters()])


@step
def many_small():
    kept = [torch.empty(n * 700 + 1, device="cuda") for n in range(600)]
    del kept[::2]
    kept += [torch.empty(n * 333 + 1, device="cuda") for n in range(600)]


@step
def fragmentation():
    """Half of 40 blocks of 24 MiB is freed; blocks of 30 MiB fit in none of their rooms."""
    blocks = [empty(24) for _ in range(40)]
    del blocks[::2]
    blocks += [empty(30) for _ in range(16)]


@step
def empties_its_cache():
    a = empty(300)
    del a
    torch.cuda.empty_cache()
    return empty(100)


@step
def resets_its_peaks():
    a = empty(300)
    del a
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() < 300 * MIB
    return empty(100)


@step
def side_stream():
    side = torch.cuda.Stream()
    for _ in range(3):
        x = normal(1024, 4096)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = (x @ x.T).relu()
        x.record_stream(side)
        torch.cuda.current_stream().wait_stream(side)
        y.record_stream(torch.cuda.current_stream())
        torch.cuda.synchronize()
        del x, y


@step
def other_thread():
    import threading

    def work():
        train(mlp(1024, 2), (normal(512, 1024),), mse)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@step
def pinned_copies():
    host = torch.empty(48 * MIB, dtype=torch.uint8, pin_memory=True)
    for _ in range(3):
        device = host.to("cuda", non_blocking=True)
        back = device.to("cpu", non_blocking=True)  # pinned by PyTorch
        torch.cuda.synchronize()
        del device, back


@step
def mem_pool():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        a = empty(64)
    b = empty(32)
    del a, b


@step
def autograd_error():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ValueError("planted")

    model = mlp(1024, 2)
    x = normal(2048, 1024, grad=True)
    with contextlib.suppress(ValueError):
        mse(model(Fails.apply(model(x)))).backward()
    gc.collect()
    return empty(8)
