"""Autoencoders of diffusion models, measured on an RTX 4090, beside the virtual GPU's.

    GPUMEM_CUDNN=/path/to/libcudnn.so.9 python benchmarks/published_vae.py --python /path/to/python

The rows are those of data/vae-peaks.csv (data/README.md says where they are from). The interpreter
needs their torch 2.7, and diffusers 0.33 for Stable Diffusion's. Their cuDNN 9.7.1 cannot be asked
without a GPU: 9.8.0 is the nearest that can. As there, each model's rows run in one process, one
after the other; two runs warm up, the mean of five is the figure. They run again with the least and
the largest workspaces, between whose peaks the published ones are to lie.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from provenance import ROOT, line, publish
from tabulate import tabulate
from workers import ask_worker

sys.path.insert(0, str(ROOT))  # of this checkout, not of an installed one
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.virtual.cudnn_notes import MARGIN
from pytest_gpumem.measurement import Peak
from pytest_gpumem.testrun.size_range import widened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from pytest_gpumem.devices.base import RangeEnd

DATA = ROOT / "benchmarks" / "data" / "vae-peaks.csv"
SIZES = (512, 768, 1024, 1536, 2048)
TILED = 1024
"""from this size on Stable Diffusion's rows decode a second time, in tiles"""
CONFIGURATION = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
}
"""of both of Stable Diffusion's autoencoders"""
MIB = 2**20
TITLE = "Peaks of autoencoders in MiB on an RTX 4090, by their source with torch 2.7.1, cuDNN 9.7.1"
Result = dict[str, tuple[float, float]]


def work(model: str, end: RangeEnd, *, once: bool) -> None:
    """Run a model's rows here; print their figures, and the versions."""
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    device = VirtualDevice.load(CARDS["RTX 4090"])
    device.open(CARDS["RTX 4090"], 1)
    sys.path.insert(0, str(ROOT / "benchmarks" / "fidelity"))
    import torch

    torch.cuda.init()
    device.workspaces.take(end)
    if once:
        ROUNDS.warm = ROUNDS.count = 1
    peaks = dict(flux_rows() if model == "Flux" else diffusion_rows())
    if unsupported := sorted(device.library.unsupported()):
        raise SystemExit(f"not supported: {', '.join(unsupported)}")
    print(json.dumps([peaks, f"torch {torch.__version__}, cuDNN {device.library.cudnn_found()}"]))


def clear() -> None:
    """Forget what is cached, and the peaks."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@dataclass
class Rounds:
    """How often each row runs: as its source's; at the ends of a range once, after one more."""

    warm: int = 2
    count: int = 5


ROUNDS = Rounds()


def mean(run: Callable[[], object]) -> tuple[float, float]:
    """Return MiB that a run allocates and reserves more than there was, on average."""
    import torch

    count = ROUNDS.count
    for _ in range(ROUNDS.warm):
        result = run()
        clear()
    allocated, reserved = 0, 0
    for _ in range(count):
        clear()
        allocated -= torch.cuda.memory_allocated()
        reserved -= torch.cuda.memory_reserved()
        result = run()
        allocated += torch.cuda.max_memory_allocated()
        reserved += torch.cuda.max_memory_reserved()
        del result
    return allocated / count / MIB, reserved / count / MIB


def flux_rows() -> Iterator[tuple[str, tuple[float, float]]]:
    """Run Flux's autoencoder: all sizes of a type, then the next."""
    import torch
    from models_vae import FluxVae

    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        clear()
        vae = FluxVae().to(device="cuda", dtype=dtype).eval()
        name = str(dtype).removeprefix("torch.")
        for size in SIZES:
            shapes = {"encode": (1, 3, size, size), "decode": (1, 16, size // 8, size // 8)}
            for operation, shape in shapes.items():
                yield f"Flux {operation} {size} {name}", flux_row(vae, operation, shape, dtype)
        del vae
        clear()


def flux_row(
    vae: torch.nn.Module, operation: str, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[float, float]:
    """Encode or decode."""
    import torch

    inputs = torch.randn(shape).to(device="cuda", dtype=dtype)
    with torch.no_grad():
        return mean(lambda: getattr(vae, operation)(inputs))


def diffusion_rows() -> Iterator[tuple[str, tuple[float, float]]]:
    """Run Stable Diffusion's, twice over: of 1.5 and XL the network is the same."""
    import torch
    from diffusers import AutoencoderKL

    for model, scale in (("SD1.5", 0.18215), ("SDXL", 0.13025)):
        for kind in ("float16", "mixed", "float32"):
            clear()
            dtype = torch.float32 if kind == "float32" else torch.float16
            vae = AutoencoderKL(**CONFIGURATION, scaling_factor=scale).to(dtype).to("cuda").eval()
            vae.disable_tiling()
            for size in SIZES:
                case = Case(model, kind, size, dtype)
                if kind != "mixed":
                    yield f"{model} encode {size} {kind}", encode(vae, case)
                elif size == SIZES[0]:
                    vae.to(torch.float32)  # its script's encoding fails, and leaves it like that
                yield f"{model} decode {size} {kind}", decode(vae, case, tiled=False)
                if size >= TILED:
                    yield f"{model} decode_tiled {size} {kind}", decode(vae, case, tiled=True)
            del vae
            clear()


@dataclass(frozen=True)
class Case:
    """A row but for what it does."""

    model: str
    kind: str
    size: int
    dtype: torch.dtype


def encode(vae: torch.nn.Module, case: Case) -> tuple[float, float]:
    """Run one encoding; with tiles where the decoding before it was tiled, as there."""
    import torch

    images = torch.randn(1, 3, case.size, case.size).to(device="cuda", dtype=case.dtype)

    def run() -> object:
        with torch.inference_mode():
            distribution = vae.encode(images).latent_dist
            latents = distribution.sample()
            return vae.config.scaling_factor * latents, distribution

    return mean(run)


def decode(vae: torch.nn.Module, case: Case, *, tiled: bool) -> tuple[float, float]:
    """Run one decoding."""
    import torch

    side = case.size // 8
    latents = torch.randn(1, 4, side, side).to(device="cuda", dtype=case.dtype)
    if tiled:
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = 512, 64
        vae.tile_overlap_factor = 0.25
    else:
        vae.disable_tiling()

    def run() -> object:
        inputs = latents.to(torch.float32) if case.kind == "mixed" else latents
        with torch.inference_mode():
            scaled = inputs / vae.config.scaling_factor
            return vae.decode(scaled, return_dict=False)[0], scaled, inputs

    return mean(run)


def rows() -> list[dict[str, str]]:
    """Return the rows, in the order of the file."""
    with DATA.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def ask(python: str, model: str, end: RangeEnd, *, once: bool) -> tuple[Result, str]:
    """Return the figures of a worker and its versions; ``once``: of one run each."""
    words = ["--worker", model, "--end", end, *(["--once"] if once else [])]
    peaks, versions = ask_worker(python, __file__, *words)
    return peaks, versions


def spread(errors: list[float]) -> str:
    """Return count, median and worst of errors in percent."""
    if not errors:
        return "no rows"
    sizes = [abs(error) for error in errors]
    return f"{len(sizes)} rows, median {statistics.median(sizes):.2f} %, worst {max(sizes):.2f} %"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--worker")
    parser.add_argument("--end", default="usual")
    parser.add_argument("--once", action="store_true", help="one run of each row, after another")
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.end, once=options.once)
        return
    peaks: dict[RangeEnd, Result] = {"usual": {}, "least": {}, "most": {}}
    for end, results in peaks.items():
        for model in ("Flux", "Stable Diffusion"):
            figures, versions = ask(options.python, model, end, once=end != "usual")
            results.update(figures)
    publish("published_vae", report(peaks, versions))


def ends(peaks: dict[RangeEnd, Result], name: str) -> tuple[tuple[float, float], ...]:
    """Return the ranges of what a row allocates and reserves, as testrun/size_range.py does."""
    allocated, reserved = zip(*(results[name] for results in peaks.values()), strict=True)
    most = Peak(round(max(allocated) * MIB), round(max(reserved) * MIB))
    most = widened(most, MARGIN, CARDS["RTX 4090"].total_memory, full=False)
    return (min(allocated), most.allocated / MIB), (min(allocated), most.reserved / MIB)


def report(peaks: dict[RangeEnd, Result], versions: str) -> str:
    """Return the table and its summaries."""
    table, groups, inside = [], {}, 0
    for row in rows():
        name = f"{row['model']} {row['operation']} {row['size']} {row['dtype']}"
        real = float(row["allocated_mib"]), float(row["reserved_mib"])
        usual = peaks["usual"][name]
        errors = [100 * (mine / it - 1) for mine, it in zip(usual, real, strict=True)]
        spans = ends(peaks, name)
        # Published to 0.01 MiB; what is allocated besides is at most 0.1 % of it.
        inside += all(
            low * 0.999 <= it <= high * 1.001 for it, (low, high) in zip(real, spans, strict=True)
        )
        half = "half" if row["dtype"] in ("float16", "bfloat16") else "float32"
        group = "never looked at" if row["unseen"] == "1" else "looked at"
        for key in (f"{group}, {half}", f"{row['model']} {half}"):
            groups.setdefault(key, []).append(errors)
        figures = [f"{value:.2f}" for pair in zip(real, usual, strict=True) for value in pair]
        unseen = "yes" if row["unseen"] == "1" else ""
        shown = [f"{low:.0f} to {high:.0f}" for low, high in spans]
        table.append([name, *figures, *[f"{error:+.2f}" for error in errors], unseen, *shown])
    heads = ["RTX 4090", "allocated", "virtual", "reserved", "virtual", "allocated %"]
    text = [
        TITLE,
        line(),
        f"here: {versions}",
        "",
        tabulate(
            table,
            [*heads, "reserved %", "never looked at", "allocated between", "reserved between"],
            disable_numparse=True,
        ),
        "",
    ]
    for key, errors in sorted(groups.items()):
        for at, kind in enumerate(("allocated", "reserved")):
            text.append(f"{key}, {kind}: {spread([pair[at] for pair in errors])}")
    widths = {
        kind: statistics.median(
            100 * (high / low - 1) for low, high in (ends(peaks, row[0])[at] for row in table)
        )
        for at, kind in enumerate(("allocated", "reserved"))
    }
    text.append(
        f"ranges: {inside} of {len(table)} rows lie in both of theirs, within 0.1 %; the upper end "
        f"is {widths['allocated']:.0f} % (allocated) and {widths['reserved']:.0f} % (reserved) "
        "above the lower in the median"
    )
    return "\n".join(text)


if __name__ == "__main__":
    main()
