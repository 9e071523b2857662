"""Autoencoders of diffusion models, measured on an RTX 4090, beside the virtual GPU's.

    GPUMEM_CUDNN=/path/to/libcudnn.so.9 python -m benchmarks.published vae --python PYTHON

The interpreter needs the rows' torch 2.7, and diffusers 0.33 for Stable Diffusion's rows. The rows'
cuDNN 9.7.1 cannot be queried without a GPU: 9.8.0 is the nearest version that can. As in the
source, each model's rows run in one process, one after the other; after two warm-up runs, the mean
of five is the figure. The rows run again with the smallest and the largest workspaces: the
published peaks should lie between theirs.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.harness import MIB, line, percent, read, spreads, table
from benchmarks.published.runner import looked, unseen
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.virtual.cudnn_notes import CUDNN_MARGIN
from pytest_gpumem.measurement import Peak
from pytest_gpumem.replay.size_range import widened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from benchmarks.published.runner import Answers, Process, Row

CARD = "RTX 4090"
VARIANTS = {"usual": {}, "least": {}, "most": {}}
SIZES = (512, 768, 1024, 1536, 2048)
TILED = 1024
"""from this size on, Stable Diffusion's rows decode again, in tiles"""
CONFIGURATION = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
}
"""configuration of both autoencoders of Stable Diffusion"""
TITLE = "Peaks of autoencoders in MiB on an RTX 4090, by their source with torch 2.7.1, cuDNN 9.7.1"
Pair = tuple[float, float]
"""MiB allocated and reserved"""


def rows() -> list[Row]:
    """Return the rows, in the order of the file."""
    names = ("model", "operation", "size", "dtype")
    return [row | {"row": " ".join(row[name] for name in names)} for row in read("vae-peaks.csv")]


def group(row: Row) -> str:
    """Return the network; Stable Diffusion 1.5 and XL have the same."""
    return "Flux" if row["model"] == "Flux" else "Stable Diffusion"


def steps(process: Process) -> Iterator[tuple[str, Pair]]:
    """Run a network's rows; yield MiB allocated and reserved."""
    import torch

    torch.cuda.init()
    process.device.gpu_choices.assume_sizes(process.variant)
    if process.variant != "usual":
        ROUNDS.warm = ROUNDS.count = 1
    yield from flux_rows() if process.rows[0]["model"] == "Flux" else diffusion_rows()


def clear() -> None:
    """Empty the cache, and reset the peaks."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@dataclass
class Rounds:
    """How often each row runs: as in the source, or, at a range's ends, once after one warm-up."""

    warm: int = 2
    count: int = 5


ROUNDS = Rounds()


def mean(run: Callable[[], object]) -> Pair:
    """Return the mean MiB that a run allocates and reserves above the memory before it."""
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


def flux_rows() -> Iterator[tuple[str, Pair]]:
    """Run Flux's autoencoder: all sizes with one dtype, then with the next."""
    import torch

    from benchmarks.fidelity.models_vae import FluxVae

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
) -> Pair:
    """Run one encoding or decoding."""
    import torch

    inputs = torch.randn(shape).to(device="cuda", dtype=dtype)
    with torch.no_grad():
        return mean(lambda: getattr(vae, operation)(inputs))


def diffusion_rows() -> Iterator[tuple[str, Pair]]:
    """Run Stable Diffusion's rows twice, for 1.5 and XL, which have the same network."""
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
                    vae.to(torch.float32)  # the script's encoding fails, and leaves the model so
                yield f"{model} decode {size} {kind}", decode(vae, case, tiled=False)
                if size >= TILED:
                    yield f"{model} decode_tiled {size} {kind}", decode(vae, case, tiled=True)
            del vae
            clear()


@dataclass(frozen=True)
class Case:
    """A row without its operation."""

    model: str
    kind: str
    size: int
    dtype: torch.dtype


def encode(vae: torch.nn.Module, case: Case) -> Pair:
    """Run one encoding; tiled if the decoding before it was tiled, as in the source."""
    import torch

    images = torch.randn(1, 3, case.size, case.size).to(device="cuda", dtype=case.dtype)

    def run() -> object:
        with torch.inference_mode():
            distribution = vae.encode(images).latent_dist
            latents = distribution.sample()
            return vae.config.scaling_factor * latents, distribution

    return mean(run)


def decode(vae: torch.nn.Module, case: Case, *, tiled: bool) -> Pair:
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


def ends(answers: Answers, name: str) -> tuple[Pair, Pair]:
    """Return the ranges of a row's allocated and reserved memory, as size_range.py does."""
    peaks = [figures[name] for figures in answers.figures.values()]
    allocated, reserved = zip(*peaks, strict=True)
    most = Peak(round(max(allocated) * MIB), round(max(reserved) * MIB))
    most = widened(most, CUDNN_MARGIN, CARDS[CARD].total_memory, full=False)
    return (min(allocated), most.allocated / MIB), (min(allocated), most.reserved / MIB)


def is_half(row: Row) -> bool:
    """Return whether a row is in half precision."""
    return row["dtype"] in {"float16", "bfloat16"}


def report(answers: Answers) -> str:
    """Return the table and its summaries."""
    lines, inside = [], 0
    groups: dict[str, list[float]] = {}
    widths: dict[str, list[float]] = {}
    for row in answers.rows:
        real = float(row["allocated_mib"]), float(row["reserved_mib"])
        usual, spans = answers.figures["usual"][row["row"]], ends(answers, row["row"])
        errors = [100 * (mine / it - 1) for mine, it in zip(usual, real, strict=True)]
        # Figures are published to 0.01 MiB; other allocated memory is at most 0.1 % of them.
        inside += all(
            low * 0.999 <= it <= high * 1.001 for it, (low, high) in zip(real, spans, strict=True)
        )
        half = "half" if is_half(row) else "float32"
        kinds = ("allocated", "reserved")
        for kind, error, (low, high) in zip(kinds, errors, spans, strict=True):
            for key in (f"{looked(row)}, {half}", f"{row['model']} {half}"):
                groups.setdefault(f"{key}, {kind}", []).append(error)
            widths.setdefault(kind, []).append(percent(high, low))
        figures = [f"{value:.2f}" for pair in zip(real, usual, strict=True) for value in pair]
        shown = [f"{low:.0f} to {high:.0f}" for low, high in spans]
        cells = [*figures, *[f"{error:+.2f}" for error in errors], unseen(row), *shown]
        lines.append([row["row"], *cells])
    heads = ["RTX 4090", "allocated", "virtual", "reserved", "virtual", "allocated %"]
    heads += ["reserved %", "never looked at", "allocated between", "reserved between"]
    allocated, reserved = (f"{statistics.median(widths[kind]):.0f} % ({kind})" for kind in widths)
    ranges = (
        f"ranges: {inside} of {len(lines)} rows lie in both of theirs, within 0.1 %; the upper end "
        f"is {allocated} and {reserved} above the lower in the median"
    )
    head = [TITLE, line(), answers.here(), "", table(lines, heads), ""]
    return "\n".join([*head, *spreads(groups), ranges])
