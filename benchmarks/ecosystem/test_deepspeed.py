"""DeepSpeed: the steps of one rank of four, with stages 1 to 3 of ZeRO one after another.

Its package is built with the installed torch: ``pip install --no-build-isolation``.
"""

import deepspeed
import pytest
import torch

LAYERS, WIDTH = 8, 2048


@pytest.mark.gpu_memory(world_size=4)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_s_steps(stage):
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2**24},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for _ in range(2):
        batch = torch.randn(4, WIDTH, device=engine.device, dtype=torch.bfloat16)
        engine.backward(engine(batch).float().pow(2).mean())
        engine.step()
