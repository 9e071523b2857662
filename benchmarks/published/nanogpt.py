r"""Compiled training steps on eight H100s, as one rank of eight, by their own source.

    python -m benchmarks.published nanogpt --source modded-nanogpt=CLONE --source nanochat=CLONE \
        --python 2.7=PYTHON --python 2.8=PYTHON --python 2.9=PYTHON

The clones are of KellerJordan/modded-nanogpt, whose logs contain the whole script and its peaks,
and of karpathy/nanochat. Both compile their models with torch.compile. The scripts run on made-up
tokens, with 14 training steps, two warm-up steps and a short validation; nanochat's model, loss and
optimizers run in a loop written here. data/README.md says what is left out.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from contextlib import chdir, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import MIB, line, percent, read, spreads, table
from benchmarks.published.runner import holds, looked, missing, unseen, with_range, within
from pytest_gpumem.devices.virtual.ranks.unwaited_collectives import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from benchmarks.published.runner import Answers, Process, Row

CARD = "H100"
LONGER = "tensors of collectives kept a step more"
RANKS = 8
LOOKS_MS = 105
"""interval at which a thread of PyTorch releases tensors of collectives: it sleeps for 100 ms"""
STEPS = 14
"""number of training steps: tensors of collectives stay alive for two, the first creates optimizer
state, and tensors used by other streams may stay until the program waits, which these do not"""
TOKENS = {"train": 32 * 8 * 65536, "val": 10485760 + 2}
"""number of tokens in each file of made-up data"""
SHORTER = {
    r"num_iterations( ?: int)? = \d+": f"num_iterations = {STEPS}",
    r"val_tokens( ?: int)? = \d+": "val_tokens = 2097152",
    r"warmup_steps = 10": "warmup_steps = 2",
}
VARIANTS = {"": {}, LONGER: {}}
"""unchanged, and with tensors of collectives kept for one more step"""
DEPTH, BATCH, LENGTH, VOCABULARY = 20, 32, 2048, 65536
TITLE = "Peak memory in MiB of compiled training steps, one of eight ranks on H100s"


def rows() -> list[Row]:
    """Return the rows, in the order of the file."""
    return read("nanogpt-peaks.csv")


def folders(row: Row) -> list[str]:
    """Return the files or folders of the source that a row needs."""
    return [row["log"] or "nanochat"]


def varies(row: Row) -> bool:
    """Return whether a row runs in the second variant: if a step is shorter than LOOKS_MS.

    Only torch 2.8 and newer keep tensors of collectives.
    """
    major, minor, *_ = row["torch"].split(".")
    keeps = (int(major), int(minor)) >= (2, 8)
    return keeps and bool(row["step_ms"]) and float(row["step_ms"]) < LOOKS_MS


def source(row: Row) -> str:
    """Return the name of the clone that a row needs."""
    return row["source"]


def environment(row: Row) -> dict[str, str]:
    """Return the variable that a row's script sets before it imports torch.

    Scripts for nightly builds of 2.7 register an operator whose fake function has other strides
    than its result. The release asserts equal strides; TORCHINDUCTOR_SIZE_ASSERTS disables that.
    """
    name, _, value = row["allocator_settings"].partition("=")
    settings = {name: value} if name else {}
    if row["torch"].startswith("2.7.0.dev"):
        settings["TORCHINDUCTOR_SIZE_ASSERTS"] = "0"
    return settings


def step(row: Row, process: Process) -> list[float]:
    """Run a row.

    Returns:
        the peaks allocated and reserved in MiB; if they have ranges, also the lower ends and the
        upper ends.
    """
    if process.variant:
        Progress.is_done_by = is_done_later  # type: ignore[method-assign]
        return train(row, process)
    peaks: list[float] = []
    _, (ends, reason) = with_range(lambda: peaks.extend(train(row, process)), process.device)
    print(reason, file=sys.stderr)
    return [*peaks, *(size / MIB for size in ends)]


def train(row: Row, process: Process) -> list[float]:
    """Run a row; return its peaks allocated and reserved in MiB."""
    import torch

    with chdir(process.source), process.device.join_alone(0, RANKS):
        if row["log"]:
            logged(Path(row["log"]))
        else:
            nanochat()
    stats = torch.cuda.memory_stats()
    return [stats[f"{name}_bytes.all.peak"] / MIB for name in ("allocated", "reserved")]


def is_done_later(then: Progress, now: Progress) -> bool:
    """Return whether a collective counts as done, one step later than usual."""
    return now.passes - then.passes >= (1 if now.waits > then.waits else 3)


def logged(log: Path) -> None:
    """Run the script at the beginning of a modded-nanogpt log."""
    import torch
    import torch.distributed as dist

    text = log.read_text(encoding="utf-8", errors="replace")
    text = text[: text.index("=" * 90)]
    for pattern, replacement in SHORTER.items():
        text = re.sub(pattern, replacement, text)
    folder = Path("data/fineweb10B")
    folder.mkdir(parents=True)
    for name, count in TOKENS.items():
        head = torch.zeros(256, dtype=torch.int32)
        head[:3] = torch.tensor([20240520, 1, count])
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, 50256, (count,), generator=generator, dtype=torch.int32)
        tokens[::700] = 50256  # the end of a document
        data = head.numpy().tobytes() + tokens.to(torch.uint16).numpy().tobytes()
        (folder / f"fineweb_{name}_000.bin").write_bytes(data)
    tool = Path("bin/nvidia-smi")  # the script prints its output
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n", encoding="utf-8")
    tool.chmod(0o755)
    os.environ["PATH"] = f"{tool.parent.resolve()}:{os.environ['PATH']}"
    dist.init_process_group = lambda *_, **__: None  # this process already is one of eight ranks
    dist.destroy_process_group = lambda *_, **__: None
    place = Path("place")  # one script looks for the data in the folder above its own
    (place / "logs" / "final").mkdir(parents=True)  # not every script creates it
    (place / "data").symlink_to("../data")
    script = Path("script.py")
    (place / script).write_text(text, encoding="utf-8")
    sys.argv = [str(script)]
    with chdir(place):
        runpy.run_path(str(script), run_name="__main__")


def nanochat() -> None:
    """Train nanochat's model as scripts/base_train.py does at the row's commit."""
    import torch

    sys.path.insert(0, ".")
    gpt: Any = __import__("nanochat.gpt", fromlist=["GPT"])
    evaluation: Any = __import__("nanochat.loss_eval", fromlist=["evaluate_bpb"])
    heads = DEPTH // 2
    sizes = {"n_layer": DEPTH, "n_head": heads, "n_kv_head": heads, "n_embd": 64 * DEPTH}
    with torch.device("meta"):
        plain = gpt.GPT(gpt.GPTConfig(sequence_len=LENGTH, vocab_size=VOCABULARY, **sizes))
    plain.to_empty(device="cuda")
    plain.init_weights()
    model: Any = torch.compile(plain, dynamic=False)
    token_bytes = torch.ones(VOCABULARY, dtype=torch.int32, device="cuda")
    rates = {"unembedding_lr": 0.004, "embedding_lr": 0.2, "matrix_lr": 0.02, "weight_decay": 0.0}
    optimizers = model.setup_optimizers(**rates)
    autocast = torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16)
    batches = batch()
    inputs, targets = next(batches)
    for number in range(STEPS):
        if number == 0:
            model.eval()
            with autocast, suppress(ZeroDivisionError):  # made-up tokens have no bytes
                evaluation.evaluate_bpb(model, batch(), 2, token_bytes)
            model.train()
        with autocast:
            loss = model(inputs, targets)
        loss.backward()
        inputs, targets = next(batches)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()


def batch() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets, of shape (batch, length), as nanochat's loader does."""
    import torch

    while True:
        tokens = torch.zeros(BATCH * LENGTH + 1, dtype=torch.int64).pin_memory()
        inputs, targets = tokens[:-1].to(torch.int32), tokens[1:]
        yield (
            inputs.view(BATCH, LENGTH).to(device="cuda", dtype=torch.int32, non_blocking=True),
            targets.view(BATCH, LENGTH).to(device="cuda", dtype=torch.int64, non_blocking=True),
        )


def report(answers: Answers) -> str:
    """Return the table and its summaries."""
    lines: list[list[str]] = []
    groups: dict[str, list[float]] = {}
    for row in answers.answered:
        cells = [row["row"].removeprefix("modded-nanogpt "), row["torch"]]
        peaks = answers.figures[""][row["row"]]
        told = []
        for at, name in enumerate(("allocated", "reserved")):
            peak, ends = peaks[at], peaks[2 + at :: 2]
            real = row[f"{name}_mib"]
            cells += [real or "not said", f"{peak:.2f}"]
            if ends and real:
                told.append(f"{name} {holds(ends, float(real))}")
            if real:
                error = percent(peak, float(real))
                groups.setdefault(f"{looked(row)}, {name}", []).append(error)
                cells.append(f"{error:+.3f}")
            else:
                cells.append("")
        lines.append(
            [
                *(*cells, row["step_ms"], several(row), "; ".join(told), longer(row, answers)),
                *(unseen(row), answers.torch(row), answers.commits[row["row"]]),
            ]
        )
    heads = ["step", "torch", "real allocated", "virtual", "%", "real reserved", "virtual", "%"]
    heads += ["ms a step", "logs: least to most", "ranges", LONGER]
    heads += ["never looked at", "torch here", "commit"]
    text = [TITLE, line(), "", table(lines, heads), "", *spreads(groups, median=3), *within(groups)]
    return "\n".join([*text, *missing(answers)])


def longer(row: Row, answers: Answers) -> str:
    """Return the cell for a row's second variant.

    It says whether the real peaks lie between those of the first and of the second variant.
    """
    if row["row"] not in answers.figures[LONGER]:
        return ""
    told = []
    for at, name in enumerate(("allocated", "reserved")):
        ends = [answers.figures[variant][row["row"]][at] for variant in VARIANTS]
        told.append(f"{name} {holds(ends, float(row[f'{name}_mib']))}")
    return "; ".join(told)


def several(row: Row) -> str:
    """Return the spread of a row's real figures if its script has several logs; else ""."""
    if row["logs"] == "1" or not row["allocated_least"]:
        return ""
    text = f"{row['logs']}: {row['allocated_least']} to {row['allocated_most']}"
    if row["reserved_least"]:
        text += f"; {row['reserved_least']} to {row['reserved_most']}"
    return text
