"""How fast ResNet-50's training step is on the virtual GPU, beside FakeTensorMode with MemTracker.

    python benchmarks/speed_resnet.py [--repeats 3] [--passes 60]

Two steps (batch 32, fp32, Adam with foreach=True, which FakeTensorMode would not choose by itself)
run by turns on the virtual GPU, under FakeTensorMode, and under FakeTensorMode with MemTracker.
The fake tensors are on device "cuda", whose backward pass needs the virtual GPU to run at all.

Then, in a process of its own, what the native library's accounting costs. A small library in front
of the native one, compiled here, has a switch. On: each call goes on to the native library. Off:
cudaMalloc hands out addresses of one block taken beforehand, cudaFree and the kernel launches do
nothing, and so nothing is charged, looked for, locked or counted. The same two steps run by turns
with the switch on and off; "cold" passes start with torch.cuda.empty_cache() (so that all of the
step's segments come from cudaMalloc again), "warm" ones make no device allocation at all.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from provenance import line, publish
from tabulate import tabulate

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

CARD = "H100"
BATCH = 32
STEPS = 2
GOAL_TIMES = 100
GOAL_PERCENT = 10
MIB = 1 << 20
ARENA = 1 << 39
"""bytes of addresses for what is allocated while the accounting is off; none is ever used again"""

SWITCH = """
#include <stddef.h>
#include <stdint.h>
typedef struct { unsigned x, y, z; } dim3;
typedef int (*launcher)(const void *, dim3, dim3, void **, size_t, void *);
static int (*real_malloc)(void **, size_t), (*real_free)(void *);
static launcher real_launch, real_kernel;
static uintptr_t start, next, end;
static int off;
void switch_set(void *m, void *f, void *l, void *k) {
    real_malloc = m, real_free = f, real_launch = l, real_kernel = k;
}
void switch_arena(uintptr_t base, size_t size) { start = next = base, end = base + size; }
void switch_off(int now) { off = now; }
int cudaMalloc(void **out, size_t size) {
    if (!off) return real_malloc(out, size);
    uintptr_t at = __atomic_fetch_add(&next, (size + 0x1fffff) & ~0x1fffffUL, __ATOMIC_RELAXED);
    if (at + size > end) return 2;
    *out = (void *)at;
    return 0;
}
int cudaFree(void *p) {
    return (uintptr_t)p >= start && (uintptr_t)p < end ? 0 : real_free(p);
}
int cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t s, void *q) {
    return off ? 0 : real_launch(f, g, b, a, s, q);
}
int __cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t s, void *q) {
    return off ? 0 : real_kernel(f, g, b, a, s, q);
}
"""


class Sample(NamedTuple):
    """One run of the two steps: seconds, and the peak in bytes (reserved: None where unknown)."""

    build: float
    wall: float
    cpu: float
    allocated: int | None
    reserved: int | None


class Task(NamedTuple):
    """A model and what it trains with."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    x: torch.Tensor
    y: torch.Tensor


class Clock:
    """Wall and processor seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Return wall and processor seconds."""
        return time.perf_counter() - self._wall, time.process_time() - self._cpu


def machine_speed() -> str:
    """Return what a fixed loop of Python takes here, for comparing figures of two machines."""
    clock = Clock()
    sum(number * number for number in range(3_000_000))
    wall, cpu = clock.read()
    load = os.getloadavg()[0]
    return (
        f"3 million squares in a Python loop: {cpu:.2f} s CPU, {wall:.2f} s wall; load {load:.1f}"
    )


def task() -> Task:
    """Make the model, the optimizer and a batch on the virtual GPU, or fakes of them."""
    import torch
    import torchvision

    with torch.device("cuda"):
        model = torchvision.models.resnet50()
        x = torch.randn(BATCH, 3, 224, 224)
        y = torch.randint(0, 1000, (BATCH,))
    return Task(model, torch.optim.Adam(model.parameters(), foreach=True), x, y)


def steps(it: Task) -> Iterator[None]:
    """Run the steps; yields after each."""
    from torch.nn.functional import cross_entropy

    for _ in range(STEPS):
        it.optimizer.zero_grad()
        cross_entropy(it.model(it.x), it.y).backward()
        it.optimizer.step()
        yield


def virtual() -> Sample:
    """Run the steps on the virtual GPU; the peaks are torch.cuda's own statistics."""
    import torch

    clock = Clock()
    made = task()
    build, _ = clock.read()
    torch.cuda.empty_cache()
    clock = Clock()
    torch.cuda.reset_peak_memory_stats()
    for _ in steps(made):
        pass
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return Sample(build, *clock.read(), *peaks)


def measured() -> Sample:
    """Run them there in ``measure()``, which collects garbage and settles the device first."""
    from pytest_gpumem.context import measure

    clock = Clock()
    made = task()
    build, _ = clock.read()
    clock = Clock()
    with measure() as found:
        for _ in steps(made):
            pass
    return Sample(build, *clock.read(), found.peak_allocated, found.peak_reserved)


def fake() -> Sample:
    """Run the steps on fake tensors, nothing tracked."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        clock = Clock()
        made = task()
        build, _ = clock.read()
        clock = Clock()
        for _ in steps(made):
            pass
        return Sample(build, *clock.read(), None, None)


def tracked() -> Sample:
    """Run the steps on fake tensors under MemTracker."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        clock = Clock()
        made = task()
        build, _ = clock.read()
        clock = Clock()
        tracker = MemTracker()
        tracker.track_external(*made)
        with tracker:
            for _ in steps(made):
                tracker.reset_mod_stats()  # it refuses a second iteration without
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cuda:0")]["Total"]
        return Sample(build, *clock.read(), peak, None)


KINDS = {
    "virtual GPU": virtual,
    "virtual GPU, in measure()": measured,
    "FakeTensorMode": fake,
    "FakeTensorMode + MemTracker": tracked,
}


def compare(repeats: int) -> str:
    """Return the table of the three ways to run the steps."""
    from pytest_gpumem.context import use_virtual_gpu

    use_virtual_gpu(CARD)
    samples: dict[str, list[Sample]] = {name: [] for name in KINDS}
    for _ in range(1 + repeats):
        for name, run in KINDS.items():
            samples[name].append(run())
    rows = [_row(name, found[0], found[1:]) for name, found in samples.items()]
    pairs = list(zip(samples["FakeTensorMode + MemTracker"], samples["virtual GPU"], strict=True))
    walls = [theirs.wall / ours.wall for theirs, ours in pairs[1:]]
    cpus = [theirs.cpu / ours.cpu for theirs, ours in pairs[1:]]
    ratio = statistics.median(walls)
    headers = ["", "first s", "median s", "least s", "CPU s", "build s", "allocated", "reserved"]
    first = pairs[0][0].wall / pairs[0][1].wall
    lines = [
        "Two steps, measured, by turns: one run that is not counted (first), then medians of",
        f"{repeats}; peaks in MiB, build is making the model",
        "",
        tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 7)),
        "",
        "FakeTensorMode + MemTracker against the virtual GPU, times as long:",
        (
            f"wall {ratio:.0f} (least {min(walls):.0f}), CPU {statistics.median(cpus):.0f}, "
            f"first run {first:.0f}, with the model's making {_whole(pairs[1:]):.0f}"
        ),
        f"goal, at least {GOAL_TIMES}: {'met' if ratio >= GOAL_TIMES else 'missed'}",
    ]
    return "\n".join(lines)


def _whole(pairs: list[tuple[Sample, Sample]]) -> float:
    return statistics.median(
        (theirs.build + theirs.wall) / (ours.build + ours.wall) for theirs, ours in pairs
    )


def _row(name: str, first: Sample, rest: list[Sample]) -> list[str]:
    walls = [it.wall for it in rest]
    sizes = [f"{size / MIB:.2f}" if size else "-" for size in rest[-1][3:]]
    return [
        name,
        f"{first.wall:.3f}",
        f"{statistics.median(walls):.3f}",
        f"{min(walls):.3f}",
        f"{statistics.median(it.cpu for it in rest):.3f}",
        f"{statistics.median(it.build for it in rest):.2f}",
        *sizes,
    ]


@contextmanager
def switch() -> Iterator[ctypes.CDLL]:
    """Compile and load the switch; has to come before the virtual GPU."""
    with tempfile.TemporaryDirectory() as name:
        source, library = Path(name) / "switch.c", Path(name) / "libswitch.so"
        source.write_text(SWITCH, encoding="utf-8")
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        yield ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def native_library() -> ctypes.CDLL:
    """Return the native library, to call it behind the switch."""
    from pytest_gpumem import native

    return ctypes.CDLL(str(native.LIBRARY))


def give_arena(gate: ctypes.CDLL) -> None:
    """Give the switch the addresses that it hands out."""
    from pytest_gpumem.devices.virtual import VirtualDevice

    VirtualDevice.loaded().library.make_room(0, ARENA)
    block, size = ctypes.c_uint64(), ctypes.c_size_t(ARENA)
    assert native_library().cudaMalloc(ctypes.byref(block), size) == 0
    gate.switch_arena(block, size)


def accounting(passes: int) -> dict[str, object]:
    """Time passes of the steps, accounting on and off; return milliseconds and counts."""
    from pytest_gpumem.context import use_virtual_gpu
    from pytest_gpumem.devices.virtual import VirtualDevice

    with switch() as gate:
        behind = native_library()
        names = ("cudaMalloc", "cudaFree", "cudaLaunchKernel", "__cudaLaunchKernel")
        gate.switch_set(*(ctypes.cast(behind[name], ctypes.c_void_p) for name in names))
        use_virtual_gpu(CARD)
        give_arena(gate)
        library = VirtualDevice.loaded().library
        made = task()
        for _ in steps(made):  # the optimizer's states have to be there before
            pass
        times: dict[str, list[list[float]]] = {
            f"{heat} {state}": [] for heat in ("cold", "warm") for state in ("on", "off")
        }
        counts: dict[str, list[int]] = {}
        for number in range(passes):
            for name in sorted(times, reverse=bool(number % 2)):
                gate.switch_off(int(name.endswith("off")))
                before = _counts(library)
                times[name].append(_pass(made, cold=name.startswith("cold")))
                after = _counts(library)
                counts[name] = [b - a for a, b in zip(before, after, strict=True)]
        gate.switch_off(0)
        return {"times": times, "counts": counts, "calls": _calls()}


def _counts(library: object) -> tuple[int, int, int]:
    account = library.account(0)
    return account.mallocs, account.frees, library.counters().launches


def _pass(made: Task, *, cold: bool) -> list[float]:
    """Run the steps; return wall and processor milliseconds."""
    import torch

    made.optimizer.zero_grad()
    torch.cuda.empty_cache()
    if not cold:
        for _ in steps(made):
            pass
    clock = Clock()
    for _ in steps(made):
        pass
    return [1000 * seconds for seconds in clock.read()]


def _calls(rounds: int = 20_000) -> float:
    """Return the nanoseconds of one cudaMalloc with its cudaFree, through ctypes."""
    behind = native_library()
    take, give = behind.cudaMalloc, behind.cudaFree
    take.argtypes, give.argtypes = [ctypes.c_void_p, ctypes.c_size_t], [ctypes.c_void_p]
    block = ctypes.c_uint64()
    at = ctypes.addressof(block)
    clock = Clock()
    for _ in range(rounds):
        take(at, 2 * MIB)
        give(block.value)
    return 1e9 * clock.read()[1] / rounds


def accounting_table(passes: int) -> str:
    """Run the second part in a process of its own and return its table."""
    command = [sys.executable, __file__, "--accounting", "--passes", str(passes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    rows: list[list[str]] = []
    verdicts: dict[str, float] = {}
    for heat in ("cold", "warm"):
        on, off = found["times"][f"{heat} on"], found["times"][f"{heat} off"]
        for state, values in (("on", on), ("off", off)):
            wall, cpu = (statistics.median(it[index] for it in values) for index in (0, 1))
            counts = found["counts"][f"{heat} {state}"]
            rows.append([heat, state, f"{wall:.1f}", f"{cpu:.2f}", *map(str, counts)])
        percent = 100 * statistics.median(a[1] / b[1] - 1 for a, b in zip(on, off, strict=True))
        verdicts[heat] = percent
    mallocs = found["counts"]["cold on"][0]
    busy = statistics.median(it[1] for it in found["times"]["cold on"])
    bound = 100 * mallocs * found["calls"] / 1e6 / busy
    headers = ["cache", "accounting", "wall ms", "CPU ms", "mallocs", "frees", "launches"]
    worst = max(verdicts.values())
    lines = [
        f"The native accounting: two steps, medians of {passes} passes by turns; the counts are",
        "what the native library saw in one pass",
        "",
        tabulate(rows, headers, disable_numparse=True, colalign=("left", "left", *["right"] * 5)),
        "",
        "accounting on against off, CPU time, medians of pairs: "
        + ", ".join(f"{heat} {percent:+.1f} %" for heat, percent in verdicts.items()),
        (
            f"{mallocs} cudaMallocs, each {found['calls']:.0f} ns with its cudaFree "
            "(through ctypes), are "
            f"{bound:.2f} % of a cold pass"
        ),
        f"goal, at most {GOAL_PERCENT} %: {'met' if worst <= GOAL_PERCENT else 'missed'}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run both parts, print and keep them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--passes", type=int, default=60)
    parser.add_argument("--accounting", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.accounting:
        print(json.dumps(accounting(options.passes)))
        return
    text = [
        f"ResNet-50, batch {BATCH}, fp32, Adam (foreach), {STEPS} steps, on the virtual {CARD}",
        line("torchvision", "pytest-gpumem"),
        machine_speed(),
        "",
        compare(options.repeats),
        "",
        accounting_table(options.passes),
    ]
    publish("speed_resnet", "\n".join(text))


if __name__ == "__main__":
    main()
