"""torchao: an 8-bit optimizer keeps less state; weights of 8 bits take less than of 16."""

import gc

import pytest
import torch
from torchao.optim import AdamW8bit
from torchao.quantization import Int8WeightOnlyConfig, quantize_


def train(optimizer_class):
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))).cuda()
    optimizer = optimizer_class(model.parameters())
    for _ in range(2):
        model(torch.randn(8, 2048, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.gpu_memory(card="L4")
def test_an_8_bit_optimizer_takes_less(gpu_memory):
    with gpu_memory.measure("32 bits") as plain:
        train(torch.optim.AdamW)
    with gpu_memory.measure("8 bits", less_than=plain):
        train(AdamW8bit)


@pytest.mark.gpu_memory(card="L4")
@torch.no_grad()
def test_quantized_weights_take_less(gpu_memory):
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4)))
    model = model.to("cuda", torch.bfloat16)
    before = gpu_memory.allocated
    quantize_(model, Int8WeightOnlyConfig())
    assert gpu_memory.allocated < 0.6 * before
    model(torch.randn(8, 2048, device="cuda", dtype=torch.bfloat16))


@pytest.mark.gpu_memory(card="L4")
def test_weights_that_are_quantized_on_their_way_to_the_gpu_take_less(gpu_memory):
    """Test what torchao's test_quantized_model_streaming tests by comparing two peaks by hand."""

    def model():
        return torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4)))

    with gpu_memory.measure("all, then quantized") as moved:
        quantize_(model().cuda(), Int8WeightOnlyConfig())
    gc.collect()  # the first model is in cycles of its own
    with gpu_memory.measure("one by one", less_than=moved):
        quantize_(model(), Int8WeightOnlyConfig(), device="cuda")
