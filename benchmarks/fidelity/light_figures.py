"""Are figures the same without NVIDIA's packages?

    python -m benchmarks.fidelity.light_figures [TORCH ...] [--sweep 40] [--keep FOLDER]

For each version of torch (2.6.0, 2.9.1, 2.11.0, 2.15.0), uv makes three environments, two of them
with ``gpumem light --excludes``: with all packages, without NVIDIA's except cuDNN, and without
NVIDIA's. All three run the README's test, steps of the fidelity matrix, and convolutions drawn at
random (cudnn/agreement.py). If the fidelity matrix is recorded for a torch, all its steps are
compared, except the compiled ones, which fail without Triton. An environment is deleted after its
run; with ``--keep`` it stays in a folder, and the next run uses it. New rows of a torch replace its
old rows in benchmarks/results/light_figures.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.harness import LIGHT, RESULTS, ROOT, excludes, output_of, publish, table, where

if TYPE_CHECKING:
    from collections.abc import Sequence

CARD = "H200"
STEPS = (
    *("convnet-fp32", "convnet-channels-last-fp16", "conv3d-fp32", "unet-bf16", "vit-small-bf16"),
    *("bert-base-bf16", "gpt2-bf16", "gpt2-sdpa-flash", "gpt2-sdpa-math", "gpt2-sdpa-cudnn"),
    *("gpt2-checkpointed", "llama-bf16", "moe-8x2-bf16", "t5-small-bf16", "lstm-lm-fp32"),
    *("gru-lm-fp32", "speech-lstm-ctc", "dlrm-adagrad", "dlrm-sparse", "mlp-adamw"),
    *("mlp-fused-fp16", "tv-resnet18", "tv-efficientnet_b0", "tv-swin_t", "hf-distilbert"),
)
"""steps for a torch whose matrix is not recorded: each family, optimizer and kind of attention"""
SWEPT = ("T4", "H100")
"""cards of the sweep over convolutions"""
TORCHES = ("2.6.0", "2.9.1", "2.11.0", "2.15.0")
README_STEP = """
import json
from pytest_gpumem import use_virtual_gpu
use_virtual_gpu("T4")
import torch
layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True).cuda()
layer(torch.randn(32, 256, 1024, device="cuda")).sum().backward()
print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
"""
SWEEP = """
import json, sys
from benchmarks.cudnn import agreement
print(json.dumps(agreement.measure({"sweep": int(sys.argv[1]), "card": sys.argv[2]})))
"""


class Figures(NamedTuple):
    """The figures that programs print in an environment.

    Attributes:
        torch: the versions of torch and CUDA.
        readme: allocated and reserved bytes of the README's test.
        steps: allocated and reserved bytes, or the status, by step.
        plans: the steps that queried cuDNN.
        convolutions: bytes of workspace, or the error, by card, convolution and pass.
    """

    torch: tuple[str, str]
    readme: tuple[int, int]
    steps: dict[str, object]
    plans: set[str]
    convolutions: dict[str, object]


def recorded_matrix(torch: str) -> Path:
    """Return the path of a torch's fidelity matrix; it may not exist."""
    return RESULTS / f"fidelity-virtual-{CARD}-torch{torch}.json"


def environment(folder: Path, torch: str, kind: str) -> str:
    """Make an environment, unless it exists; return its Python."""
    place = folder / re.sub(r"\W+", "-", f"{torch} {kind}")
    if not (place / "whole").exists():
        excluded = excludes(folder, LIGHT[kind])
        output_of("uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(place))
        install = ["uv", "pip", "install", "--quiet", "--python", str(place), *excluded]
        wanted = [f"torch=={torch}", "torchvision", "transformers"]
        if (path := recorded_matrix(torch)).exists():  # use the same versions
            versions = json.loads(path.read_text(encoding="utf-8"))["provenance"]
            wanted[1:] = [f"{name}=={versions[name]}" for name in wanted[1:]]
        output_of(*install, *wanted, "-r", "pyproject.toml")
        (place / "whole").touch()
    return str(place / "bin/python")


def figures(python: str, steps: Sequence[str], sweep: int) -> Figures:
    """Run all programs in an environment, with this checkout's package and benchmarks."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "benchmarks", "tests"))

    def said_by(*words: str) -> Any:  # noqa: ANN401 - JSON
        return json.loads(output_of(python, *words, PYTHONPATH=paths).splitlines()[-1])

    readme = said_by("-c", README_STEP)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        words = ["--virtual", CARD, "--fork", "--out", str(out), "--but", "*compiled*", "--only"]
        command = [python, "-m", "benchmarks.fidelity.run", *words, *steps]
        output_of(*command, PYTHONPATH=paths)
        matrix = json.loads(out.read_text(encoding="utf-8"))
    convolutions = {}
    for card in SWEPT if sweep else ():
        answers, _ = said_by("-c", SWEEP, str(sweep), card)
        convolutions |= {f"{card} {key}": value for key, value in answers.items()}
    made_with = matrix["provenance"]
    return Figures(
        (made_with["torch"], made_with["cuda"]),
        tuple(readme),
        *came_of(matrix["steps"]),
        convolutions,
    )


def came_of(steps: dict[str, Any]) -> tuple[dict[str, object], set[str]]:
    """Return each step's bytes, or its status, and the steps that queried cuDNN."""
    came = {
        name: [step["allocated"], step["reserved"]] if step["status"] == "ok" else step["status"]
        for name, step in steps.items()
    }
    asking = {
        name
        for name, step in steps.items()
        if any(step.get("convolutions", {}).get(it) for it in ("asked", "unknown", "ranged"))
    }
    return came, asking


def same(one: dict[str, object], other: dict[str, object], names: set[str]) -> str:
    """Return for how many names the values are equal: "3 of 4"."""
    return f"{sum(one.get(name) == other.get(name) for name in names)} of {len(names)}"


def text_of(torch: str, options: argparse.Namespace) -> str:
    """Return a torch's table, and the steps that differ."""
    began = "; ".join(f"{name} {value}" for name, value in where().items())
    path = recorded_matrix(torch)
    recorded = path.exists()
    measured: dict[str, Figures] = {}
    for kind, left_out in LIGHT.items():
        python = environment(options.keep, torch, kind)
        # The recorded steps are from an environment with all packages.
        steps = ["*"] if recorded else STEPS
        if recorded and left_out is None:
            steps = STEPS[:1]
        measured[kind] = figures(python, steps, options.sweep)
        print(torch, kind, measured[kind].readme, flush=True)
        if not options.kept:
            shutil.rmtree(Path(python).parents[1])
    whole = measured["all packages"]
    if recorded:
        all_steps = json.loads(path.read_text(encoding="utf-8"))["steps"]
        came, asking = came_of({n: it for n, it in all_steps.items() if "compiled" not in n})
        assert came.items() >= whole.steps.items()
        whole = measured["all packages"] = whole._replace(steps=came, plans=asking)
    plain = whole.steps.keys() - whole.plans
    rows, below = [], []
    for kind, its in measured.items():
        rows.append(
            [
                kind,
                "{:,} / {:,}".format(*its.readme),
                same(its.steps, whole.steps, plain),
                same(its.steps, whole.steps, whole.plans),
                same(its.convolutions, whole.convolutions, set(whole.convolutions)),
            ]
        )
        other = sorted(name for name, value in whole.steps.items() if its.steps[name] != value)
        if other:
            below.append(f"{kind}, steps that differ: {', '.join(other)}")
    failed = sorted(name for name, value in whole.steps.items() if isinstance(value, str))
    if failed:
        below.append(f"no figures, in any of them: {', '.join(failed)}")
    if recorded:
        below.append(f"the steps with all packages are those recorded in {path.name}")
    heads = ["environment", "README's test, bytes", "steps", "steps with cuDNN's plans"]
    drawn = table(rows, [*heads, "convolutions"])
    version, cuda = whole.torch
    return "\n".join([f"torch {version}, CUDA {cuda}; {began}", drawn, *below])


def main() -> None:
    """Run the named versions of torch; keep the tables of all others."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("torches", nargs="*", default=TORCHES, metavar="TORCH")
    parser.add_argument("--sweep", type=int, default=40, help="convolutions drawn (0: none)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the environments there")
    options = parser.parse_args()
    options.kept = options.keep is not None
    if not options.kept:
        options.keep = Path(tempfile.mkdtemp(prefix="light-"))
    path = RESULTS / "light_figures.txt"
    tables = {}
    if path.exists():
        before = path.read_text(encoding="utf-8").rstrip().split("\n\n")[1:]
        tables = {re.match(r"torch ([\d.]+)", text)[1]: text for text in before}
    title = (
        f"{__doc__.splitlines()[0]}\nAllocated and reserved bytes on the virtual T4 (README) and "
        f"{CARD} (steps of the fidelity matrix);\nhow many steps, and "
        f"workspaces of convolutions drawn at random ({', '.join(SWEPT)}), are to the byte those "
        "with all packages."
    )
    for torch in options.torches:
        tables[torch] = text_of(torch, options)
        in_order = sorted(tables.items(), key=lambda item: [int(it) for it in item[0].split(".")])
        publish("light_figures", "\n\n".join([title, *(text for _, text in in_order)]))
    if not options.kept:
        shutil.rmtree(options.keep)


if __name__ == "__main__":
    main()
