r"""Segmentation networks that another project measured on an L40S, beside the virtual GPU's.

    python -m benchmarks.published segmentary --python PYTHON \
        --source CHECKOUT --source matrix=CHECKOUT

data/README.md names the commits of the two checkouts. The project's own classes build the networks,
and its own loop probes them. PYTHON has torch 2.11 and the packages that the project pins:
transformers 5.15.0, timm 1.0.28, segmentation-models-pytorch 0.5.0, monai 1.6.0, lightning,
albumentations, peft.

``matrix`` rows are training steps with cuDNN's first plan. ``probe`` and ``inference`` rows were
measured with torch.backends.cudnn.benchmark: here they run with the largest and the smallest
workspaces of the plans that PyTorch would time. Weights are random; pretrained ones have the same
sizes.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import MIB, line, percent, read, spread, table
from benchmarks.published.runner import looked, unseen
from pytest_gpumem.devices.virtual.cudnn_notes import CUDNN_MARGIN
from pytest_gpumem.measurement import Peak
from pytest_gpumem.replay.size_range import widened

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from benchmarks.published.runner import Answers, Process, Row

CARD = "L40S"
ENDS = ("usual", "least")
"""ends of a range: the largest workspaces, usual in benchmark mode, and the smallest"""
ALONE = ("native_convnext_tiny_channelmapper_dpt", "native_resnet50_fpn_ocr")
"""recipes probed in a new process each; all others ran in one, which kept cuBLAS's workspaces"""
CLASSES = 21
TITLE = "Segmentation networks on an L40S, by their source with torch 2.11.0+cu128, cuDNN 9.19.0"


def rows() -> list[Row]:
    """Return the rows, in the order of their source."""
    return [
        row | {"row": f"{row['family']} {row['model']}"} for row in read("segmentary-peaks.csv")
    ]


def group(row: Row) -> str:
    """Return a row's kind: rows of a kind run in one process here."""
    return row["family"]


def processes(these: list[Row]) -> list[list[Row]]:
    """Group rows by the process in which the source ran them."""
    if these[0]["family"] == "inference":
        return [[row] for row in these]
    together = [row for row in these if row["model"] not in ALONE]
    return [together, *([row] for row in these if row["model"] in ALONE)]


def steps(process: Process) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """Run the rows of a kind; yield bytes allocated and reserved at each end."""
    family, device = process.rows[0]["family"], process.device
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(process.source / "src"))
    os.chdir(process.source)
    import torch

    torch.cuda.init()
    run = {"matrix": matrix_step, "probe": probe, "inference": inference}[family]
    if family != "inference":
        device.values.compute("auto")  # losses have branches on small tensors
    if family == "probe":
        accept_checks()
    for together in processes(process.rows):
        peaks: dict[str, dict[str, list[int]]] = {row["row"]: {} for row in together}
        for end in ENDS[:1] if family == "matrix" else ENDS:
            device.gpu_choices.assume_sizes(end)  # also forgets plans that earlier networks timed
            torch._C._cuda_clearCublasWorkspaces()
            for row in together:
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                run(row)
                pair = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
                peaks[row["row"]][end] = pair
                print(row["row"], end, *pair, file=sys.stderr, flush=True)
        yield from peaks.items()


def check(row: Row, count: int) -> None:
    """Refuse a network with another number of parameters than the row's."""
    if count != int(row["parameters"]):
        raise SystemExit(f"{row['model']}: {count} parameters, not {row['parameters']}")


# ---- matrix: one step of SGD, then a prediction ----


def matrix_step(row: Row) -> None:
    """Run a row of the matrix, including its script's checks, which take memory."""
    import torch
    from segmentary.medical import models_2d, models_3d

    shape = tuple(int(size) for size in row["shape"].split("x"))
    images = torch.rand(shape).to("cuda").requires_grad_()
    targets = torch.randint(0, 3, (shape[0], *shape[2:]))
    targets[0].clamp_(max=1)  # scan patches; data/README.md explains the two and three classes
    targets = targets.to("cuda")
    module = models_2d if len(shape) == 4 else models_3d
    model = module.build_model(
        row["model"], in_channels=shape[1], num_classes=3, patch_size=shape[2:], model_options={}
    )
    parameters = [it for it in model.parameters() if it.requires_grad]
    check(row, sum(it.numel() for it in parameters))
    model = model.to("cuda").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    own = getattr(model, "training_loss", None)
    loss = own(images, targets) if own else dice_and_cross_entropy(model(images), targets)
    torch.isfinite(loss)
    loss.backward()
    torch.isfinite(images.grad).all(), images.grad.abs().any()
    for it in parameters:
        torch.isfinite(it.grad).all()
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 12.0, error_if_nonfinite=True)]
    each = [torch.linalg.vector_norm(it.grad.detach().float()) for it in parameters]
    norms.append(torch.linalg.vector_norm(torch.stack(each)))
    del each
    parameters[0].grad.abs().any()
    before = parameters[0].detach().clone()
    optimizer.step()
    for it in parameters:
        torch.isfinite(it).all()
    change = (parameters[0].detach() - before).abs()
    change.any()
    model.eval()
    with torch.no_grad():
        torch.isfinite(model(images.detach())).all()


def dice_and_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the project's loss for networks that have no own loss."""
    from torch.nn import functional

    probabilities = logits.float().softmax(1)
    truth = functional.one_hot(targets, 3).movedim(-1, 1).float()
    axes = (0, *range(2, logits.ndim))
    common = (probabilities * truth).sum(axes)
    total = (probabilities + truth).sum(axes)
    dice = (2 * common[1:] + 1e-5) / (total[1:] + 1e-5)
    return functional.cross_entropy(logits.float(), targets) + 1 - dice.mean()


# ---- probe: that project's own loop ----


def accept_checks() -> None:
    """Make checks of values that are not computed pass, but keep their temporaries."""
    import torch

    isfinite = torch.isfinite

    def is_finite(tensor: torch.Tensor) -> torch.Tensor:
        isfinite(tensor).all()
        return torch.ones((), dtype=torch.bool)

    torch.isfinite = is_finite
    torch.equal = lambda _before, _after: False


def probe(row: Row) -> None:
    """Run four steps of AdamW with two shapes."""
    from segmentary.model_catalog import ProbeOptions, probe_configs

    names = ("base", f"models/{row['model']}", "curricula/reference_cityscapes19")
    record = probe_configs(
        [f"configs/{name}.yaml" for name in names],
        options=ProbeOptions(steps=4, device="cuda", precision="bf16"),
        overrides=["model.native.backbone.weights=scratch"],
    )
    check(row, record["model"]["total_parameters"])


# ---- inference: one image of 1024 x 1024 pixels ----


def inference(row: Row) -> None:
    """Predict like the project's performance.py, with two of its 120 passes."""
    import torch

    torch.backends.cudnn.benchmark = True
    model = network(row["model"])
    check(row, sum(it.numel() for it in model.parameters()))
    model = model.to("cuda").eval()
    image = torch.zeros((1, 3, 1024, 1024), device="cuda").contiguous()

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(image)

    with torch.inference_mode():
        first = forward()
        torch.isfinite(first).all()
        forward()
        del first
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        forward()


def network(name: str):  # noqa: ANN201 - a class of that project
    """Build a recipe's network without downloading anything."""
    from segmentary.config import ModelConfig, from_dict, load_yaml
    from segmentary.models import factory, hf_auto, hrnet_ocr

    factory._load = lambda _loader, model_id, **_options: from_hub(model_id)
    config = from_dict(ModelConfig, load_yaml(Path(f"configs/models/{name}.yaml"))["model"])
    if config.arch == "hrnet_w48_ocr":
        return hrnet_ocr.HRNetOCR(CLASSES, backbone_name="hrnet_w48", pretrained=False)
    if config.arch == "hf_auto":
        model = from_hub(config.checkpoint)
        layout = hf_auto._explicit_or_inferred_layout(config, model, [], CLASSES)
        return hf_auto.HFAutoDenseWrapper(
            model,
            CLASSES,
            layout,
            source_num_labels=CLASSES,
            inactive_parameter_paths=tuple(config.inactive_parameter_paths),
        )
    if config.arch == "native":
        backbone = dataclasses.replace(config.native.backbone, weights="scratch")
        native = dataclasses.replace(config.native, backbone=backbone)
        config = dataclasses.replace(config, native=native)
    elif config.arch == "deeplabv3plus_r101":
        config = ModelConfig(
            arch="smp",
            smp_arch="DeepLabV3Plus",
            encoder_name="resnet101",
            encoder_weights="scratch",
        )
    elif config.arch == "smp":
        config = dataclasses.replace(config, encoder_weights="scratch")
    return factory.build_model(config, CLASSES)


MIT = {  # by SegFormer's encoder: blocks, widths, the decoder's width
    "b0": ([2, 2, 2, 2], [32, 64, 160, 256], 256),
    "b2": ([3, 4, 6, 3], [64, 128, 320, 512], 768),
    "b5": ([3, 6, 40, 3], [64, 128, 320, 512], 768),
}
UPERNET = {"hidden_size": 512, "use_auxiliary_head": False}


def from_hub(model_id: str):  # noqa: ANN201 - a class of transformers
    """Build a model of the hub from its known configuration, and check its size."""
    import transformers as hub

    if model_id.startswith("nvidia/"):
        depths, widths, decoder = MIT[model_id.split("-")[1]]
        config = hub.SegformerConfig(
            depths=depths, hidden_sizes=widths, decoder_hidden_size=decoder
        )
        kind = hub.SegformerForSemanticSegmentation
    elif "upernet" in model_id:
        if "convnext" in model_id:
            widths = [96, 192, 384, 768]
            backbone = hub.ConvNextConfig(depths=[3, 3, 27, 3], hidden_sizes=widths)
        else:
            backbone = hub.SwinConfig(window_size=7)
        backbone.out_features = ["stage1", "stage2", "stage3", "stage4"]
        config = hub.UperNetConfig(backbone_config=backbone, **UPERNET)
        kind = hub.UperNetForSemanticSegmentation
    elif "beit" in model_id:
        config = hub.BeitConfig(
            image_size=640,
            use_relative_position_bias=True,
            out_indices=[3, 5, 7, 11],
            use_auxiliary_head=False,
        )
        kind = hub.BeitForSemanticSegmentation
    elif "mobilenet_v2" in model_id:
        config = hub.MobileNetV2Config(image_size=513, output_stride=8)
        kind = hub.MobileNetV2ForSemanticSegmentation
    elif "mobilevit-xx" in model_id:
        config = hub.MobileViTConfig(
            image_size=512,
            output_stride=16,
            hidden_sizes=[64, 80, 96],
            neck_hidden_sizes=[16, 16, 24, 48, 64, 80, 320],
            expand_ratio=2.0,
        )
        kind = hub.MobileViTForSemanticSegmentation
    elif "mobilevitv2" in model_id:
        config = hub.MobileViTV2Config(image_size=512, output_stride=16)
        kind = hub.MobileViTV2ForSemanticSegmentation
    elif "dinov3" in model_id:
        config, kind = hub.EomtDinov3Config(), hub.EomtDinov3ForUniversalSegmentation
    else:
        config, kind = hub.EomtConfig(), hub.EomtForUniversalSegmentation
    config.num_labels = CLASSES
    return kind(config)


# ---- the table ----


def report(answers: Answers) -> str:
    """Return the table and its summaries."""
    lines: list[list[str]] = []
    sums: dict[str, list[float]] = {}
    inside: dict[str, list[bool]] = {}
    for row in answers.rows:
        family, key = row["family"], f"{row['family']}, {looked(row)}"
        ends = answers.figures[""][row["row"]]
        usual = ends["usual"]
        least = ends.get("least", usual)
        real, allocated = int(row["reserved_bytes"]), int(row["allocated_bytes"] or 0)
        cells = ["", "", ""]
        if allocated:
            error = percent(usual[0], allocated)
            sums.setdefault(f"{key}, allocated", []).append(error)
            cells = [f"{allocated:,}", f"{usual[0]:,}", f"{error:+.3f}"]
        cells.append(f"{real / MIB:,.0f}")
        names = ["reserved"] if family == "matrix" else ["reserved, largest", "reserved, least"]
        for name, peak in zip(names, (usual[1], least[1]), strict=False):
            error = percent(peak, real)
            sums.setdefault(f"{key}, {name}", []).append(error)
            cells += [f"{peak / MIB:,.0f}", f"{error:+.2f}"]
        if family != "matrix":
            low, high = sorted((usual[1], least[1]))
            between = inside.setdefault(f"{key}: %s reserve between both ends", [])
            between.append(low <= real <= high)
            low = min(usual[0], least[0])
            high = widened(Peak(usual[0], high), CUDNN_MARGIN, 2**40, full=False).reserved
            inside.setdefault(f"{key}: %s lie in a report's range", []).append(low <= real <= high)
        lines.append([row["row"], unseen(row), *cells])
    heads = ["L40S", "never looked at", "allocated", "virtual", "allocated %", "reserved MiB"]
    heads += ["largest plans", "largest %", "least plans", "least %"]
    return "\n".join(
        [
            TITLE,
            line(),
            answers.here(),
            "",
            table(lines, heads),
            "",
            *(
                f"{name}: {len(errors)} rows, {errors.count(0)} the same to the byte, "
                f"{spread(errors, 3)}"
                for name, errors in sorted(sums.items())
            ),
            *(name % f"{sum(these)} of {len(these)}" for name, these in sorted(inside.items())),
        ]
    )
