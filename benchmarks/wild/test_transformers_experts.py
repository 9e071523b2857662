"""transformers 5.0.0 has the weights of all experts in one parameter, which stays in 16 bits."""

import pytest
import torch

PACKAGE = "transformers"
GOOD = "4.57.3"
BAD = "5.1.0"
RELEASE = "5.0.0"
WITH = ("torch==2.8.0", "accelerate==1.12.0", "bitsandbytes==0.49.1", "numpy")
REPORTED = "out of memory on 2 x 96 GB, where 4.57.6 takes 48 GB to load"
LINKS = ("axolotl-ai-cloud/axolotl#3374",)


@pytest.mark.filterwarnings("ignore")  # of what it imports
@pytest.mark.gpu_memory(card="A100-80GB")
def test_loading_in_4_bits(tmp_path):
    from transformers import BitsAndBytesConfig, Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        n_routed_experts=64,
        vocab_size=1000,
    )
    Glm4MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    quantized = BitsAndBytesConfig(load_in_4bit=True)
    Glm4MoeForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantized, device_map={"": 0}, dtype=torch.bfloat16
    )
