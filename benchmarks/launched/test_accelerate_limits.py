"""accelerate's nine limits of launched training (tests/deepspeed, tests/fsdp), as markers.

    python -m benchmarks.launched.made_up_data FOLDER
    cd FOLDER && ACCELERATE=PATH pytest /path/to/benchmarks/launched/test_accelerate_limits.py

PATH is a clone of huggingface/accelerate: its script runs as its tests start it, on two T4. The
numbers are its own, in MiB; accelerate skips the limits of plain DDP, and DeepSpeed's after 0.12.6.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = "src/accelerate/test_utils/scripts/external_deps/test_peak_memory_usage.py"
DDP = ("--multi_gpu",)
DEEPSPEED = (
    *("--use_deepspeed", "--gradient_accumulation_steps=1", "--gradient_clipping=1"),
    *("--zero3_init_flag=True", "--zero3_save_16bit_model=True"),
    *("--offload_optimizer_device=none", "--offload_param_device=none"),
)
FSDP = (
    *("--use_fsdp", "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP"),
    "--fsdp_transformer_layer_cls_to_wrap=BertLayer",
)
FSDP1 = (*FSDP, "--fsdp_version=1")
LIMITS = {
    "deepspeed-ddp": (3200, DDP),
    "zero-1": (1600, (*DEEPSPEED, "--zero_stage=1")),
    "zero-2": (2500, (*DEEPSPEED, "--zero_stage=2")),
    "zero-3": (2800, (*DEEPSPEED, "--zero_stage=3")),
    "fsdp-ddp": (3200, DDP),
    "fsdp-grad-op": (2000, (*FSDP1, "--fsdp_sharding_strategy=SHARD_GRAD_OP")),
    "fsdp-full": (1900, (*FSDP1, "--fsdp_sharding_strategy=FULL_SHARD")),
    "fsdp2-ddp": (3200, DDP),
    "fsdp2-full": (1900, (*FSDP, "--fsdp_version=2", "--fsdp_reshard_after_forward=true")),
}


@pytest.mark.gpu_memory(card="T4", devices=2)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.gpu_memory(max_allocated_gib=limit / 1024))
        for name, (limit, options) in LIMITS.items()
    ],
)
def test_peak_memory(options: tuple[str, ...], tmp_path: Path) -> None:
    """Two ranks train BERT for ten steps with fp16."""
    script = str(Path(os.environ["ACCELERATE"]) / SCRIPT)
    launch = ("accelerate", "launch", "--num_processes=2", "--num_machines=1", "--machine_rank=0")
    sizes = ("--n_train=160", "--n_val=160", f"--output_dir={tmp_path}")
    command = (*launch, "--mixed_precision=fp16", *options, script, *sizes)
    subprocess.run(command, check=True)
