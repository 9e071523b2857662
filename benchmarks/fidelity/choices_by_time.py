"""Whether a range holds what compiled code takes once kernels are timed, and products padded.

    python -m benchmarks.fidelity.choices_by_time [STEP ...] [--keep FILE]

A GPU decides by time: its first run times kernels, and some matrix products are padded. The virtual
GPU does neither, and reports a range. Here each step runs on a virtual H100 with its range; then in
three further processes with what a GPU may do: PyTorch's own code times kernels; all products that
PyTorch considers padding are padded; or both. The recorded run is
benchmarks/results/choices_by_time.txt. These steps have not been measured on a real GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import MIB, ask, line, publish, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

CARD = "H100"
GPUS = ("timed", "padded", "timed padded")
"""what PyTorch does as on a real GPU"""
TOLERANCE = 0.001
"""fraction by which a figure may be below the range's lower end: a baseline's tolerance"""


def perceptron(width: int, out: int, *, activation: str = "GELU") -> Callable[[], None]:
    """Return a function that runs two training steps of three layers, in bfloat16."""

    def step() -> None:
        import torch

        kind = getattr(torch.nn, activation)
        layers = [torch.nn.Linear(width, width), kind(), torch.nn.Linear(width, width), kind()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(width, out)).cuda().bfloat16()
        train(
            torch.compile(model),
            lambda: torch.zeros(8191, width, device="cuda", dtype=torch.bfloat16),
        )

    return step


def gpt(vocabulary: int, *, width: int = 384) -> Callable[[], None]:
    """Return a function that runs two training steps of a small GPT, in bfloat16."""

    def step() -> None:
        import torch
        from torch.nn import functional

        class Block(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
                self.qkv, self.out = (
                    torch.nn.Linear(width, 3 * width),
                    torch.nn.Linear(width, width),
                )
                wide = [torch.nn.Linear(width, 4 * width), torch.nn.GELU()]
                self.mlp = torch.nn.Sequential(*wide, torch.nn.Linear(4 * width, width))

            def forward(self, x: Tensor) -> Tensor:
                parts = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, 6, -1)
                mixed = functional.scaled_dot_product_attention(
                    *parts.permute(2, 0, 3, 1, 4), is_causal=True
                )
                x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
                return x + self.mlp(self.norms[1](x))

        class Gpt(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tokens = torch.nn.Embedding(vocabulary, width)
                self.blocks = torch.nn.Sequential(*(Block() for _ in range(3)))
                self.head = torch.nn.Linear(width, vocabulary, bias=False)

            def forward(self, tokens: Tensor) -> Tensor:
                return self.head(self.blocks(self.tokens(tokens)))

        model: Any = torch.compile(Gpt().cuda().bfloat16())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            tokens = torch.zeros(16, 512, dtype=torch.long, device="cuda")
            functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def encoder(width: int, heads: int, length: int) -> Callable[[], None]:
    """Return a function that runs two training steps of an encoder layer with odd sizes."""

    def step() -> None:
        import torch

        layer = torch.nn.TransformerEncoderLayer(width, heads, 3 * width, batch_first=True)
        model = torch.compile(layer.cuda().half())
        train(model, lambda: torch.zeros(16, length, width, device="cuda", dtype=torch.half))

    return step


def optimizer_of_8_bits() -> None:
    """Update parameters with an 8-bit state, in compiled code that writes into its arguments."""
    import torch

    @torch.compile(fullgraph=True)
    def update(p: Tensor, grad: Tensor, codes: Tensor, scale: Tensor) -> None:
        state = codes.float().view(-1, 256) * scale.view(-1, 1)
        state = state.lerp(grad.view(-1, 256), 0.1)
        scale.copy_(state.abs().amax(-1) / 127)
        codes.copy_((state / scale.view(-1, 1)).round().to(torch.int8).view(codes.shape))
        p.add_(state.view(p.shape), alpha=-0.1)

    p, grad = torch.zeros(2, 4096, 2048, device="cuda")
    codes = torch.zeros(4096, 2048, dtype=torch.int8, device="cuda")
    scale = torch.ones(4096 * 8, device="cuda")
    for _ in range(2):
        update(p, grad, codes, scale)


def train(model: nn.Module, batch: Callable[[], Tensor]) -> None:
    """Run two training steps."""
    for _ in range(2):
        model(batch()).float().square().mean().backward()
        model.zero_grad()


STEPS: dict[str, Callable[[], None]] = {
    "perceptron, 1023 to 1001": perceptron(1023, 1001),
    "perceptron, 1022 to 10": perceptron(1022, 10),
    "perceptron with Tanh": perceptron(1023, 1001, activation="Tanh"),
    "GPT, 20011 words": gpt(20011),
    "encoder, width 1001": encoder(1001, 7, 509),
    "optimizer of 8 bits": optimizer_of_8_bits,
}


def as_a_gpu(does: str) -> None:
    """Make PyTorch time kernels, or pad all products that it might pad, as on a real GPU."""
    from pytest_gpumem.devices.virtual.compilation import kernel_timing, padded_products

    if "timed" in does:
        kernel_timing.is_shown = padded_products.is_shown = lambda: False
    if "padded" in does:
        from torch._inductor.fx_passes import pad_mm

        pad_mm._skip_do_bench_times = True
        if "timed" not in does:
            pad_mm.get_cached_should_pad = lambda _: True


def work(name: str, does: str) -> list[Any]:
    """Run a step in this process; return its peaks and its range."""
    from benchmarks.harness import open_card
    from benchmarks.published.runner import with_range
    from pytest_gpumem.devices.cards import find_card

    device = open_card(find_card(CARD))
    if does:
        as_a_gpu(does)
    peaks, ends = with_range(STEPS[name], device)
    return [peaks, ends]


def main() -> None:
    """Publish the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", nargs="*")
    parser.add_argument("--keep", help="a file of answers: processes in it do not run again")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(*options.work)))
        return
    rows = []
    for name in options.steps or STEPS:
        rows += compare(name, Path(options.keep) if options.keep else None)
    heads = ["step", "peak", "virtual", "least", "most", *GPUS, "held"]
    held = sum(row[-1] == "yes" for row in rows)
    title = "Peaks in MiB of compiled steps, with their ranges, and with what a GPU decides by time"
    text = [title, line("torch"), "", table(rows, heads), "", f"{held} of {len(rows)} hold all"]
    publish("choices_by_time", "\n".join(text), keep=not (options.dry or options.steps))


def compare(name: str, keep: Path | None) -> list[list[str]]:
    """Return a row for each of a step's two peaks, in MiB."""
    module = "benchmarks.fidelity.choices_by_time"
    kept = json.loads(keep.read_text(encoding="utf-8")) if keep and keep.exists() else {}
    answers = {}
    for does in ("", *GPUS):
        key = f"{name} {does}"
        if key not in kept:
            with tempfile.TemporaryDirectory() as folder:
                caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
                kept[key] = ask(sys.executable, module, "--work", name, does, **caches)
            print(key, kept[key], file=sys.stderr, flush=True)
            if keep:
                keep.write_text(json.dumps(kept), encoding="utf-8")
        answers[does] = kept[key]
    peaks, (ends, _) = answers[""]
    ends = ends or [*peaks, *peaks]
    rows = []
    for at, kind in enumerate(("allocated", "reserved")):
        figures = [answers[does][0][at] for does in GPUS]
        lowest = ends[at] * (1 - TOLERANCE)
        held = all(lowest <= figure <= ends[2 + at] for figure in figures)
        sizes = [peaks[at], ends[at], ends[2 + at], *figures]
        rows.append([name, kind, *(f"{size / MIB:.2f}" for size in sizes), "yes" if held else "NO"])
    return rows


if __name__ == "__main__":
    os.environ.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)
    main()
