"""Distributed training, one rank at a time: what one GPU of 64 holds, on one GPU or on none.

With ``world_size`` on the marker the test is rank 0 of that many: torch.distributed is initialised,
the other ranks are not there, and collectives return at once. A rank's memory does not depend on
what the others send. Values mean nothing here, on a real GPU neither.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.nn.parallel import DistributedDataParallel

WIDTH, HIDDEN, HEADS, LAYERS, WORDS, LENGTH = 2048, 5632, 16, 22, 32000, 2048


class Layer(nn.Module):
    """A layer as Llama has it, without the positions' rotation."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        """Return the layer's output for its input, both (batch, length, WIDTH)."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        y = scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


def llama():
    """Return a language model of 1.3 billion parameters that takes no memory yet."""
    with torch.device("meta"):
        layers = [Layer() for _ in range(LAYERS)]
        ends = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, *ends)


@pytest.mark.gpu_memory(world_size=64, batch_size=1, max_gib=14)
def test_fsdp_over_64_ranks(gpu_memory):
    """Parameters, gradients and AdamW are a 64th part; activations are as much as ever."""
    model = llama()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    model.to_empty(device="cuda")
    n = sum(p.numel() for p in model.parameters())
    share = n / gpu_memory.world_size
    assert gpu_memory.allocated == pytest.approx(4 * share, rel=0.01)

    optimizer = torch.optim.AdamW(model.parameters())
    words = torch.zeros(gpu_memory.batch_size, LENGTH, dtype=torch.long, device="cuda")
    for step in range(2):
        loss = cross_entropy(model(words).flatten(0, 1), words.flatten())
        loss.backward()
        del loss
        before = gpu_memory.allocated
        optimizer.step()
        if step == 0:  # AdamW makes its state: two numbers of 4 bytes for each parameter
            assert gpu_memory.allocated - before == pytest.approx(8 * share, rel=0.01)
        optimizer.zero_grad()


@pytest.mark.gpu_memory(world_size=64, ranks=[0, 63])
def test_what_does_not_divide_by_64(gpu_memory):
    """With several ranks on the marker the test runs as each: the last one's share is smaller."""
    rows = 50257  # GPT-2's words: 786 of them on a rank, and what is left on the last one
    with torch.device("meta"):
        model = nn.Embedding(rows, WIDTH)
    fully_shard(model)
    model.to_empty(device="cuda")
    own = 786 if gpu_memory.rank < 63 else rows - 63 * 786
    assert model.weight.to_local().shape == (own, WIDTH)

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(torch.zeros(LENGTH, dtype=torch.long, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    numbers = optimizer.state[model.weight]
    assert numbers["exp_avg"].to_local().shape == (own, WIDTH)
    # FSDP's own buffer is padded to the same 786 rows everywhere; Adam's two numbers are not (with
    # torch 2.9 and older one of them gets a padded gradient's whole block). A counter takes 512.
    sizes = [4 * WIDTH * (786 + own + rows) + 512 for rows in (own, 786)]
    assert gpu_memory.allocated in sizes


# Elastic training: on one, two or eight devices a step trains on the same 64 samples. Fewer devices
# take more micro-batches of 8 each, and add up their gradients.

GLOBAL_BATCH, MICRO_BATCH = 64, 8


def train_data_parallel(gpu_memory):
    """Train on the global batch, of which every rank has its part; return the parameters' bytes."""
    with torch.device("cuda"):
        network = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(6)))
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulated = GLOBAL_BATCH // (gpu_memory.world_size * MICRO_BATCH)
    assert gpu_memory.world_size * accumulated * MICRO_BATCH == GLOBAL_BATCH
    for _ in range(2):
        for number in range(1, accumulated + 1):
            model.require_backward_grad_sync = number == accumulated  # as model.no_sync() does
            samples = torch.zeros(MICRO_BATCH, 4096, device="cuda")
            (model(samples).mean() / accumulated).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(p.nbytes for p in network.parameters())


@pytest.mark.gpu_memory(world_size=1, batch_size=GLOBAL_BATCH)
def test_a_batch_on_one_device(gpu_memory):
    """Eight micro-batches: while they add up, there are gradients beside DDP's buckets."""
    parameters = train_data_parallel(gpu_memory)
    assert gpu_memory.peak_allocated >= 3 * parameters


@pytest.mark.gpu_memory(world_size=2, ranks="all", batch_size=GLOBAL_BATCH)
def test_the_same_batch_on_two(gpu_memory):
    """Four micro-batches each, and the same peak on either: a rank's memory is no half of it."""
    parameters = train_data_parallel(gpu_memory)
    assert gpu_memory.peak_allocated >= 3 * parameters


@pytest.mark.gpu_memory(world_size=8, ranks=[0, 7], batch_size=GLOBAL_BATCH)
def test_the_same_batch_on_eight(gpu_memory):
    """One micro-batch each: nothing to add up, and gradients need no room beside the buckets."""
    parameters = train_data_parallel(gpu_memory)
    assert 2 * parameters <= gpu_memory.peak_allocated < 3 * parameters
