"""transformers 4.31.0 computes the loss of Llama in float32."""

import pytest
import torch

PACKAGE = "transformers"
GOOD = "4.28.1"
BAD = "4.31.0"
RELEASE = "4.31.0"
WITH = ("numpy<2",)
REPORTED = "a batch of 4 with 4.28.1, of 1 with a newer one"
LINKS = ("tatsu-lab/stanford_alpaca#278",)


@pytest.mark.filterwarnings("ignore")  # of old releases
@pytest.mark.gpu_memory(card="A100-80GB")
def test_llama_in_bfloat16():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        vocab_size=32000,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).cuda()
    ids = torch.randint(0, 32000, (4, 512), device="cuda")
    model(ids, labels=ids).loss.backward()
