"""Steps of peft: adapters on a small Llama, its weights in bfloat16."""

import peft
import pytest
import torch
import transformers

CONFIG = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=16),
    "dora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=16, use_dora=True),
    "ia3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
}


@pytest.mark.gpu_memory(card="L4", values="off")
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter(name):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    model = peft.get_peft_model(model.to("cuda", torch.bfloat16), ADAPTERS[name]())
    optimizer = torch.optim.AdamW(it for it in model.parameters() if it.requires_grad)
    tokens = torch.zeros(4, 512, dtype=torch.long, device="cuda")
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
