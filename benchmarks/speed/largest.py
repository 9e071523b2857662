# ruff: noqa: ANN401 - models and batches are whatever a case has
"""The largest batch size by three finders, each on the same steps on the virtual GPU.

    python -m benchmarks.speed.largest [CASE ...]

``gpu_memory.largest``, and Lightning's BatchSizeFinder in its modes power and binsearch: which
batch size each one finds, and how many it tries. All begin with 2, Lightning's default.
This needs ``pip install lightning``.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from typing import Any, NamedTuple

import pytest_gpumem
from benchmarks.harness import ask, line, publish, table

DEFAULT = 2
"""Lightning's default for the first batch size"""
TOOLS = ("gpumem", "power", "binsearch")


class Case(NamedTuple):
    """A step: its card, its model's name, the shape of one sample."""

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
    """Return a loss for any of the models."""
    return model(batch).float().square().mean()


class Trainer:
    """A model and its optimizer, which are kept between steps."""

    def __init__(self, case: Case) -> None:
        import torch

        self.case = case
        self.model = model_of(case.model).cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.tried: list[int] = []

    def step(self, size: int) -> None:
        """Run two training steps: Adam creates its state in the first."""
        self.tried.append(size)
        for _ in range(2):
            loss_of(self.model, batch_of(self.case, size)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


class Answer(NamedTuple):
    """The result of a finder."""

    value: int
    tries: int


def by_gpumem(case: Case) -> Answer:
    """Return the answer of ``gpu_memory.largest``."""
    from pytest_gpumem.devices.virtual.device import VirtualDevice
    from pytest_gpumem.fit.prober import Prober
    from pytest_gpumem.meter.meter import Meter

    trainer = Trainer(case)
    device = VirtualDevice.loaded()
    assert device is not None
    meter = Meter(device, device.open(None, 1), 1)
    meter.start(count_held=True)
    found = Prober(meter, print, patience=1e9).largest(trainer.step, DEFAULT)
    meter.stop()
    assert [it.value for it in found.probes] == trainer.tried
    return Answer(found.value, len(found.probes))


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
    return Answer(int(answer or 0), len(dict.fromkeys(tried)))


def one(tool: str, name: str) -> None:
    """Run one finder on one case, in this process."""
    case = CASES[name]
    pytest_gpumem.use_virtual_gpu(case.card, values="off")
    warnings.simplefilter("ignore")
    print(json.dumps(by_gpumem(case) if tool == "gpumem" else by_lightning(case, tool)))


def main() -> None:
    """Run all finders on all cases, each in a process of its own; publish the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="(all)")
    parser.add_argument("--one", nargs=2, metavar=("TOOL", "CASE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(*arguments.one)
        return
    rows = []
    for name in arguments.cases or CASES:
        rows.append([name, CASES[name].card])
        for tool in TOOLS:
            words = ("benchmarks.speed.largest", "--one", tool, name)
            answer = Answer(*ask(sys.executable, *words, timeout=900))
            sys.stderr.write(f"{name}: {tool}: {answer}\n")
            rows[-1] += map(str, answer)
    heads = ["step", "card", *(head for tool in TOOLS for head in (tool, "tries"))]
    title = "The largest batch size by three finders, and how many each tried."
    text = "\n".join([title, line("lightning"), "", table(rows, heads, "llr")])
    publish("largest", text, keep=not arguments.cases)


if __name__ == "__main__":
    main()
