"""transformers 4.36.0 fills a cache of keys and values while it checkpoints activations."""

import pytest
import torch

PACKAGE = "transformers"
GOOD = "4.35.0"
BAD = "4.36.1"
RELEASE = "4.36.0"
WITH = ("numpy<2",)
REPORTED = "significantly more memory in training since 4.36"
LINKS = ("huggingface/transformers#28024",)


@pytest.mark.filterwarnings("ignore")  # of old releases
@pytest.mark.gpu_memory(card="A100-80GB")
def test_checkpointed_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=24,
        num_attention_heads=8,
        vocab_size=1000,
    )
    model = LlamaForCausalLM(config).cuda()
    model.gradient_checkpointing_enable()
    ids = torch.randint(0, 1000, (16, 256), device="cuda")
    model.train()(ids, labels=ids).loss.backward()
