"""torchtitan: activations of each kind of checkpointing, a compiled step, two ways to gradients."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

WIDTH = 512


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.query = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.output = torch.nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, hidden):
        return self.output(self.query(self.gate(hidden))).sum()


class Toy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleDict({"0": Layer()})

    def forward(self, hidden):
        return self.layers["0"](hidden)


def selective(*recomputed):
    return SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=list(recomputed))


@pytest.mark.gpu_memory(card="A100-80GB")
@pytest.mark.parametrize(
    ("checkpointing", "mib"),
    [
        (None, 2),
        (selective(), 3),
        (selective("gate"), 2),
        (selective("output"), 1),
        (FullAC.Config(), 0),
    ],
)
def test_activations(gpu_memory, checkpointing, mib):
    model = Toy().cuda()
    if checkpointing:
        checkpointing.build().apply(model)
    batch = torch.randn(WIDTH, WIDTH, requires_grad=True, device="cuda")
    loss = model(batch)
    loss.backward()
    size = f"before + {mib}MiB"
    with gpu_memory.measure("forward", figure="held", at_least=size, at_most=size):
        loss = model(batch)
    loss.backward()


def llama():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=6
    )
    return transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)


@pytest.mark.gpu_memory(card="A100-80GB")
def test_a_compiled_step(gpu_memory):
    tokens = torch.zeros(2, 2048, dtype=torch.long, device="cuda")

    def step(model):
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()

    eager, compiled = llama(), torch.compile(llama(), backend="aot_eager")
    for layer in eager.model.layers:
        layer.forward = torch.compiler.disable(layer.forward)
    step(eager)
    step(compiled)
    torch.cuda.empty_cache()
    with gpu_memory.measure("eager") as plain:
        step(eager)
    for figure in ("reserved", "active"):
        with gpu_memory.measure(f"compiled, {figure}", at_most=1.1, of=plain, figure=figure):
            step(compiled)


@pytest.mark.gpu_memory(card="A100-80GB", world_size=2)
def test_two_ways_to_gradients(gpu_memory):
    tokens = torch.zeros(2, 128, dtype=torch.long, device="cuda")
    models = [fully_shard(llama(), mesh=init_device_mesh("cuda", (2,))) for _ in range(2)]

    def backward(model):
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()

    def gradients(model):
        loss = model(input_ids=tokens, labels=tokens).loss
        parameters = list(model.parameters())
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            parameter.grad = gradient
        model.zero_grad()

    backward(models[0])
    gradients(models[1])
    torch.cuda.empty_cache()
    with gpu_memory.measure("backward") as peak:
        backward(models[0])
    with gpu_memory.measure("grad", at_least=peak, at_most=peak):
        gradients(models[1])
