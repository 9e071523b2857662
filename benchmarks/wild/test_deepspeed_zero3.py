"""DeepSpeed 0.16.0 keeps the whole parameters of checkpointed modules after their backward pass."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

PACKAGE = "deepspeed"
GOOD = "0.15.3"
BAD = "0.16.2"
RELEASE = "0.16.0"
WITH = ("torch==2.6.0", "numpy<2", "setuptools<80")
REPORTED = "a model of 70 billion parameters does not fit, where it did with 0.15"
LINKS = ("deepspeedai/DeepSpeed#7116",)
LAYERS, WIDTH = 16, 2048


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, values):
        for layer in self.layers:
            values = checkpoint(layer, values, use_reentrant=False)
        return values


@pytest.mark.filterwarnings("ignore")  # of what it imports
@pytest.mark.gpu_memory(card="A100-80GB", world_size=4)
def test_checkpointed_layers_with_stage_3():
    import deepspeed

    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": WIDTH * WIDTH,
            "stage3_max_reuse_distance": 0,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for _ in range(2):
        batch = torch.randn(4, WIDTH, device=engine.device, dtype=torch.bfloat16)
        batch.requires_grad_()
        engine.backward(engine(batch).float().pow(2).mean())
        engine.step()
