# ruff: noqa: ANN401 - models and batches are whatever a case has
"""The largest batch size by four finders, each on the same steps on the virtual GPU.

``gpu_memory.largest``, Lightning's BatchSizeFinder (its modes power and binsearch) and accelerate's
find_executable_batch_size: which batch size each finds, and how many it has to try for that. In the
first table all begin with 2, Lightning's default. accelerate goes down only, from what it is told,
and takes the first that fits: in the second table both begin with 128, its default, and with 4096,
for somebody who does not know. "As large after" are the tries after which ours had seen a batch
size fit that is at least accelerate's answer; it goes on to the largest.
Needs ``pip install lightning accelerate`` besides the project.

    python -m benchmarks.speed.largest            # all, and records benchmarks/results/largest.txt
    python -m benchmarks.speed.largest --one "power 2" resnet50
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest_gpumem
from benchmarks import harness
from benchmarks.harness import ask, line, publish

DEFAULT = 2
"""Lightning's"""
STARTS = (128, 4096)
"""accelerate's default, and more than fits"""


class Case(NamedTuple):
    """A step: its card, its model by name, the shape of one sample."""

    card: str
    model: str
    shape: tuple[int, ...]
    dtype: str = "float32"


CASES = {
    "resnet50": Case("T4", "resnet50", (3, 224, 224)),
    "vit_b_16": Case("T4", "vit_b_16", (3, 224, 224)),
    "encoder": Case("T4", "encoder", (512, 512)),
    "gpt2": Case("L4", "gpt2", (512,), "int64"),
    "mlp": Case("T4", "mlp", (64, 2048)),
    "lstm": Case("T4", "lstm", (256, 512)),
    "unet": Case("T4", "unet", (3, 512, 512)),
    "resnet50, 80 GB": Case("A100-80GB", "resnet50", (3, 224, 224)),
}


def model_of(name: str) -> Any:
    """Return a case's model, on the CPU."""
    import torchvision
    from torch import nn

    if name in {"resnet50", "vit_b_16"}:
        return getattr(torchvision.models, name)()
    if name == "encoder":
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 6)
    if name == "mlp":
        return nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048))
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        return _first_output(GPT2LMHeadModel(GPT2Config()))
    if name == "lstm":
        return _first_output(nn.LSTM(512, 512, 2, batch_first=True))
    assert name == "unet"
    down = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in _pairs()]
    up = [nn.Sequential(nn.Conv2d(b, a, 3, padding=1), nn.ReLU()) for a, b in reversed(_pairs())]
    layers = [it for layer in down for it in (layer, nn.MaxPool2d(2))]
    layers += [it for layer in up for it in (nn.Upsample(scale_factor=2), layer)]
    return nn.Sequential(*layers)


def _pairs() -> list[tuple[int, int]]:
    return [(3, 32), (32, 64), (64, 128)]


def _first_output(inner: Any) -> Any:
    from torch import nn

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, batch: Any) -> Any:
            return self.inner(batch)[0]

    return Wrapped()


def batch_of(case: Case, size: int, device: str = "cuda") -> Any:
    """Return a batch of zeros."""
    import torch

    return torch.zeros(size, *case.shape, dtype=getattr(torch, case.dtype), device=device)


def loss_of(model: Any, batch: Any) -> Any:
    """Return a loss, whatever the model."""
    return model(batch).float().square().mean()


class Trainer:
    """A model and its optimizer, which live on between the steps."""

    def __init__(self, case: Case) -> None:
        import torch

        self.case = case
        self.model = model_of(case.model).cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.tried: list[int] = []

    def step(self, size: int) -> None:
        """Take two training steps: Adam's state comes with the first."""
        self.tried.append(size)
        for _ in range(2):
            loss_of(self.model, batch_of(self.case, size)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


class Answer(NamedTuple):
    """What a finder found."""

    value: int
    tries: int
    fitted: list[int]
    """what was tried, and fitted; 0 in place of what did not; ours alone says so"""


def by_gpumem(case: Case, start: int) -> Answer:
    """Return the answer of ``gpu_memory.largest``."""
    from pytest_gpumem.devices.virtual.device import VirtualDevice
    from pytest_gpumem.fit.prober import Prober
    from pytest_gpumem.meter.meter import Meter

    trainer = Trainer(case)
    device = VirtualDevice.loaded()
    assert device is not None
    meter = Meter(device, device.open(None, 1), 1)
    meter.start(count_held=True)
    found = Prober(meter, Path.cwd(), print, patience=1e9).largest(trainer.step, start)
    meter.stop()
    assert [it.value for it in found.probes] == trainer.tried
    return Answer(found.value, len(found.probes), [it.value * it.fits for it in found.probes])


def by_accelerate(case: Case, start: int) -> Answer:
    """Return the answer of accelerate's find_executable_batch_size, which begins with ``start``."""
    from accelerate.utils import find_executable_batch_size

    trainer = Trainer(case)

    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size: int) -> int:
        trainer.step(batch_size)
        return batch_size

    try:
        return Answer(train(), len(trainer.tried), [])
    except RuntimeError:  # "No executable batch size found, reached zero."
        return Answer(0, len(trainer.tried), [])


def by_lightning(case: Case, mode: str) -> Answer:
    """Return the answer of Lightning's BatchSizeFinder."""
    import lightning
    import torch
    from lightning.pytorch.tuner import Tuner

    tried: list[int] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of(case.model)
            self.batch_size = DEFAULT

        def training_step(self, batch: Any, _index: int) -> Any:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

        def train_dataloader(self) -> Any:
            tried.append(self.batch_size)
            return torch.utils.data.DataLoader(
                range(10**7),  # type: ignore[arg-type] # it has items and a length
                batch_size=self.batch_size,
                collate_fn=lambda items: batch_of(case, len(items), "cpu"),
            )

    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    answer = Tuner(trainer).scale_batch_size(Module(), mode=mode, init_val=DEFAULT)
    return Answer(int(answer or 0), len(dict.fromkeys(tried)), [])


def one(tool: str, name: str) -> None:
    """Run one finder on one case, in this process."""
    case = CASES[name]
    pytest_gpumem.use_virtual_gpu(case.card, values="off")
    warnings.simplefilter("ignore")
    kind, _, start = tool.partition(" ")
    if kind == "gpumem":
        found = by_gpumem(case, int(start))
    elif kind == "accelerate":
        found = by_accelerate(case, int(start))
    else:
        found = by_lightning(case, kind)
    print(json.dumps(found))


def run(tool: str, name: str) -> Answer:
    """Run one in a process of its own."""
    words = ("benchmarks.speed.largest", "--one", tool, name)
    answer = Answer(*ask(sys.executable, *words, timeout=900))
    sys.stderr.write(f"{name}: {tool}: {answer}\n")
    return answer


def upward() -> str:
    """Return the table of the finders that begin with 2."""
    tools = (f"gpumem {DEFAULT}", f"power {DEFAULT}", f"binsearch {DEFAULT}")
    rows = []
    for name, case in CASES.items():
        answers = [run(tool, name) for tool in tools]
        rows.append([name, case.card, *(str(it) for answer in answers for it in answer[:2])])
    titles = ["step", "card", "gpumem", "tries", "power", "tries", "binsearch", "tries"]
    return harness.table(rows, titles, "llr")


def downward() -> str:
    """Return the table of those that begin with what may be too much."""
    rows = []
    for start in STARTS:
        for name, case in CASES.items():
            theirs, ours = run(f"accelerate {start}", name), run(f"gpumem {start}", name)
            enough = (i for i, it in enumerate(ours.fitted, 1) if it and it >= theirs.value)
            cells = [start, theirs.value or "none", theirs.tries, next(enough, "never")]
            rows.append([name, case.card, *map(str, [*cells, ours.value, ours.tries])])
    titles = ["step", "card", "from", "accelerate", "tries", "gpumem: as large after"]
    titles += ["the largest", "tries"]
    return harness.table(rows, titles, "llr")


def main() -> None:
    """Run all, print the tables, record them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("TOOL", "CASE"))
    parser.add_argument("--part", choices=tuple(PARTS), action="append", help="(both)")
    arguments = parser.parse_args()
    if arguments.one:
        return one(*arguments.one)
    for part in arguments.part or PARTS:
        name, title, table = PARTS[part]
        publish(name, "\n".join([title, line("lightning", "accelerate"), "", table()]))
    return None


PARTS = {
    "up": ("largest", "The largest batch size by three finders, and how many each tried.", upward),
    "down": (
        "largest_from_above",
        "The largest batch size from where accelerate's finder begins, and how many each tried.",
        downward,
    ),
}


if __name__ == "__main__":
    main()
