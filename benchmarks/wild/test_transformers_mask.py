"""transformers 4.38.0 keeps a causal mask of all positions that a model may have."""

import pytest
import torch

PACKAGE = "transformers"
GOOD = "4.37.2"
BAD = "4.38.2"
RELEASE = "4.38.0"
WITH = ("numpy<2",)
REPORTED = "about 1 GiB more with 16,384 positions"
LINKS = ("huggingface/transformers#29484",)


@pytest.mark.gpu_memory(card="A100-80GB")
def test_llama_with_16384_positions():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=1000,
        max_position_embeddings=16384,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).cuda()
    ids = torch.randint(0, 1000, (1, 512), device="cuda")
    model(ids, labels=ids).loss.backward()
