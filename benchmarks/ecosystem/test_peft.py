"""peft: LoRA on a small Llama takes less than training all of it."""

import peft
import pytest
import torch
import transformers

CONFIG = transformers.LlamaConfig(
    vocab_size=2000,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
)


def train(model):
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    tokens = torch.zeros(2, 128, dtype=torch.long, device="cuda")
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.gpu_memory(card="T4")
def test_lora_takes_less_than_full_training(gpu_memory):
    with gpu_memory.measure("full") as full:
        train(transformers.LlamaForCausalLM(CONFIG).cuda())
    with gpu_memory.measure("lora", less_than=full):
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=8)
        train(peft.get_peft_model(transformers.LlamaForCausalLM(CONFIG).cuda(), lora))
