"""flash-attn 4: attention whose kernels CuTe DSL compiles."""

import pytest
import torch
from flash_attn.cute import flash_attn_func


@pytest.mark.filterwarnings("ignore")
@pytest.mark.gpu_memory(card="H100")
def test_attention_takes_less_than_its_scores(gpu_memory):
    def heads():
        shape = (2, 2048, 8, 64)
        return [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]

    with gpu_memory.measure("scores") as scores:
        query, key, value = (tensor.transpose(1, 2) for tensor in heads())
        weights = (query @ key.transpose(-1, -2) / 8).softmax(-1)
        (weights @ value).sum().backward()
    del query, key, value, weights
    with gpu_memory.measure("flash", at_most=0.5, of=scores):
        output = flash_attn_func(*heads(), causal=True)
        output = output[0] if isinstance(output, tuple) else output
        output.sum().backward()
