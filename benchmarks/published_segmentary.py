"""Segmentation networks that another project measured on an L40S, beside the virtual GPU's.

    python benchmarks/published_segmentary.py --source CHECKOUT --medical CHECKOUT --python PYTHON

The rows are those of data/segmentary-peaks.csv (data/README.md says where they are from, and which
commits the two checkouts need). Nothing of that project is here: its own classes build the networks
and its own loop probes them. PYTHON has torch 2.11 and what that project pins: transformers 5.15.0,
timm 1.0.28, segmentation-models-pytorch 0.5.0, monai 1.6.0, lightning, albumentations, peft.

``matrix`` are training steps with cuDNN's first plan. ``probe`` and ``inference`` ran with
torch.backends.cudnn.benchmark: they run with the largest workspaces of the plans that PyTorch
would time, and with the least. Weights are random; pretrained ones have the same sizes.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gc
import json
import os
import statistics
import sys
from pathlib import Path

from provenance import ROOT, line, publish
from tabulate import tabulate
from workers import ask_worker

sys.path.insert(0, str(ROOT))  # of this checkout, not of an installed one
from pytest_gpumem.devices.virtual.cudnn_notes import MARGIN
from pytest_gpumem.measurement import Peak
from pytest_gpumem.testrun.size_range import widened

DATA = ROOT / "benchmarks" / "data" / "segmentary-peaks.csv"
FAMILIES = ("matrix", "probe", "inference")
ENDS = ("usual", "least")
"""of a range: the largest workspaces, which are the usual ones in benchmark mode, and the least"""
ALONE = ("native_convnext_tiny_channelmapper_dpt", "native_resnet50_fpn_ocr")
"""recipes that were probed in a process each; the others in one, which kept cuBLAS's workspaces"""
CLASSES = 21
MIB = 2**20
Peaks = dict[str, list[int]]


def rows(family: str) -> list[dict[str, str]]:
    """Return a family's rows, in the order of their source."""
    with DATA.open(encoding="utf-8") as lines:
        return [row for row in csv.DictReader(lines) if row["family"] == family]


def processes(family: str) -> list[list[dict[str, str]]]:
    """Return a family's rows by the process of theirs that they ran in."""
    if family == "inference":
        return [[row] for row in rows(family)]
    together = [row for row in rows(family) if row["model"] not in ALONE]
    return [together, *([row] for row in rows(family) if row["model"] in ALONE)]


def work(family: str, source: Path) -> None:
    """Run a family's rows here; print the peaks, and the versions."""
    from pytest_gpumem.devices.cards import CARDS
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    device = VirtualDevice.load(CARDS["L40S"])
    device.open(CARDS["L40S"], 1)
    sys.path.insert(0, str(source / "src"))
    os.chdir(source)
    import torch

    torch.cuda.init()
    peaks: dict[str, Peaks] = {}
    run = {"matrix": matrix_step, "probe": probe, "inference": inference}[family]
    if family != "inference":
        device.values.compute("auto")  # losses have branches on small tensors
    if family == "probe":
        accept_checks()
    for group in processes(family):
        for end in ENDS[:1] if family == "matrix" else ENDS:
            device.workspaces.take(end)  # forgets which plans earlier networks had timed
            torch._C._cuda_clearCublasWorkspaces()
            for row in group:
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                run(row)
                pair = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
                peaks.setdefault(row["model"], {})[end] = pair
                print(family, end, row["model"], *pair, file=sys.stderr, flush=True)
    if unsupported := sorted(device.library.unsupported()):
        raise SystemExit(f"not supported: {', '.join(unsupported)}")
    print(json.dumps([peaks, f"torch {torch.__version__}, cuDNN {device.library.cudnn_found()}"]))


def check(row: dict[str, str], count: int) -> None:
    """Refuse a network that is not the row's."""
    if count != int(row["parameters"]):
        raise SystemExit(f"{row['model']}: {count} parameters, not {row['parameters']}")


# ---- matrix: one step of SGD, then a prediction ----


def matrix_step(row: dict[str, str]) -> None:
    """Run a row of the matrix; what its script checks takes memory as well, so it is done here."""
    import torch
    from segmentary.medical import models_2d, models_3d

    shape = tuple(int(size) for size in row["shape"].split("x"))
    images = torch.rand(shape).to("cuda").requires_grad_()
    targets = torch.randint(0, 3, (shape[0], *shape[2:]))
    targets[0].clamp_(max=1)  # patches of a scan: data/README.md says why two and three classes
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


def dice_and_cross_entropy(logits, targets):  # noqa: ANN001, ANN201 - torch is not imported yet
    """Return that project's loss for networks that have none of their own."""
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
    """Let checks of values that are not computed pass; their temporaries are made all the same."""
    import torch

    isfinite = torch.isfinite

    def is_finite(tensor: torch.Tensor) -> torch.Tensor:
        isfinite(tensor).all()
        return torch.ones((), dtype=torch.bool)

    torch.isfinite = is_finite
    torch.equal = lambda _before, _after: False


def probe(row: dict[str, str]) -> None:
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


def inference(row: dict[str, str]) -> None:
    """Predict as that project's performance.py, with two passes of its 120."""
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


MIT = {  # of SegFormer's encoders: blocks, widths, width of the decoder
    "b0": ([2, 2, 2, 2], [32, 64, 160, 256], 256),
    "b2": ([3, 4, 6, 3], [64, 128, 320, 512], 768),
    "b5": ([3, 6, 40, 3], [64, 128, 320, 512], 768),
}
UPERNET = {"hidden_size": 512, "use_auxiliary_head": False}


def from_hub(model_id: str):  # noqa: ANN201 - a class of transformers
    """Build a model of the hub, from its configuration as it is known; its size is checked."""
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


def ask(python: str, family: str, source: Path) -> tuple[dict[str, Peaks], str]:
    """Return the peaks that a worker finds, and its versions."""
    words = ["--worker", family, "--source", str(source)]
    peaks, versions = ask_worker(python, __file__, *words, HF_HUB_OFFLINE="1")
    return peaks, versions


def spread(errors: list[float]) -> str:
    """Return median and worst of errors in percent, and how many are none."""
    sizes = [abs(error) for error in errors]
    exact = sum(size == 0 for size in sizes)
    middle, worst = statistics.median(sizes), max(sizes)
    count = f"{len(sizes)} rows, {exact} the same to the byte"
    return f"{count}, median {middle:.3f} %, worst {worst:.2f} %"


def report(peaks: dict[str, dict[str, Peaks]], versions: str) -> str:
    """Return the table and its summaries."""
    table: list[list[str]] = []
    sums: dict[str, list[float]] = {}
    inside: dict[str, list[bool]] = {}
    for family in FAMILIES:
        for row in rows(family):
            ends = peaks[family][row["model"]]
            usual = ends["usual"]
            least = ends.get("least", usual)
            real = int(row["reserved_bytes"])
            group = f"{family}, {'never looked at' if row['unseen'] == '1' else 'looked at'}"
            cells = [f"{family} {row['model']}", "yes" if row["unseen"] == "1" else ""]
            allocated = int(row["allocated_bytes"] or 0)
            if allocated:
                error = 100 * (usual[0] - allocated) / allocated
                sums.setdefault(f"{group}, allocated", []).append(error)
                cells += [f"{allocated:,}", f"{usual[0]:,}", f"{error:+.3f}"]
            else:
                cells += ["", "", ""]
            cells.append(f"{real / MIB:,.0f}")
            names = ["reserved"] if family == "matrix" else ["reserved, largest", "reserved, least"]
            for name, peak in zip(names, (usual[1], least[1]), strict=False):
                error = 100 * (peak - real) / real
                sums.setdefault(f"{group}, {name}", []).append(error)
                cells += [f"{peak / MIB:,.0f}", f"{error:+.2f}"]
            if family != "matrix":
                low, high = sorted((usual[1], least[1]))
                inside.setdefault(f"{group}: %s reserve between both ends", []).append(
                    low <= real <= high
                )
                low, most = min(usual[0], least[0]), Peak(usual[0], high)
                high = widened(most, MARGIN, 2**40, full=False).reserved
                inside.setdefault(f"{group}: %s lie in a report's range", []).append(
                    low <= real <= high
                )
            table.append(cells)
    heads = ["L40S", "never looked at", "allocated", "virtual", "allocated %", "reserved MiB"]
    heads += ["largest plans", "largest %", "least plans", "least %"]
    text = [
        "Segmentation networks on an L40S, by their source with torch 2.11.0+cu128, cuDNN 9.19.0",
        line(),
        f"here: {versions}",
        "",
        tabulate(table, heads, disable_numparse=True),
        "",
        *(f"{name}: {spread(errors)}" for name, errors in sorted(sums.items())),
        *(group % f"{sum(these)} of {len(these)}" for group, these in sorted(inside.items())),
    ]
    return "\n".join(text)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--medical", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--worker", choices=FAMILIES)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.source)
        return
    peaks = {}
    for family in FAMILIES:
        source = options.medical if family == "matrix" else options.source
        peaks[family], versions = ask(options.python, family, source.resolve())
    publish("published_segmentary", report(peaks, versions))


if __name__ == "__main__":
    main()
