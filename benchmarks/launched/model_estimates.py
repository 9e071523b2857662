"""``gpumem model`` on five language models, beside what accelerate and hf-mem tell by formulas.

    PYTHONPATH=FOLDER python -m benchmarks.launched.model_estimates

FOLDER contains accelerate, hf-mem and peft. Both tools query the Hugging Face hub for the weights'
sizes. To need no hub, their functions are called here with models that transformers makes on the
meta device from the same configurations. accelerate: ``calculate_maximum_sizes`` and
``estimate_training_usage``, which ``accelerate estimate-memory`` calls. hf-mem: the bytes of the
weights, and ``compute_safetensors_kv_cache_size``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import GIB, OFFLINE, line, publish, table

BATCH, LENGTH, CARD = 4, 2048, "H200"
QWEN: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 151936, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        **QWEN,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-1.5B": {
        **QWEN,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "tie_word_embeddings": True,
    },
    "Mistral-7B-v0.1": {
        "model_type": "mistral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen2.5-7B": {
        **QWEN,
        "vocab_size": 152064,
        "num_key_value_heads": 4,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "tie_word_embeddings": False,
    },
}
"""by model: the fields of its published config.json that determine sizes"""


def formulas(path: Path) -> list[float]:
    """Return the parameters in billions, and the GiB that accelerate and hf-mem estimate."""
    import torch
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size, _largest = calculate_maximum_sizes(model)
    training = max(estimate_training_usage(size, "bfloat16").values())
    cache = compute_safetensors_kv_cache_size(
        json.loads(path.read_text()), "BF16", LENGTH, batch_size=BATCH
    )
    sizes = training, size // 2, 2 * parameters + cache
    return [parameters / 1e9, *(nbytes / GIB for nbytes in sizes)]


def measured(path: Path) -> tuple[list[str], float]:
    """Return the memory by ``gpumem model`` for training and inference, and its seconds."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest_gpumem", "model", str(path), f"--cards={CARD}"]
    words = f"--batch={BATCH}", f"--length={LENGTH}"
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    takes = re.findall(r"(training|inference) on \S+ (?:takes|needs) ([\d.]+) (\w+)", done.stdout)
    savers = re.findall(r"with (\S+) ([\d.]+) (\w+)", done.stdout)
    sizes = [
        f"{float(number) / (1 if unit == 'GiB' else 1024):.2f}"
        for _, number, unit in (*takes, *savers)
    ]
    if done.returncode not in {0, 1}:
        sys.exit(done.stderr)
    return sizes, time.monotonic() - began


def main() -> None:
    """Print the table."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        for name, config in MODELS.items():
            path.write_text(json.dumps(config))
            sizes, seconds = measured(path)
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.launched.model_estimates", str(path)],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, **OFFLINE},
            )
            parameters, *estimates = json.loads(done.stdout.splitlines()[-1])
            training, inference, *savers = sizes
            formula = [f"{size:.2f}" for size in estimates]
            rows.append(
                [
                    *(name, f"{parameters:.3f}", training, formula[0], *savers),
                    *(inference, formula[1], formula[2], f"{seconds:.0f}"),
                ]
            )
    heads = ["model", "10^9 parameters", "training", "accelerate", "--checkpointing", "--lora=16"]
    heads += ["inference", "accelerate", "hf-mem", "seconds"]
    told = (
        f"GiB on a virtual {CARD}, bfloat16, AdamW, batch {BATCH}, {LENGTH} tokens. gpumem model: "
        "peak reserved, of four runs in these seconds, at a load average of "
        f"{os.getloadavg()[2]:.0f} in the last 15 minutes.\n"
        "accelerate knows no batch and no length: its training is twice the bytes of float32 "
        "weights. hf-mem adds keys and values to the weights. Their functions were called on the "
        "configurations: the commands ask the hub."
    )
    where = line("transformers", "peft", "accelerate", "hf_mem")
    publish("model_estimates", f"{where}\n{told}\n\n{table(rows, heads, 'lr')}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(formulas(Path(sys.argv[1]))))
    else:
        main()
