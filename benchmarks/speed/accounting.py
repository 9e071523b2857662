"""What the native library's accounting costs: training steps with it and without, by turns.

A small library in front of the native one, compiled here, has a switch. On: each call goes on to
the native library. Off: cudaMalloc hands out addresses of one block taken beforehand, cudaFree and
the kernel launches do nothing, and so nothing is charged, looked for, locked or counted.
speed_resnet.py runs this in a process of its own, and shows it.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Clock
from benchmarks.speed.resnet_steps import CARD, Task, steps, task

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 2 << 20
"""bytes: the unit in which cudaMalloc takes memory from a device"""
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
    from pytest_gpumem.devices.virtual import native

    return ctypes.CDLL(str(native.LIBRARY))


def give_arena(gate: ctypes.CDLL) -> None:
    """Give the switch the addresses that it hands out."""
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    VirtualDevice.loaded().library.make_room(0, ARENA)
    block, size = ctypes.c_uint64(), ctypes.c_size_t(ARENA)
    assert native_library().cudaMalloc(ctypes.byref(block), size) == 0
    gate.switch_arena(block, size)


def accounting(passes: int) -> dict[str, object]:
    """Time passes of the steps, accounting on and off; return milliseconds and counts."""
    from pytest_gpumem.devices.virtual.device import VirtualDevice
    from pytest_gpumem.meter.block import use_virtual_gpu

    with switch() as gate:
        behind = native_library()
        names = ("cudaMalloc", "cudaFree", "cudaLaunchKernel", "__cudaLaunchKernel")
        gate.switch_set(*(ctypes.cast(behind[name], ctypes.c_void_p) for name in names))
        use_virtual_gpu(CARD, values="off")
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
        take(at, BLOCK)
        give(block.value)
    return 1e9 * clock.read()[1] / rounds
