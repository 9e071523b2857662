r"""Llama 3 8B that torchtitan trains compiled, as one rank of 8 to 128, by its own source.

    python -m benchmarks.published titan --source torchtitan=CLONE \
        --python 2.6=PYTHON --python 2.7=PYTHON --python 2.8=PYTHON --python 2.9=PYTHON

The clone is of pytorch/torchtitan; the interpreters have torchao, torchdata, datasets, tiktoken,
tokenizers, tomli, tyro, tensorboard and blobfile. Its training program runs unmodified, for ten
steps on made-up tokens. The figures are those that it prints as "memory"; torchtitan and torchao
published them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import line, percent, read, spreads, table
from benchmarks.published.runner import looked, missing, unseen, within
from pytest_gpumem.devices.cards import CARDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.published.runner import Answers, Process, Row
    from pytest_gpumem.devices.cards import Card

STEPS = 10
"""number of steps; the program prints the memory of the first, and of all others together"""
VOCABULARY = 128256
PACKAGES = ("torchao",)
TITLE = "Peak reserved in GiB of Llama 3 8B, trained by torchtitan with torch.compile, one rank"


def rows() -> list[Row]:
    """Return the rows, in the order of the file."""
    return read("titan-peaks.csv")


def card(row: Row) -> Card:
    """Return the card; the source's H100s have 96 GB, so an H200 stands for them."""
    return CARDS[row["card"]]


def folders(row: Row) -> list[str]:
    """Return the folders of the source that a row needs."""
    return row["folders"].split()


def source(row: Row) -> str:
    """Return the name of the clone."""
    del row
    return "torchtitan"


def environment(row: Row) -> dict[str, str]:
    """Return the variable that the commit's run_train.sh sets; one source does not use it."""
    name, _, value = row["allocator_settings"].partition("=")
    return {name: value} if name else {}


def step(row: Row, process: Process) -> list[float]:
    """Run a row; return the reserved GiB of the first step, and of the others."""
    import torch

    with chdir(process.source), process.device.join_alone(0, int(row["ranks"])):
        torch.distributed.init_process_group = lambda *_, **__: None  # it exists already
        torch.distributed.destroy_process_group = lambda *_, **__: None
        seen = run(row)
    return [seen[-2], seen[-1]]


def run(row: Row) -> list[float]:
    """Run a row's program in the working folder; return the reserved GiB that it logs."""
    import torch

    torch.manual_seed(0)  # reading the seed back fails for half of all with torch 2.8
    seen: list[float] = []
    tool = Path("bin/lspci")  # the program looks for the card in its output
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n", encoding="utf-8")
    tool.chmod(0o755)
    os.environ["PATH"] = f"{tool.parent.resolve()}:{os.environ['PATH']}"
    sys.path.insert(0, ".")
    words = [*row["words"].split(), f"--training.steps={STEPS}"]
    file = Path(row["configuration"])
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub(r"(enable_\w+ = )true", r"\1false", text), encoding="utf-8")
    sys.argv = ["train.py", f"--job.config_file={row['configuration']}", *words]
    tokens = Tokens(row)
    old = importlib.util.find_spec("torchtitan.components") is None
    if old:
        package: Any = importlib.import_module("torchtitan.datasets")
        package.build_tokenizer = lambda *_: tokens
        package.build_hf_data_loader = lambda *_: tokens
        measures: Any = importlib.import_module("torchtitan.metrics")
    else:
        measures = importlib.import_module("torchtitan.components.metrics")
    monitor = measures.DeviceMemoryMonitor
    stats = monitor.get_peak_stats

    def noted(self: object) -> Any:  # noqa: ANN401 - torchtitan's
        found = stats(self)
        seen.append(found.max_reserved_gib)
        return found

    monitor.get_peak_stats = noted
    train(old, tokens)
    return seen


def train(old: bool, tokens: Tokens) -> None:
    """Run the training program of the checkout."""
    if old:
        program: Any = importlib.import_module("train")
    else:
        models: Any = importlib.import_module("torchtitan.models")
        del models
        program = importlib.import_module("torchtitan.train")
        protocol: Any = importlib.import_module("torchtitan.protocols.train_spec")
        spec = protocol.get_train_spec("llama3")
        spec.build_dataloader_fn = lambda **_: tokens
        for name in ("tokenizer_cls", "build_tokenizer_fn"):
            if hasattr(spec, name):
                setattr(spec, name, lambda *_: tokens)
    program.init_logger()
    if hasattr(program, "Trainer"):
        program.Trainer(program.ConfigManager().parse_args()).train()
        return
    configuration = program.JobConfig()
    configuration.parse_args()
    program.main(configuration)


class Tokens:
    """A tokenizer and a loader of made-up tokens, with the interfaces of the commit's own."""

    def __init__(self, row: Row) -> None:
        self.n_words = VOCABULARY
        self.eos_id = 0
        self._batch, self._names = int(row["batch"]), row["input"]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield inputs and labels of 8192 tokens."""
        import torch

        while True:
            inputs, labels = (torch.zeros(self._batch, 8192, dtype=torch.int64) for _ in range(2))
            yield ({"input": inputs} if self._names else inputs), labels

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state for checkpoints."""
        return {}

    def load_state_dict(self, _: object) -> None:
        """Ignore the state."""


def report(answers: Answers) -> str:
    """Return the table and its summaries."""
    lines: list[list[str]] = []
    groups: dict[str, list[float]] = {}
    for row in answers.answered:
        first, peak = answers.figures[""][row["row"]]
        cells = [row["row"], row["torch"]]
        for name, figure in (("first_gib", first), ("reserved_gib", peak)):
            real = row[name]
            error = percent(figure, float(real)) if real else 0
            cells += [real, f"{figure:.2f}", f"{error:+.2f}" if real else ""]
        groups.setdefault(looked(row), []).append(percent(peak, float(row["reserved_gib"])))
        ao = answers.versions[row["row"]].rpartition(", ")[2]
        here = f"{answers.torch(row)}, {ao}"
        lines.append([*cells, unseen(row), here, answers.commits[row["row"]]])
    heads = ["run", "torch", "real first step", "virtual", "%", "real later steps", "virtual", "%"]
    text = [TITLE, line(), "", table(lines, [*heads, "never looked at", "here", "commit"]), ""]
    text += [*spreads(groups, median=2), *within(groups)]
    return "\n".join([*text, *missing(answers)])
