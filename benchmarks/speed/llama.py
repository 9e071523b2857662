"""How long Llama 7B and 405B under FSDP2 take on one virtual GPU, as rank 0 of 64 and 1024.

    python -m benchmarks.speed.llama [--repeats 3] [--large-repeats 1] [--only 7B]

Models are made on the meta device, sharded by ``fully_shard`` over a process group of NCCL whose
other ranks are not there, given memory, and trained for two steps with AdamW. Each run is a process
of its own, from "python" to its last line, so that its host memory is its own.

7B: 1 x 4096 tokens, bf16 autocast over fp32 parameters. 405B: 1 x 8192 tokens, activation
checkpointing, FSDP2's bf16 mixed precision; bf16 autocast would keep a bf16 copy of each layer's
weights until the autocast block ends, 750 GiB in all, which no card holds.

"transformers" is LlamaForCausalLM(LlamaConfig()) with ``use_cache=False`` and ``labels``; "plain"
are the modules below. AdamW is run as it comes, which for FSDP2's parameters is foreach, and with
``foreach=False``.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.harness import GIB, Clock, ask, line, machine_speed, publish, table

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

CARD = "H200"  # no cheaper card in the table has room for the 405B run's 111 GiB
STEPS = 2
HOST_GOAL_GIB = 8


@dataclass(frozen=True)
class Size:
    """A model, how it is trained, and what is asked of the run (seconds)."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tokens: int
    ranks: int
    goal: float
    prototype: tuple[float, float]
    """GiB allocated and reserved that virtual-gpu.md reports"""
    checkpointed: bool = False
    autocast: bool = True

    @property
    def head(self) -> int:
        """Return an attention head's width."""
        return self.hidden // self.heads


SIZES = {
    "7B": Size(4096, 11008, 32, 32, 32, 32000, 4096, 64, 10, (45.61, 49.38)),
    "405B": Size(
        16384, 53248, 126, 128, 8, 128256, 8192, 1024, 60, (81.58, 110.89),
        checkpointed=True, autocast=False,
    ),
}  # fmt: skip


def plain(size: Size) -> torch.nn.Module:
    """Return a Llama of plain PyTorch modules, on the device that is the default now."""
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    def linear(wide: int, out: int) -> nn.Linear:
        return nn.Linear(wide, out, bias=False)

    def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * angles).flatten(-2).type_as(x)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            narrow = size.kv_heads * size.head
            self.q, self.o = (linear(size.hidden, size.hidden) for _ in range(2))
            self.k, self.v = (linear(size.hidden, narrow) for _ in range(2))

        def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                project(x).unflatten(-1, (-1, size.head)).transpose(1, 2)
                for project in (self.q, self.k, self.v)
            )
            y = functional.scaled_dot_product_attention(
                rotated(q, angles), rotated(k, angles), v, is_causal=True, enable_gqa=True
            )
            return self.o(y.transpose(1, 2).flatten(2))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()
            self.gate, self.up = (linear(size.hidden, size.intermediate) for _ in range(2))
            self.down = linear(size.intermediate, size.hidden)
            self.before, self.between = (nn.RMSNorm(size.hidden) for _ in range(2))

        def body(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
            x = x + self.attention(self.before(x), angles)
            h = self.between(x)
            return x + self.down(functional.silu(self.gate(h)) * self.up(h))

        def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
            if size.checkpointed:
                return checkpoint(self.body, x, angles, use_reentrant=False)
            return self.body(x, angles)

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(size.vocabulary, size.hidden)
            self.layers = nn.ModuleList(Layer() for _ in range(size.layers))
            self.norm, self.out = nn.RMSNorm(size.hidden), linear(size.hidden, size.vocabulary)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            angle = torch.ones(size.tokens, size.head // 2, device=tokens.device)
            angles = torch.polar(angle, angle)
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x, angles)
            logits = self.out(self.norm(x))
            return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())

    return Llama()


def from_transformers(size: Size) -> torch.nn.Module:
    """Return transformers' Llama, on the device that is the default now."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.tokens,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if size.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def sharded(size: Size, definition: str) -> tuple[torch.nn.Module, Callable[..., torch.Tensor]]:
    """Return the model, sharded on the meta device, and what computes its loss."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    more = {} if size.autocast else {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
    with torch.device("meta"):
        model = (plain if definition == "plain" else from_transformers)(size)
    for layer in model.layers if definition == "plain" else model.model.layers:
        fully_shard(layer, **more)
    fully_shard(model, **more)
    if definition == "plain":
        return model, model
    return model, lambda tokens: model(tokens, labels=tokens).loss


class Laps:
    """Seconds from one call to the next, by name."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, name: str) -> None:
        """Note what took the time since the last call."""
        now = time.perf_counter()
        self.times[name] = self.times.get(name, 0) + now - self._last
        self._last = now


def train(size: Size, definition: str, options: dict[str, bool], lap: Laps) -> None:
    """Make the model and train it."""
    import torch

    model, loss_of = sharded(size, definition)
    lap("shard")
    model.to_empty(device="cuda").train()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    tokens = torch.zeros(1, size.tokens, dtype=torch.long, device="cuda")
    lap("allocate")
    for number in range(STEPS):
        with torch.autocast("cuda", torch.bfloat16, enabled=size.autocast):
            loss = loss_of(tokens)
        loss.backward()
        del loss
        lap("forward and backward")
        optimizer.step()
        optimizer.zero_grad()
        lap("first optimizer step" if number == 0 else "next optimizer step")


def child(name: str, definition: str, options: dict[str, bool]) -> dict[str, object]:
    """Run one configuration in this process and return its figures."""
    lap = Laps()
    size = SIZES[name]
    from pytest_gpumem.devices.virtual.device import VirtualDevice
    from pytest_gpumem.meter.block import measure, use_virtual_gpu

    use_virtual_gpu(CARD, values="off")
    from pytest_gpumem.devices.lone_rank import joined

    with joined(0, size.ranks, "virtual"):  # what world_size on the marker does
        lap("import")
        with measure() as measured:
            train(size, definition, options, lap)
    library = VirtualDevice.loaded().library
    assert not library.unsupported(), library.unsupported()
    return {
        "laps": lap.times,
        "cpu": time.process_time(),
        "allocated": measured.peak_allocated,
        "reserved": measured.peak_reserved,
        "mallocs": library.account(0).mallocs,
        "launches": library.counters().launches,
        "host": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def run(name: str, definition: str, options: dict[str, bool]) -> dict[str, object]:
    """Run one configuration in a process of its own; "wall" is what that took in all."""
    words = ("--child", name, definition, json.dumps(options))
    quiet = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    clock = Clock()
    figures = ask(sys.executable, "benchmarks.speed.llama", *words, **quiet)
    return {**figures, "wall": clock.read()[0]}


def row(key: tuple[str, str, str], found: list[dict[str, object]]) -> list[str]:
    """Return the table's row of a configuration: medians of its runs."""

    def median(what: str) -> float:
        return statistics.median(it[what] for it in found)

    work = statistics.median(it["wall"] - it["laps"]["import"] for it in found)
    counts = (found[-1][what] for what in ("mallocs", "launches"))
    sizes = (f"{found[-1][what] / GIB:.2f}" for what in ("allocated", "reserved"))
    seconds = (f"{value:.1f}" for value in (median("wall"), work, median("cpu")))
    host = f"{max(it['host'] for it in found) / GIB:.2f}"
    return [*key, *seconds, *sizes, host, *map(str, counts)]


def verdict(key: tuple[str, str, str], found: list[dict[str, object]]) -> str:
    """Return whether a configuration keeps the goals."""
    size = SIZES[key[0]]
    wall = statistics.median(it["wall"] for it in found)
    host = max(it["host"] for it in found) / GIB
    last = found[-1]
    peaks = tuple(round(last[what] / GIB, 2) for what in ("allocated", "reserved"))
    return (
        f"{' '.join(key)}: {size.goal:.0f} s {'met' if wall < size.goal else 'missed'}, "
        f"{HOST_GOAL_GIB} GiB of host memory {'met' if host < HOST_GOAL_GIB else 'missed'}; "
        f"the prototype's peaks {'reproduced' if peaks == size.prototype else f'{size.prototype}'}"
    )


def laps_row(key: tuple[str, str, str], found: list[dict[str, object]]) -> list[str]:
    """Return where a configuration's time went, medians."""
    names = found[0]["laps"]
    return [*key, *(f"{statistics.median(it['laps'][name] for it in found):.1f}" for name in names)]


def report(results: dict[tuple[str, str, str], list[dict[str, object]]]) -> str:
    """Return all tables."""
    keys = ["model", "definition", "AdamW"]
    heads = [*keys, "wall s", "after imports", "CPU s", "allocated", "reserved", "host"]
    rows = [row(key, found) for key, found in results.items()]
    names = list(next(iter(results.values()))[0]["laps"])
    laps = [laps_row(key, found) for key, found in results.items()]
    counts = {key[0]: len(found) for key, found in results.items()}
    return "\n".join(
        [
            f"Llama under FSDP2 on one virtual {CARD}, {STEPS} steps; GiB; runs: {counts}",
            line("transformers"),
            machine_speed(),
            "wall: from starting python to its end; CPU: both threads, imports too",
            "",
            table(rows, [*heads, "cudaMallocs", "launches"], "lllr"),
            "",
            "Where the wall time went, s",
            "",
            table(laps, [*keys, *names], "lllr"),
            "",
            *(verdict(key, found) for key, found in results.items()),
        ]
    )


def main() -> None:
    """Run all configurations by turns, print and keep the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each 7B configuration")
    parser.add_argument("--large-repeats", type=int, default=1, help="the same for 405B")
    parser.add_argument("--only", choices=list(SIZES))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        name, definition, options = given.child
        print(json.dumps(child(name, definition, json.loads(options))))
        return
    variants = {"default": {}, "foreach=False": {"foreach": False}}
    results: dict[tuple[str, str, str], list[dict[str, object]]] = {}
    for name in [given.only] if given.only else SIZES:
        for _ in range(given.repeats if name == "7B" else given.large_repeats):
            for definition in ("transformers", "plain"):
                for title, options in variants.items():
                    found = run(name, definition, options)
                    results.setdefault((name, definition, title), []).append(found)
    publish("speed_llama" + (f"_{given.only}" if given.only else ""), report(results))


if __name__ == "__main__":
    main()
