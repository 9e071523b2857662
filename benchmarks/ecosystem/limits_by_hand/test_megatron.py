"""Megatron-LM: FSDP at rest and at its peak, recomputation, offloaded activations and states.

FSDP is ``megatron_fsdp.experimental``, which a checkout of Megatron-LM has (``PYTHONPATH``), and
no release yet.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

fsdp = pytest.importorskip("megatron.core.distributed.fsdp.src.megatron_fsdp.experimental")
MixedPrecision = pytest.importorskip(
    "megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision"
).MixedPrecisionPolicy

WIDTH = 4096
HALF = torch.bfloat16
WEIGHT = 2 * WIDTH * WIDTH
MIB = 2**20
PLACEMENTS = {
    "zero1": {"parameter": [Replicate()], "gradient": [Partial("avg")]},
    "zero2": {"parameter": [Replicate()], "gradient": [Shard(0)]},
    "zero3": {"parameter": [Shard(0)], "gradient": [Shard(0)]},
}


class Layers(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(WIDTH))
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)
        )

    def forward(self, hidden):
        hidden = hidden + self.bias
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return hidden


class FirstRow(torch.nn.Module):
    """A large weight, of which one row is used."""

    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, width))

    def forward(self, hidden):
        return (hidden + self.weight[0]).relu()


def shard(modules, kind="zero3", policy=None, **context):
    mesh = init_device_mesh("cuda", (2,))
    placements = fsdp.Placements(dp_axes=[0], optimizer=[Shard(0)], **PLACEMENTS[kind])
    options = {"mixed_precision_policy": policy} if policy else {}
    with fsdp.fully_shard_context(device=torch.device("cuda", 0), **context):
        for module in modules:
            fsdp.fully_shard(module, mesh=mesh, placements=placements, **options)


@pytest.mark.gpu_memory(card="H100", world_size=2)
@pytest.mark.parametrize(("dtype", "copies"), [(HALF, 2), (torch.float32, 4)], ids=str)
def test_sharded_storage(gpu_memory, dtype, copies):
    model = Layers(8).to(HALF)
    size = 8 * copies * WEIGHT // 2
    limits = {"at_least": f"before + {size}B", "less_than": f"before + {size + MIB}B"}
    with gpu_memory.measure("shard", figure="held", **limits):
        shard([*model.layers, model], policy=MixedPrecision(main_params_dtype=dtype))


@pytest.mark.gpu_memory(card="A100-80GB", world_size=2)
@pytest.mark.parametrize(("unified", "buffers"), [(False, 5), (True, 4)])
def test_full_buffers_of_a_step(gpu_memory, unified, buffers):
    model = Layers(8).to(HALF)
    policy = MixedPrecision(main_params_dtype=HALF, main_grads_dtype=HALF)
    shard([*model.layers, model], policy=policy, unify_communication_stream=unified)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fsdp.fully_shard_optimizer(optimizer)
    batch = torch.randn(2, WIDTH, device="cuda", dtype=HALF)
    with gpu_memory.measure("step", less_than=f"before + {buffers * WEIGHT}B"):
        model(batch).float().sum().backward()
        optimizer.step()


@pytest.mark.gpu_memory(card="H100", world_size=2)
def test_the_first_step_of_zero1(gpu_memory):
    batch = torch.ones(256, WIDTH, device="cuda", dtype=HALF)
    model = FirstRow(WIDTH).to("cuda", HALF)
    shard([model], kind="zero1")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    fsdp.fully_shard_optimizer(optimizer)
    growth = max(3 * WEIGHT - WEIGHT // 2, 5 * WEIGHT)
    limits = {"more_than": f"before + {growth - MIB}B", "less_than": f"before + {growth + MIB}B"}
    with gpu_memory.measure("step", **limits):
        model(batch).sum().backward()
        optimizer.step()


@pytest.mark.gpu_memory(card="H100", world_size=2)
def test_a_deleted_model(gpu_memory):
    with gpu_memory.measure("model", figure="held", less_than="before + 1MiB"):
        model = FirstRow(8192).to("cuda", HALF)
        shard([model])
        model(torch.ones(1, 8192, device="cuda", dtype=HALF))
        del model


@pytest.mark.gpu_memory(card="H100", world_size=2)
def test_passes_return_to_rest(gpu_memory):
    model = Layers(2).to("cuda", HALF)
    policy = MixedPrecision(main_params_dtype=HALF, main_grads_dtype=HALF)
    shard([*model.layers, model], policy=policy)
    batch = torch.randn(2, WIDTH, device="cuda", dtype=HALF)
    with gpu_memory.measure("rest"):
        pass
    with gpu_memory.measure("forward", figure="held", less_than="rest + 1MiB"):
        output = model(batch)
    with gpu_memory.measure("backward", figure="held", less_than="rest + 1MiB"):
        output.float().square().mean().backward()
        del output


@pytest.mark.gpu_memory(card="H100", world_size=2)
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_sharding_lowers_the_peak(gpu_memory, kind):
    def train(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        batch = torch.randn(8, 1024, device="cuda", dtype=HALF)
        for _ in range(2):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

    def layers():
        return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, dtype=HALF) for _ in range(16)))

    with gpu_memory.measure("whole") as whole:
        train(layers().to("cuda"))
    policy = MixedPrecision(main_params_dtype=HALF, main_grads_dtype=HALF)
    with gpu_memory.measure("sharded", less_than=whole):
        model = layers().to("cuda")
        shard(model, kind=kind, policy=policy)
        train(model)


class Experts(torch.nn.Module):
    """A network over permuted tokens, whose outputs are added where the tokens came from."""

    def __init__(self, width, inner, early):
        super().__init__()
        self.early = early
        layers = torch.nn.Linear(width, inner), torch.nn.GELU(), torch.nn.Linear(inner, width)
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, tokens, order, total):
        tokens = self.layers(tokens)
        output = tokens.new_zeros(total, tokens.shape[1])
        output.scatter_add_(0, order[:, None].expand(tokens.shape), tokens)
        if self.early:
            del tokens, order
        return output


@pytest.mark.gpu_memory(card="H100")
@pytest.mark.parametrize(
    ("tokens", "width", "inner"),
    [(65536, 4096, 14336), (32768, 2048, 7168), (16384, 1024, 4096)],
)
def test_unpermuted_tokens_are_let_go(gpu_memory, tokens, width, inner):
    def step(early):
        layer = Experts(width, inner, early).to("cuda", HALF)
        inputs = torch.randn(tokens, width, device="cuda", dtype=HALF, requires_grad=True)
        order = torch.randint(2 * tokens, (tokens,), device="cuda")
        output = checkpoint(layer, inputs, order, 2 * tokens, use_reentrant=False)
        torch.nn.functional.mse_loss(output, torch.randn_like(output)).backward()
        return layer, inputs

    with gpu_memory.measure("kept"):
        kept = step(early=False)
    del kept
    with gpu_memory.measure("let go"):
        kept = step(early=True)
    del kept
    for figure in ("allocated", "held"):
        gpu_memory.ordered("let go <= kept", figure=figure)


@pytest.mark.gpu_memory(card="H100")
def test_offloaded_activations(gpu_memory):
    layers = [torch.nn.Linear(2048, 2048) for _ in range(8)]
    model = torch.nn.Sequential(*layers, torch.nn.GELU()).to("cuda", HALF)
    batch = torch.randn(8192, 2048, device="cuda", dtype=HALF)
    model(batch).sum().backward()
    saved = 8192 * 2048 * 2
    with gpu_memory.measure("resident"):
        model(batch).sum().backward()
    most, least = (f"resident - {share * 8 * saved:.0f}B" for share in (0.7, 1.3))
    offload = torch.autograd.graph.save_on_cpu()
    with gpu_memory.measure("offloaded", at_most=most, at_least=least), offload:
        model(batch).sum().backward()


def initialize():
    from megatron.core import parallel_state, tensor_parallel

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(123)


@pytest.mark.gpu_memory(card="H100", world_size=1)
def test_an_offloaded_optimizer(gpu_memory):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    initialize()
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True
    )
    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    model = gpt_model.GPTModel(config, spec, vocab_size=256, max_sequence_length=32).cuda()
    buffers = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, buffers, model)
    options = OptimizerConfig(optimizer="adam", lr=0.01, bf16=True, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(options, [model])
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                state |= {"exp_avg": parameter.data.clone(), "exp_avg_sq": parameter.data.clone()}
    with gpu_memory.measure("offload", figure="held", less_than="before"):
        optimizer.offload_to_cpu()
    with gpu_memory.measure("restore", figure="held", more_than="before"):
        optimizer.restore_from_cpu()
