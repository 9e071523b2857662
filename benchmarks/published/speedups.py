r"""A GPT from scratch that torch.compile compiles, on A100s: by the scripts of its source.

    python -m benchmarks.published speedups --source LLMs-from-scratch --python 2.6=PYTHON

The source is a clone of rasbt/LLMs-from-scratch. Its scripts run for one epoch unmodified, with
evaluations and a sample, on as many made-up tokens as the book that they train on has. The figures
are from its README, which has one for each change: later changes to the scripts are reverted. A
compiled script has a range here, as a GPU makes some choices by timing.
"""

from __future__ import annotations

import re
import runpy
import sys
from contextlib import chdir, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from benchmarks.harness import GIB, MIB, line, percent, read, spreads, table
from benchmarks.published.runner import holds, looked, missing, unseen, with_range, within

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.published.runner import Answers, Process, Row

CARD = "A100-80GB"
TOKENS = 475_000
"""tokens of the book: the README's epoch has 52 batches of 8 * 1024 tokens, from 90 % of them"""
PROMPT = 4
"""number of tokens that the sample begins with"""
VARIANTS = {"": {}, "padded": {}, "timed": {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}}
"""unchanged; with the operands of all odd products padded; and with these and the memory that a
GPU's first run allocates to time kernels"""
NAMES = {"": "as compiled", "padded": "products padded", "timed": "and kernels timed"}
FLUSHED = 256 * 2**20
"""bytes of the buffer with which Triton's do_bench flushes a GPU's cache"""
TITLE = "Memory reserved in MiB at the end of an epoch: a GPT from scratch, compiled, on A100s"


def rows() -> list[Row]:
    """Return the rows, in the order of the file."""
    return read("speedups-peaks.csv")


def folders(row: Row) -> list[str]:
    """Return the folder of the scripts."""
    return [str(Path(row["script"]).parent)]


def varies(row: Row) -> bool:
    """Return whether a row runs in all variants: only the two that differ in the vocabulary."""
    return row["batch"] == "8"


def source(row: Row) -> str:
    """Return the name of the clone."""
    del row
    return "LLMs-from-scratch"


def step(row: Row, process: Process) -> list[float]:
    """Run a row's script for one epoch.

    Returns:
        the reserved MiB at its end, and the range of peak reserved if there is one.
    """
    if process.variant:
        return [epoch(row, process)]
    reserved: list[float] = []
    _, (ends, reason) = with_range(lambda: reserved.append(epoch(row, process)), process.device)
    print(reason, file=sys.stderr)
    return [*reserved, *(size / MIB for size in ends[1::2])]


def epoch(row: Row, process: Process) -> float:
    """Run a row's script for one epoch; return the reserved MiB at its end."""
    import torch

    if process.variant == "padded":
        import torch._inductor.config

        torch._inductor.config.force_shape_pad = True
    if process.variant == "timed":
        time_kernels()
    with chdir(process.source):
        script = Path(row["script"])
        text = script.read_text(encoding="utf-8")
        changes = {
            r'"vocab_size": \d+': f'"vocab_size": {row["vocabulary"]}',
            r'"batch_size": \d+': f'"batch_size": {row["batch"]}',
            r'"num_epochs": \d+': '"num_epochs": 1',
            r"num_workers=4": "num_workers=0",
        }
        for pattern, replacement in changes.items():
            text, count = re.subn(pattern, replacement, text)
            assert count, pattern
        script.write_text(text, encoding="utf-8")
        Path("middlemarch.txt").write_text("x" * TOKENS, encoding="utf-8")
        stand_in()
        ranks = int(row["ranks"])
        with process.device.join_alone(0, ranks) if ranks > 1 else nullcontext():
            distributed = torch.distributed
            distributed.init_process_group = lambda *_, **__: None  # it exists already
            distributed.destroy_process_group = lambda *_, **__: None
            runpy.run_path(str(script), run_name="__main__")
            return torch.cuda.memory_reserved() / MIB


def time_kernels() -> None:
    """Make Inductor time kernels as on a GPU without caches, and pad products it would time."""
    import torch
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime import benchmarking

    def benchmark_gpu(_: object, call: Callable[[], object], **__: object) -> float:
        call()
        flushed = torch.empty(FLUSHED // 4, dtype=torch.int32, device="cuda")
        call()
        del flushed
        return 1.0

    benchmarking.TritonBenchmarker.benchmark_gpu = benchmark_gpu
    pad_mm.get_cached_should_pad = lambda _: None
    pad_mm.should_pad = lambda *_: True


def stand_in() -> None:
    """Replace the tokenizer, which downloads its table, and the plot of the losses."""
    tokenizer = ModuleType("tiktoken")

    class Encoding:
        """Makes one token per character of the training text, PROMPT tokens of other texts."""

        def encode(self, text: str, **_: object) -> list[int]:
            """Return tokens."""
            return [0] * (len(text) if text.startswith("xx") else PROMPT)

        def decode(self, tokens: list[int]) -> str:
            """Return an empty text."""
            del tokens
            return ""

    tokenizer.get_encoding = lambda _: Encoding()  # type: ignore[attr-defined]
    plot = ModuleType("matplotlib.pyplot")

    class Anything:
        """Stands for a figure and its axes; does nothing."""

        def __getattr__(self, _: str) -> object:
            return lambda *_, **__: Anything()

    plot.subplots = lambda **_: (Anything(), Anything())  # type: ignore[attr-defined]
    plot.savefig = plot.show = lambda *_: None  # type: ignore[attr-defined]
    package = ModuleType("matplotlib")
    package.pyplot = plot  # type: ignore[attr-defined]
    sys.modules |= {"tiktoken": tokenizer, "matplotlib": package, "matplotlib.pyplot": plot}


def report(answers: Answers) -> str:
    """Return the table and its summaries."""
    lines: list[list[str]] = []
    groups: dict[str, list[float]] = {}
    for row in answers.answered:
        real = float(row["reserved_gib"]) * GIB / MIB
        cells = [row["row"], f"{real:.2f}"]
        for variant, name in NAMES.items():
            figures = answers.figures[variant].get(row["row"])
            if figures is None:
                cells += ["", ""]
                continue
            peak, *ends = figures
            if not variant:
                told = holds(ends, real) if ends else ""
            error = percent(peak, real)
            groups.setdefault(f"{looked(row)}, {name}", []).append(error)
            cells += [f"{peak:.2f}", f"{error:+.3f}"]
        lines.append([*cells, told, unseen(row), answers.torch(row), answers.commits[row["row"]]])
    heads = ["run", "real", "virtual", "%", "products padded", "%", "and kernels timed", "%"]
    heads += ["range of peak reserved", "never looked at"]
    text = [TITLE, line(), "", table(lines, [*heads, "torch here", "commit"]), ""]
    text += [*spreads(groups, median=3), *within(groups)]
    return "\n".join([*text, *missing(answers)])
