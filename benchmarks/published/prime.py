r"""prime-rl's baselines: peaks reserved by its two trainers, on one GPU.

    python -m benchmarks.published prime --source prime-rl=CLONE \
        --python 2.9=PYTHON --python 2.11=PYTHON

The clone is of PrimeIntellect-ai/prime-rl; data/README.md says what the interpreters have. Each
trainer runs unmodified, as the project's own benchmark starts it: one step, and the mean of the
peaks of three more, on made-up tokens. The model has no weights. Modules that are never called are
empty, and flash-attn's compiled extension is replaced by PyTorch's operators of the same kernels.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from contextlib import chdir
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock, patch

from benchmarks.harness import line, percent, read, spreads, table
from benchmarks.published.runner import looked, missing, unseen
from pytest_gpumem.devices.cards import CARDS

if TYPE_CHECKING:
    import torch

    from benchmarks.published.runner import Answers, Process, Row
    from pytest_gpumem.devices.cards import Card

PACKAGES = ("transformers", "flash_attn", "liger_kernel")
COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-4B-Instruct-2507": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
}
NEVER_CALLED = (
    *("vllm", "vllm.distributed", "vllm.distributed.device_communicators"),
    *("vllm.distributed.device_communicators.pynccl", "vllm.distributed.utils"),
    *("verifiers", "verifiers.utils", "prime_evals"),
)
"""modules that the trainers import for what a benchmark does not do"""
NEVER_CALLED_LATER = (
    *("verifiers.v1", "verifiers.v1.clients", "verifiers.v1.clients.config"),
    *("renderers", "renderers.base", "renderers.default", "tilelang", "tilelang.language"),
    *("prime_cli", "prime_cli.core", "prime_cli.core.config", "setproctitle"),
    "prime_rl.configs.orchestrator",
)
"""those that the trainers of 2026-06 import too"""
CONFIGURATION = "packages/prime-rl-configs/src"
"""folder of the classes of arguments, in 2026-06"""
RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "WANDB_MODE": "disabled",
    "HF_HUB_OFFLINE": "1",
}
CHECKPOINTS = {"Recompute": "--model.ac", "Offload": "--model.ac-offloading"}
"""the argument by what the project's benchmark calls it"""
RUNS = 4
"""number of adapters that the benchmark has room for"""
TITLE = "Peak reserved in GiB by prime-rl's trainers, mean of three steps"


def rows() -> list[Row]:
    """Return the rows, in the order of the file."""
    return read("prime-peaks.csv")


def card(row: Row) -> Card:
    """Return the row's card."""
    return CARDS[row["card"]]


def is_later(row: Row) -> bool:
    """Return whether the row is of the trainers of 2026-06."""
    return row["torch"] == "2.11.0"


def folders(row: Row) -> list[str]:
    """Return the folders of the trainers."""
    return ["src", CONFIGURATION] if is_later(row) else ["src"]


def source(_row: Row) -> str:
    """Return the name of the clone."""
    return "prime-rl"


def environment(_row: Row) -> dict[str, str]:
    """Return the variable that the project's workflow of benchmarks sets."""
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | RANK


def step(row: Row, process: Process) -> dict[str, float]:
    """Run a row; return its peak, or what it asked for and had allocated out of memory, in GiB."""
    import torch

    torch.cuda.init()
    process.device.values.compute("auto")
    sys.path[:0] = [str(process.source / folder) for folder in folders(row)]
    sys.modules["flash_attn_2_cuda"] = flash_attention()
    never_called = NEVER_CALLED + (NEVER_CALLED_LATER if is_later(row) else ())
    sys.modules |= {name: MagicMock(name=name) for name in never_called}
    trainer: Any = importlib.import_module(f"prime_rl.trainer.{row['trainer']}.train")
    # A thousand values of each weight are read for a line of the log.
    importlib.import_module("prime_rl.trainer.model").get_module_signature = lambda *_, **__: ""
    if hasattr(trainer, "get_response_lengths"):
        # It reads each position by a copy from the GPU; the result is the same with an array.
        lengths = trainer.get_response_lengths
        trainer.get_response_lengths = lambda positions: lengths(positions.cpu().numpy())
    with chdir(process.source), patch.object(sys, "argv", ["train.py", *words(row)]):
        write_model(Path(row["model"]), MODELS[row["model"]])
        try:
            trainer.main()
        except torch.OutOfMemoryError as error:
            return {
                name: float(re.findall(rf"{words} ([\d.]+) GiB", str(error))[0])
                for name, words in (("tried", "allocate"), ("allocated", "allocated memory"))
            }
        found = json.loads(Path("out.json").read_text(encoding="utf-8"))
    return {"gib": found["peak_memory"]["gib"]}


def words(row: Row) -> list[str]:
    """Return the arguments with which the project's benchmark starts a trainer."""
    found = ["--model.name", row["model"], "--model.seq-len", row["tokens"], "--model.compile"]
    found += ["--model.attn", "flash_attention_2", CHECKPOINTS[row["ac"]]]
    found += ["--model.debug.random-init"]
    found += ["--bench.output-json", "out.json", "--output-dir", "out"]
    if row["chunk"]:
        found += ["--model.fused-lm-head-token-chunk-size", row["chunk"]]
    if row["lora"]:
        found += ["--model.lora.rank", row["lora"], "--max-concurrent-runs", str(RUNS)]
    if row["trainer"] == "rl":
        return [*found, "--data.fake.batch-size", "2"]
    return [
        *found,
        *("--data.type", "fake", "--data.batch-size", "2", "--data.seq-len"),
        row["tokens"],
    ]


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Write a model's configuration and a tokenizer of two words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = models.WordLevel({"<end>": 0, "word": 1}, "word")
    end = {"eos_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary), **end).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(COMMON | config), encoding="utf-8")


def flash_attention() -> ModuleType:
    """Return a module in the place of flash-attn's extension."""
    import torch

    operators = torch.ops.aten
    module: Any = ModuleType("flash_attn_2_cuda")

    def fwd(*given: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401 - flash-attn's
        q, k, v, _, _, dropout, scale, causal, *_ = given
        sizes = None, None, q.shape[1], k.shape[1]
        out, sums, state, _, mask = operators._flash_attention_forward(
            q, k, v, *sizes, dropout, causal, False, scale=scale
        )
        return out, sums, mask, state

    def bwd(*given: Any) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401 - flash-attn's
        grad, q, k, v, out, sums, _, _, _, _, dropout, scale, causal, *_, state = given
        sizes = None, None, q.shape[1], k.shape[1]
        more = dropout, causal, state, torch.empty(0)
        grads = operators._flash_attention_backward(
            grad, q, k, v, out, sums, *sizes, *more, scale=scale
        )
        return (*grads, None)

    def varlen_fwd(*given: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401 - flash-attn's
        q, k, v, _, starts_q, starts_k, _, _, _, _, *more = given
        most_q, most_k, dropout, scale, _, causal, *_ = more
        sizes = starts_q, starts_k, most_q, most_k
        out, sums, state, _, mask = operators._flash_attention_forward(
            q, k, v, *sizes, dropout, causal, False, scale=scale
        )
        return out, sums, mask, state

    def varlen_bwd(*given: Any) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401 - flash-attn's
        grad, q, k, v, out, sums, _, _, _, starts_q, starts_k, _, *more = given
        most_q, most_k, dropout, scale, _, causal, *_, state = more
        sizes = starts_q, starts_k, most_q, most_k
        grads = operators._flash_attention_backward(
            grad, q, k, v, out, sums, *sizes, dropout, causal, state, torch.empty(0), scale=scale
        )
        return (*grads, None)

    module.fwd, module.bwd = fwd, bwd
    module.varlen_fwd, module.varlen_bwd = varlen_fwd, varlen_bwd
    return module


def report(answers: Answers) -> str:
    """Return the table and its summaries."""
    lines: list[list[str]] = []
    groups: dict[str, list[float]] = {}
    for row in answers.answered:
        found = answers.figures[""][row["row"]]
        name = f"{row['row']}, flash-attn {row['attention']}"
        both = [row["gib"], row["tried_gib"], row["allocated_gib"]]
        ours = [found.get(it) for it in ("gib", "tried", "allocated")]
        digits = 3, 2, 2
        shown = ["" if it is None else f"{it:.{n}f}" for it, n in zip(ours, digits, strict=True)]
        error = ""
        if row["gib"] and ours[0] is not None:
            off = percent(ours[0], float(row["gib"]))
            groups.setdefault(f"{looked(row)}, flash-attn {row['attention']}", []).append(off)
            error = f"{off:+.3f}"
        cells = [f"{float(both[0]):.3f}" if both[0] else "out of memory"]
        cells += [shown[0] or "out of memory", error, both[1], shown[1], both[2], shown[2]]
        lines.append([name, *cells, unseen(row), answers.commits[row["row"]]])
    here = [f"here: {versions}" for versions in sorted(set(answers.versions.values()))]
    heads = ["trainer's run", "real GiB", "virtual", "%", "real tried", "virtual tried"]
    heads += ["real allocated", "virtual allocated", "never looked at", "commit"]
    text = [TITLE, line(), *here, "", table(lines, heads), "", *spreads(groups, 3)]
    right = sum(
        bool(row["gib"]) == ("gib" in answers.figures[""][row["row"]]) for row in answers.answered
    )
    text.append(f"whether it fits: {right} of {len(lines)} right")
    return "\n".join([*text, *missing(answers)])
