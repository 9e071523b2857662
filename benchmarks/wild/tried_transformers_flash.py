"""transformers 4.35.0 takes nearly four times what 4.34 takes, with FlashAttention 2."""

import pytest
import torch

PACKAGE = "transformers"
GOOD = "4.34.1"
BAD = "4.35.2"
WITH = ("numpy<2",)
REPORTED = "nearly four times as much in training"
LINKS = ("huggingface/transformers#27373",)


@pytest.mark.filterwarnings("ignore")  # of old releases
@pytest.mark.gpu_memory(card="A100-80GB")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_llama(checkpointed):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=24,
        num_attention_heads=8,
        vocab_size=1000,
    )
    model = LlamaForCausalLM(config).cuda().bfloat16().train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        ids = torch.randint(0, 1000, (16, 256), device="cuda")
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
