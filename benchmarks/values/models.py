"""Whether models take the branches that they take on the CPU, where their code decides by values.

    python -m benchmarks.values.models [--only 'gpt2*' ...] [--values full] [--dry]

Small models of transformers and torchvision run on the CPU and on the virtual GPU, with values of
small tensors, or with all values (recorded in values_models_full.txt). The executed lines of these
libraries are compared: a line that runs on only one device shows another branch. Nothing is
downloaded: models are made from their configurations.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import line, publish, read_toml, table

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

CARD = "H100"
PACKAGES = ("/transformers/", "/torchvision/")
SHOWN = int(os.environ.get("SHOWN", "4"))
"""number of lines of a case to name"""
BY_DEVICE = {
    *("_can_use_grouped_mm", "_valid_auto_compile_criteria", "_roi_align_backward"),
    *("batched_nms", "_batched_nms_vanilla"),  # above 4,000 boxes, on a GPU above 100,000
}
"""functions that check the kind of device, or run only on one kind"""
LEFT_OUT = ("/import_utils.py", "/training_args.py")
"""files that check once which packages are installed, and on which device to train"""
CASES: dict[str, Callable[[str], object]] = {}
MODELS: dict[str, Any] = read_toml(Path(__file__).with_suffix(".toml"))
"""models of transformers, by case"""


def lines_of(run: Callable[[], object]) -> set[tuple[str, int]]:
    """Run a case; return the lines of the libraries' functions that were executed."""
    lines: set[tuple[str, int]] = set()

    def each(frame: FrameType, _event: str, _argument: object) -> object:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return each

    def entered(frame: FrameType, _event: str, _argument: object) -> object:
        code = frame.f_code
        is_library = any(part in code.co_filename for part in PACKAGES)
        asks = code.co_filename.endswith(LEFT_OUT) or code.co_name in {"<module>", *BY_DEVICE}
        return each if is_library and not asks else None

    sys.settrace(entered)
    try:
        run()
    finally:
        sys.settrace(None)
    return lines


def model_of(name: str, **more: object) -> object:
    """Return a model of models.toml, made on the CPU from a seed."""
    import torch
    import transformers

    fields = {**MODELS[name], **more}
    kind, config = fields.pop("model"), fields.pop("config")
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**fields)).eval()


def step(name: str, mask: str, device: str) -> None:
    """Run a training step with a mask of ones, with padding, or without a mask."""
    import torch

    model = model_of(name).to(device)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 99, (2, 16), generator=generator)
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    if mask:
        inputs["attention_mask"] = torch.ones(2, 16, dtype=torch.long)
    if mask == "padding":
        inputs["attention_mask"][1, 9:] = 0
    model(**{name: value.to(device) for name, value in inputs.items()}).loss.backward()


def whisper(device: str) -> None:
    """Run a step of speech recognition."""
    import torch

    more = {"suppress_tokens": None, "begin_suppress_tokens": None}
    model = model_of("whisper", **more).to(device)
    generator = torch.Generator().manual_seed(1)
    sound = torch.randn(2, 8, 40, generator=generator).to(device)
    labels = torch.randint(3, 99, (2, 6), generator=generator).to(device)
    model(input_features=sound, labels=labels).loss.backward()


def generate(device: str, **options: object) -> None:
    """Generate up to 12 tokens: one may be the end."""
    import torch

    model = model_of("llama", eos_token_id=5, pad_token_id=0)
    tokens = torch.randint(6, 99, (2, 5), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    torch.manual_seed(4)
    model.to(device).generate(
        tokens.to(device), attention_mask=mask.to(device), max_new_tokens=12, **options
    )


def trainer(device: str) -> None:
    """Train three steps with the Trainer, its own logging, and a metric."""
    import torch
    import transformers

    tokens = torch.randint(3, 99, (12, 16), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones(16)} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=3,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            per_device_train_batch_size=4,
            use_cpu=device == "cpu",
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )
        transformers.Trainer(
            model_of("gpt2"),
            arguments,
            train_dataset=rows,
            eval_dataset=rows[:4],
            compute_metrics=lambda pair: {"right": float((pair[0].argmax(-1) == pair[1]).mean())},
        ).train()


def detection(name: str, device: str) -> None:
    """Train a detector for one step, and detect boxes."""
    import torch
    import torchvision

    torch.manual_seed(0)
    make = getattr(torchvision.models.detection, name)
    model = make(weights=None, weights_backbone=None, num_classes=4, min_size=64, max_size=64)
    model.to(device)
    image = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(3)).to(device)
    target = {
        "boxes": torch.tensor([[4.0, 6.0, 40.0, 50.0]]).to(device),
        "labels": torch.tensor([2]).to(device),
        "masks": torch.ones(1, 64, 64, dtype=torch.uint8).to(device),
    }
    sum(model([image], [copy.copy(target)]).values()).backward()
    model.eval()([image])


def detr(device: str) -> None:
    """Match DETR's boxes with those of the image, by the Hungarian algorithm on the host."""
    import torch
    import transformers

    torch.manual_seed(0)
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"]
    )
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "num_queries": 6, "d_model": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_labels": 3}
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        **sizes,
        **heads,
    )
    model = transformers.DetrForObjectDetection(config).to(device)
    labels = [
        {
            "class_labels": torch.tensor([1, 2]).to(device),
            "boxes": torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.6, 0.6, 0.3, 0.2]]).to(device),
        }
    ]
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(3)).to(device)
    model(pixel_values=image, labels=labels).loss.backward()


def add_cases() -> None:
    """Add all cases by name."""
    for name in MODELS:
        if name != "whisper":
            for mask in ("", "ones", "padding"):
                CASES[f"{name}, {mask or 'no'} mask"] = partial(step, name, mask)
    CASES["whisper"] = whisper
    CASES["generate, greedy"] = partial(generate, do_sample=False)
    CASES["generate, sampling"] = partial(generate, do_sample=True, top_k=20, top_p=0.9)
    CASES["generate, beams"] = partial(generate, do_sample=False, num_beams=3)
    CASES["generate, static cache"] = partial(
        generate, do_sample=False, cache_implementation="static", disable_compile=True
    )
    CASES["trainer"] = trainer
    for name in ("maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn"):
        CASES[name] = partial(detection, name)
    CASES["detr"] = detr


def outcome(run: Callable[[str], object]) -> list[str]:
    """Run a case on both devices; return the number of lines, and lines of one only or an error."""
    ran = {}
    for device in ("cpu", "cuda"):
        try:
            run(device)  # first without recording: some code runs only once
            ran[device] = lines_of(partial(run, device))
        except Exception as error:  # noqa: BLE001, PERF203 - recorded
            return ["", f"{device}: {type(error).__name__}: {str(error)[:90]}"]
    alone = sorted(ran["cpu"] ^ ran["cuda"])
    shown = [
        f"{Path(name).name}:{number} ({'cpu' if (name, number) in ran['cpu'] else 'gpu'})"
        for name, number in alone[:SHOWN]
    ]
    more = f" and {len(alone) - SHOWN} more" if len(alone) > SHOWN else ""
    return [f"{len(ran['cpu'])}", ", ".join(shown) + more or "the same"]


def main() -> None:
    """Run all cases, and publish the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=["*"], help="names of cases, with wildcards")
    parser.add_argument("--values", choices=("auto", "full"), default="auto")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    from pytest_gpumem.meter.block import use_virtual_gpu

    use_virtual_gpu(CARD, values=options.values)
    add_cases()
    rows = []
    for name, run in CASES.items():
        if any(fnmatch(name, pattern) for pattern in options.only):
            rows.append([name, *outcome(run)])
            print(*rows[-1], flush=True)
    same = sum(row[2] == "the same" for row in rows)
    text = "\n".join(
        [
            f"Lines that run on the CPU, and on a virtual {CARD}, values={options.values}",
            line("transformers", "torchvision", "accelerate"),
            "",
            table(rows, ["case", "lines", "on the virtual GPU"]),
            "",
            f"{same} of {len(rows)} cases run the same lines",
        ]
    )
    name = "values_models" if options.values == "auto" else "values_models_full"
    publish(name, text, keep=not options.dry and options.only == ["*"])


if __name__ == "__main__":
    main()
