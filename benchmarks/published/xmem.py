"""The steps of xMem's evaluation, rewritten from its description.

Source: Stone-ResearchLife/xMem, plot/data/*/evaluation_result.json (commit d61e076), and the
settings of its experiments: torch 2.6.0 with CUDA 12.4, transformers 4.51.3, models with random
weights in fp32, lr 1e-3, four iterations, no cudnn.benchmark. It measures NVML's used memory, less
its first sample, which is taken once the CUDA context exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.harness import DATA, MIB, read_toml

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = 128
"""samples of wikitext-2 are cut to this length; nearly every batch of 20 has one that long"""

HUB = read_toml(DATA / "xmem-models.toml")
VISION = {
    "VGG19": "vgg19",
    "ResNet101": "resnet101",
    "ResNet152": "resnet152",
    "MobileNetV2": "mobilenet_v2",
    "ConvNeXtTiny": "convnext_tiny",
    "ConvNeXtBase": "convnext_base",
    "RegNetX400MF": "regnet_x_400mf",
    "RegNetY400MF": "regnet_y_400mf",
}


def import_models() -> None:
    """Import the modules of the steps that take long to import."""
    import torchvision  # noqa: F401 - imported for the forks
    import transformers

    for model in HUB.values():
        mapping = getattr(transformers, f"AutoModelFor{model['kind']}")._model_mapping
        mapping[getattr(transformers, model["config"])]


def _train(
    model: nn.Module,
    name: str,
    data: Callable[[], Any],
    forward: Callable[[nn.Module, Any], tuple[Any, Tensor]],
) -> float:
    """Run xMem's loop of four iterations, which clear gradients first; return peak reserved in MiB.

    Outputs and loss stay alive until the next iteration replaces them; the batch does not, as the
    data loader's next batch takes its variable.
    """
    model.train().cuda()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7)
    for _ in range(4):
        batch = None
        optimizer.zero_grad()
        batch = data()
        outputs, loss = forward(model, batch)  # noqa: RUF059 - the outputs live on
        loss.backward()
        optimizer.step()
        schedule.step()
    return torch.cuda.max_memory_reserved() / MIB


def vision_step(model: str, batch: int, optimizer: str) -> float:
    """Train on CIFAR-10 as 86x86 images with cross entropy; each batch comes from the host."""

    def data() -> tuple[Tensor, Tensor]:
        return torch.zeros(batch, 3, 86, 86).cuda(), torch.zeros(batch, dtype=torch.long).cuda()

    def forward(net: nn.Module, pair: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
        outputs = net(pair[0])
        return outputs, nn.functional.cross_entropy(outputs, pair[1])

    return _train(_vision(model), optimizer, data, forward)


def _vision(name: str) -> nn.Module:
    from torchvision import models

    if name == "MnasNet":
        return models.MNASNet(alpha=1.0, num_classes=10)
    if name == "MobeNetV3Small":  # xMem spells out the model, with the same settings
        return models.mobilenet_v3_small(num_classes=10)
    return models.get_model(VISION.get(name, name), weights=None)


def transformers_step(model: str, batch: int, optimizer: str) -> float:
    """Train a language model on samples of 128 tokens, with an attention mask and labels."""
    import transformers

    hub = HUB[model]
    maker = getattr(transformers, f"AutoModelFor{hub['kind']}")
    made = maker.from_config(getattr(transformers, hub["config"])(**hub.get("sizes", {})))

    def data() -> dict[str, Tensor]:
        ids = torch.zeros(batch, TOKENS, dtype=torch.long)
        return {name: ids.clone().cuda() for name in ("input_ids", "attention_mask", "labels")}

    def forward(net: nn.Module, inputs: dict[str, Tensor]) -> tuple[Any, Tensor]:
        outputs = net(**inputs)
        return outputs, outputs.loss

    return _train(made, optimizer, data, forward)
