"""Steps of transformers: training, checkpointing and generation."""

import pytest
import torch
import transformers

pytestmark = pytest.mark.gpu_memory(card="L4", values="off")
DECODER = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
DECODERS = {
    "Llama": DECODER,
    "Mistral": DECODER,
    "Qwen2": DECODER,
    "Gemma": DECODER | {"head_dim": 64},
    "Mixtral": DECODER | {"num_local_experts": 4},
    "GPT2": {"n_embd": 512, "n_layer": 4, "n_head": 8, "vocab_size": 8000},
}


def decoder(name):
    config = getattr(transformers, f"{name}Config")(**DECODERS[name])
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{name}{suffix}")(config).cuda()


def step(model, length=512):
    tokens = torch.zeros(4, length, dtype=torch.long, device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder(name):
    step(decoder(name))


def test_a_checkpointed_decoder():
    model = decoder("Llama")
    model.gradient_checkpointing_enable()
    model.train()
    step(model, 1024)


@pytest.mark.gpu_memory(card="L4", values="auto")
def test_generation():
    model = decoder("Llama").eval()
    tokens = torch.zeros(2, 64, dtype=torch.long, device="cuda")
    model.generate(tokens, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)


def test_an_encoder():
    config = transformers.BertConfig(hidden_size=512, num_hidden_layers=4, num_attention_heads=8)
    model = transformers.BertForMaskedLM(config).cuda()
    step(model, 256)


def test_an_encoder_of_images():
    config = transformers.ViTConfig(hidden_size=384, num_hidden_layers=4, num_attention_heads=6)
    model = transformers.ViTForImageClassification(config).cuda()
    model(pixel_values=torch.randn(8, 3, 224, 224, device="cuda")).logits.sum().backward()
