"""Train a model of transformers with DeepSpeed, with the ZeRO stage from the command line."""

import sys

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

stage = int(sys.argv[1])
deepspeed.init_distributed("nccl")
settings = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}
config = LlamaConfig(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16
)
with deepspeed.zero.Init(config_dict_or_path=settings, enabled=stage == 3):
    model = AutoModelForCausalLM.from_config(config)
engine, *_ = deepspeed.initialize(model=model, config=settings)
tokens = torch.zeros(4, 512, dtype=torch.long, device=engine.device)
for _ in range(3):
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
