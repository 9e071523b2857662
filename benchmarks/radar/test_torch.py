"""Steps of torch alone: attention, convolutions, optimizers, mixed precision, checkpointing."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gpu_memory(card="L4", values="off")


def stack(width=1024, depth=4):
    return [
        torch.nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True).cuda()
        for _ in range(depth)
    ]


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "RMSprop"])
def test_an_optimizer_s_steps(name):
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer = getattr(torch.optim, name)(model.parameters())
    for _ in range(2):
        model(torch.randn(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(dtype):
    q, k, v = (
        torch.randn(2, 8, 2048, 64, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_of_volumes(dtype):
    net = torch.nn.Sequential(*(torch.nn.Conv3d(16, 16, 3, padding=1) for _ in range(3)))
    net = net.to("cuda", dtype)
    net(torch.randn(1, 16, 16, 64, 64, device="cuda", dtype=dtype)).sum().backward()


def test_a_convolutional_network_in_mixed_precision():
    layers = []
    for _ in range(4):
        layers += [torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.BatchNorm2d(64)]
        layers += [torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = net(torch.randn(8, 64, 64, 64, device="cuda")).float().mean()
    loss.backward()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_transformer(checkpointed):
    x = torch.randn(4, 256, 1024, device="cuda", requires_grad=True)
    for block in stack():
        x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
    x.sum().backward()


def test_a_cross_entropy_of_many_classes():
    logits = torch.randn(2048, 32000, device="cuda", requires_grad=True)
    F.cross_entropy(logits, torch.zeros(2048, dtype=torch.long, device="cuda")).backward()
