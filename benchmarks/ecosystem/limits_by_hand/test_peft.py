"""peft: casts of a model for k-bit training give their memory back."""

import peft
import pytest
import torch


@pytest.mark.gpu_memory(card="T4")
def test_casts_reserve_little(gpu_memory):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, width) for width in (64, 64, 32)))
    model = model.to("cuda", torch.float16)
    model.is_loaded_in_8bit = True
    with gpu_memory.measure("casts", figure="reserved", less_than="before + 200MiB"):
        peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    reserved = gpu_memory.reserved
    torch.cuda.empty_cache()
    assert gpu_memory.reserved == reserved
