"""xformers: attention without its matrix of scores, and kernels of its library.

Its wheel has these kernels for one version of torch: 2.10 for xformers 0.0.35.
"""

import pytest
import torch
import xformers.ops

ATTENTION = {
    "cutlass": xformers.ops.MemoryEfficientAttentionCutlassOp,
    "flash": xformers.ops.MemoryEfficientAttentionFlashAttentionOp,
}


def heads():
    return [
        torch.randn(2, 2048, 8, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    ]


@pytest.mark.gpu_memory
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_takes_less_than_its_scores(gpu_memory, name):
    with gpu_memory.measure("scores") as scores:
        query, key, value = (tensor.transpose(1, 2) for tensor in heads())
        weights = (query @ key.transpose(-1, -2) / 8).softmax(-1)
        (weights @ value).sum().backward()
    del query, key, value, weights
    with gpu_memory.measure("xformers", at_most=0.5, of=scores):
        mask = xformers.ops.LowerTriangularMask()
        output = xformers.ops.memory_efficient_attention(
            *heads(), attn_bias=mask, op=ATTENTION[name]
        )
        output.sum().backward()


@pytest.mark.gpu_memory
def test_sequences_of_several_lengths():
    shape = (1, 96, 8, 64)
    tensors = [
        torch.randn(shape, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3)
    ]
    blocks = xformers.ops.fmha.BlockDiagonalMask.from_seqlens([32, 64])
    xformers.ops.memory_efficient_attention(*tensors, attn_bias=blocks).sum().backward()


@pytest.mark.gpu_memory(card="A100-80GB")  # its kernel is compiled for this architecture
def test_a_product_with_a_sparse_matrix():
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    sparse = xformers.ops.sparsify24(weight)
    sparse @ weight
