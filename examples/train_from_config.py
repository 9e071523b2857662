"""Train a causal language model of transformers for two steps, by its config.json alone."""

# gpumem run --cards all examples/train_from_config.py config.json --batch 4 --length 2048
# gpumem run --card T4 --largest=--batch:1..64 examples/train_from_config.py config.json --lora 16
# gpumem run --card H100 --world-size 8 examples/train_from_config.py config.json --fsdp

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("config")
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
parser.add_argument("--optimizer", choices=("AdamW", "Adafactor", "SGD"), default="AdamW")
parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of peft alone")
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--fsdp", action="store_true", help="shard over the ranks")
options = parser.parse_args()

if options.fsdp:
    torch.distributed.init_process_group("nccl")
config = AutoConfig.from_pretrained(options.config)
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
if options.checkpointing:
    model.gradient_checkpointing_enable()
layers = model.model.layers
if options.lora:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=options.lora, target_modules="all-linear")
    model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
if options.fsdp:
    for layer in layers:
        torch.distributed.fsdp.fully_shard(layer)
    torch.distributed.fsdp.fully_shard(model)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = getattr(torch.optim, options.optimizer)(trained)
tokens = torch.zeros(options.batch, options.length, dtype=torch.long, device="cuda")
for _ in range(2):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
