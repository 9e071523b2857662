r"""A checkpoint of Qwen3-8B loaded by transformers, and two tokens: bytes that FakeGPU publishes.

    python -m benchmarks.published loading --python PYTHON

The interpreter has torch 2.9.1, transformers 4.57.6 and accelerate. The checkpoint has the shapes
of the source's, in files with holes in the place of weights.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import DATA, line, percent, read, spread, table
from benchmarks.published.inference import keep_values_unset
from benchmarks.published.runner import unseen
from pytest_gpumem.devices.cards import CARDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.published.runner import Answers, Process, Row
    from pytest_gpumem.devices.cards import Card

PACKAGES = ("transformers", "accelerate")
CONFIG = DATA / "servers" / "Qwen3-8B" / "config.json"
SHARD = 4 * 10**9
"""bytes of weights in a file of the checkpoint"""
PROMPT = 9
"""number of tokens"""
TITLE = "Bytes allocated by Qwen3-8B in bfloat16: once it is loaded, and at most while it writes"


def rows() -> list[Row]:
    """Return the rows, in the order of the file."""
    return read("loading-peaks.csv")


def card(row: Row) -> Card:
    """Return the row's card."""
    return CARDS[row["card"]]


def group(row: Row) -> str:
    """Return the process of a row: the peak is of the model that was loaded."""
    del row
    return "Qwen3-8B"


def steps(process: Process) -> Iterator[tuple[str, int]]:
    """Load the model, and write two tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded, peak = (row["row"] for row in process.rows)
    torch.cuda.init()
    process.device.values.compute("auto")
    keep_values_unset()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, device_map="cuda:0", attn_implementation="sdpa"
        ).eval()
    yield loaded, torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ids = torch.zeros(1, PROMPT, dtype=torch.long).to("cuda")
    mask = torch.ones(1, PROMPT, dtype=torch.long).to("cuda")
    with torch.inference_mode():
        outputs = model(input_ids=ids, attention_mask=mask, use_cache=True)
        token = outputs.logits[:, -1, :].argmax(dim=-1, keepdim=True)
        token.item()
        longer = torch.cat([mask, torch.ones_like(token)], dim=1)
        outputs = model(
            input_ids=token,
            attention_mask=longer,
            past_key_values=outputs.past_key_values,
            use_cache=True,
        )
        outputs.logits[:, -1, :].argmax(dim=-1, keepdim=True).item()
    yield peak, torch.cuda.max_memory_allocated()


def write_checkpoint(folder: Path) -> None:
    """Write a checkpoint in safetensors' format, whose files have holes in the place of weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(CONFIG)
        weights = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, weight in weights.items():
        if sum(it.nbytes for it in files[-1].values()) + weight.nbytes > SHARD:
            files.append({})
        files[-1][name] = weight
    places = {}
    for number, held in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        places |= dict.fromkeys(held, file)
        head, end = {}, 0
        for name, weight in held.items():
            begin, end = end, end + weight.nbytes
            shape = list(weight.shape)
            head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(head).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    shutil.copy(CONFIG, folder)


def report(answers: Answers) -> str:
    """Return the table and its summaries."""
    lines: list[list[str]] = []
    errors: dict[str, list[float]] = {"virtual GPU": [], "FakeGPU": []}
    for row in answers.rows:
        ours = answers.figures[""][row["row"]]
        real, theirs = int(row["bytes"]), int(row["their_bytes"])
        both = percent(ours, real), percent(theirs, real)
        for predictor, error in zip(errors, both, strict=True):
            errors[predictor].append(error)
        cells = [row["row"], row["torch"], row["card"], f"{real:,}", f"{ours:,}", f"{both[0]:+.4f}"]
        lines.append([*cells, f"{theirs:,}", f"{both[1]:+.4f}", unseen(row)])
    heads = ["Qwen3-8B", "torch", "GPU", "real", "virtual", "%", "FakeGPU", "FakeGPU's %"]
    text = [TITLE, line(), answers.here(), "", table(lines, [*heads, "never looked at"]), ""]
    return "\n".join([*text, *(f"{who}: {spread(it, 4, 4)}" for who, it in errors.items())])
