"""Which GPU comes first in each of pytest-xdist's workers, so that they run side by side.

A worker's ``CUDA_VISIBLE_DEVICES`` is rotated: of GPUs 0, 1, 2 worker gw1 sees 1, 2, 0. Its tests'
``cuda:0`` is another GPU than the other workers', and a test that asks for several has them all the
same. Where two workers share a GPU, its lock keeps their steps apart.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.torch_build import torch_is_imported

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
SLOW_S: Final = 60
"""seconds that a driver may take to begin"""

# cuda.h: CUresult cuInit(unsigned int), cuDeviceGetCount(int *), cuDeviceGet(CUdevice *, int),
# cuDeviceGetName(char *, int, CUdevice). CUDA reads the variable when it begins, once a process,
# and knows the meaning of a list (order, MIG, invalid entries): another process asks it.
LIST_GPUS: Final = """
import ctypes, sys
cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
number, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(number)) == 0:
    for index in range(number.value):
        assert cuda.cuDeviceGet(ctypes.byref(device), index) == 0
        assert cuda.cuDeviceGetName(name, len(name), device) == 0
        print(name.value.hex())
"""


def take_turns(worker: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Rotate the list of visible GPUs by the worker's number; nothing after torch's import.

    Args:
        worker: pytest-xdist's name of it, "gw1".
        environment: the variables with the list, which is changed in place.
    """
    number = re.search(r"\d+", worker)
    several = "," in environment.get(VISIBLE, ",")  # where it is unset, all GPUs are visible
    if number is None or torch_is_imported() or not several:
        return
    turned = turn(environment.get(VISIBLE), names(environment), int(number[0]))
    if turned is not None:
        environment[VISIBLE] = turned


def turn(visible: str | None, gpus: Sequence[str], by: int) -> str | None:
    """Return the list of visible GPUs with another one first, None where there is none.

    GPUs of another name than the first's keep their places: baselines are of a GPU's name, and
    chance decides which worker runs a test.

    Args:
        visible: ``CUDA_VISIBLE_DEVICES``: numbers, UUIDs or names of MIG instances; None: all.
        gpus: the name of each that CUDA sees with that.
        by: how many places.
    """
    entries = list(map(str, range(len(gpus)))) if visible is None else visible.split(",")
    entries = [entry.strip() for entry in entries][: len(gpus)]  # CUDA stops at an invalid entry
    if len(entries) < len(gpus):
        return None
    alike = [i for i, name in enumerate(gpus) if name == gpus[0]]
    if len(alike) < 2:  # noqa: PLR2004 - one alone has no other place
        return None
    by %= len(alike)
    order = dict(zip(alike, alike[by:] + alike[:by], strict=True))
    return ",".join(entries[order.get(i, i)] for i in range(len(entries)))


def names(environment: Mapping[str, str]) -> list[str]:
    """Return the name of each GPU that CUDA sees, none where asking fails."""
    command = [sys.executable, "-I", "-c", LIST_GPUS]
    try:
        process = subprocess.run(
            command, env=dict(environment), capture_output=True, timeout=SLOW_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return process.stdout.decode("ascii", "replace").split()
