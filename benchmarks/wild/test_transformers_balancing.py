"""transformers 5.16.0 computes the load balancing loss of one layer after the other."""

import pytest
import torch

PACKAGE = "transformers"
GOOD = "5.17.0"
BAD = "5.14.0"
RELEASE = "5.16.0"
WITH = ("numpy",)
REPORTED = "81.2 GB, and then 0.25 GB, with 128,000 tokens"
LINKS = ("huggingface/transformers#48131",)


@pytest.mark.filterwarnings("ignore")  # of what it imports
@pytest.mark.gpu_memory(card="A100-80GB")
def test_mixture_of_128_experts():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=1000,
        output_router_logits=True,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM(config).cuda()
    ids = torch.randint(0, 1000, (1, 4096), device="cuda")
    model(ids, labels=ids).loss.backward()
