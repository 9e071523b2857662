"""peft 0.12.0 keeps adapters in float32 where the model is in bfloat16 or float16."""

import pytest
import torch

PACKAGE = "peft"
GOOD = "0.10.0"
BAD = "0.12.0"
RELEASE = "0.12.0"
WITH = ("transformers==4.44.2", "numpy<2")
REPORTED = "20 to 24 % more"
LINKS = ("huggingface/peft#1706",)


@pytest.mark.gpu_memory(card="A100-80GB")
def test_lora_of_a_bfloat16_model():
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        vocab_size=8000,
        use_cache=False,
    )
    lora = LoraConfig(r=64, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"])
    model = get_peft_model(LlamaForCausalLM(config).to(torch.bfloat16), lora).cuda()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = torch.randint(0, 8000, (4, 512), device="cuda")
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
