"""How long the Trainer's steps of a QLoRA take on the virtual GPU.

    python -m benchmarks.speed.qlora [--width 2048] [--layers 12] [--tokens 512]

A Llama made from its configuration, saved, loaded in nf4 with double quantization (bitsandbytes),
with LoRA on its attention (peft), trained by transformers' Trainer: float16, checkpointing,
accumulation of two micro-batches of four, and the paged 8-bit AdamW. It needs the packages of
``pip install -e '.[ecosystem]'``. For each of ``--gpumem-values``' auto and off the model is loaded
and trained in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from tabulate import tabulate

from benchmarks.harness import line, publish

STEPS = 5
HEAD = 64
"""elements of an attention's head"""


def train(width: int, layers: int, tokens: int) -> dict[str, Any]:
    """Load the model and train it; return seconds and bytes."""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import (
        AutoModelForCausalLM,
        BitsAndBytesConfig,
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Clock(TrainerCallback):  # type: ignore[misc] # without stubs
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append((time.monotonic(), time.process_time()))

    heads = width // HEAD
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4 // HEAD * HEAD,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=32_000,
    )
    quantized = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float16,
        bnb_4bit_use_double_quant=True,
    )
    adapters = LoraConfig(
        r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).half().save_pretrained(folder)
        start = time.monotonic()
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantized, device_map={"": 0}, dtype=torch.float16
        )
        loaded = time.monotonic() - start
        model = get_peft_model(prepare_model_for_kbit_training(model), adapters)
        texts = [{name: torch.zeros(tokens).long() for name in ("input_ids", "labels")}] * 64
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=STEPS,
            fp16=True,
            gradient_checkpointing=True,
            optim="paged_adamw_8bit",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=texts, callbacks=[Clock()])
        ends = [(time.monotonic(), time.process_time())]
        trainer.train()
    walls, processor = zip(*ends, strict=True)
    return {
        "loaded": loaded,
        "first": walls[1] - walls[0],
        "step": (walls[-1] - walls[1]) / (STEPS - 1),
        "step_cpu": (processor[-1] - processor[1]) / (STEPS - 1),
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def main() -> None:
    """Train, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.width, options.layers, options.tokens
    if options.here:
        print(json.dumps(train(*sizes)))
        return
    rows = []
    for values in ("auto", "off"):
        command = [sys.executable, "-m", "pytest_gpumem", "run", "--values", values]
        program = ["-m", "benchmarks.speed.qlora", "--here"]
        given = [
            f"--{name}={size}"
            for name, size in zip(("width", "layers", "tokens"), sizes, strict=True)
        ]
        done = subprocess.run(
            [*command, *program, *given],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        found = json.loads(next(it for it in done.stdout.splitlines() if it.startswith('{"loaded')))
        seconds = [found[name] for name in ("loaded", "first", "step", "step_cpu")]
        rows.append(
            [values, *seconds, *(found[name] / 2**20 for name in ("allocated", "reserved"))]
        )
    names = ("transformers", "peft", "bitsandbytes", "accelerate")
    titles = [
        "values",
        "loading s",
        "first step s",
        "a step s",
        "its CPU s",
        "allocated MiB",
        "reserved MiB",
    ]
    head = (
        f"QLoRA by transformers' Trainer on the virtual GPU (H100): a Llama of width {sizes[0]}, "
        f"{sizes[1]} layers;\nnf4, fp16, checkpointing, paged 8-bit AdamW, 2 x 4 texts of "
        f"{sizes[2]} tokens, {STEPS} steps\n{line(*names)}"
    )
    table = tabulate(rows, titles, floatfmt=("", ".1f", ".1f", ".2f", ".2f", ".2f", ".2f"))
    default = (2048, 12, 512)
    publish("speed_qlora", f"{head}\n\n{table}", keep=sizes == default)


if __name__ == "__main__":
    main()
