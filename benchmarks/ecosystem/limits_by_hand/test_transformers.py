"""transformers: a cache on the host, and the peak of an optimizer within two limits."""

import pytest
import torch
import transformers


@pytest.mark.gpu_memory(card="T4")
def test_an_offloaded_cache_takes_less(gpu_memory):
    config = transformers.LlamaConfig(
        vocab_size=2000, hidden_size=512, intermediate_size=1024, num_hidden_layers=8
    )
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.float16)
    tokens = torch.ones(1, 512, dtype=torch.long, device="cuda")
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 20}
    with gpu_memory.measure("on the GPU") as resident:
        model.generate(tokens, **options)
    with gpu_memory.measure("offloaded", less_than=resident):
        model.generate(tokens, cache_implementation="offloaded", **options)


@pytest.mark.gpu_memory(card="T4")
@pytest.mark.parametrize("modules", [[r".*attn.*", r".*mlp.*"], ["q_proj"], "all-linear"], ids=str)
def test_galore_with_adafactor(gpu_memory, tmp_path, modules):
    pytest.importorskip("galore_torch")
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=4
    )
    tokens = torch.randint(0, 100, (128,))
    arguments = transformers.TrainingArguments(
        str(tmp_path), learning_rate=1e-9, optim="galore_adafactor", optim_target_modules=modules
    )
    model = transformers.LlamaForCausalLM(config)
    rows = [{"input_ids": tokens, "labels": tokens}] * 64
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    with gpu_memory.measure("train", more_than="600MiB", less_than="700MiB"):
        trainer.train()
