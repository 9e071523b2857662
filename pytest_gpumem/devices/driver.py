"""NVIDIA's driver of this machine, asked through its libraries: some sandboxes have no files of it.

CUDA begins once a process: it reads CUDA_VISIBLE_DEVICES then, and lets no later fork use a GPU.
Its library would also keep the name that the virtual GPU's needs. So another process asks it.

This file is that process's program as well: it prints the names of the GPUs, and ends with status 1
where there is none. It imports nothing else of this package.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

LIBRARY: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
NVML: Final = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
NO_GPU: Final = (3, 34, 100)
"""what cuInit returns where there is no GPU (cuda.h, CUresult): CUDA_ERROR_NOT_INITIALIZED and
CUDA_ERROR_STUB_LIBRARY are of libraries without a driver, CUDA_ERROR_NO_DEVICE is a driver's"""
SLOW_S: Final = 60
"""seconds that a driver may take to begin"""


class VisibleGpus(NamedTuple):
    """The GPUs that the driver shows."""

    expected: bool = False
    """whether one was found. A driver that cannot begin counts: PyTorch then names the error"""
    names: tuple[str, ...] = ()
    """the name of each, in hexadecimal digits"""


def visible_gpus(environment: Mapping[str, str] = os.environ) -> VisibleGpus:
    """Return the GPUs that CUDA shows in an environment; its CUDA_VISIBLE_DEVICES may hide some."""
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-S", __file__],
            env=dict(environment),
            capture_output=True,
            timeout=SLOW_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return VisibleGpus(expected=True)
    except OSError:  # Python cannot be started
        return VisibleGpus()
    names = process.stdout.decode("ascii", "replace").split()
    return VisibleGpus(process.returncode != 1, tuple(names))


def version(kind: str = "cuda") -> str:
    """Return the driver's version of a kind of device, "unknown" where it cannot be read."""
    import torch

    if kind == "virtual":
        return kind
    if not torch.version.hip:
        return nvidia_version()
    try:
        return Path("/sys/module/amdgpu/version").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return "unknown"


def nvidia_version() -> str:
    """Return the version of NVIDIA's driver ("580.159.03"), "unknown" where NVML tells none.

    nvml.h: nvmlInit_v2(void), nvmlSystemGetDriverVersion(char *, unsigned), nvmlShutdown(void).
    """
    text = ctypes.create_string_buffer(80)  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
    try:
        nvml = ctypes.CDLL(NVML)
        if nvml.nvmlInit_v2() == 0:
            nvml.nvmlSystemGetDriverVersion(text, len(text))
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        pass
    return text.value.decode("ascii", "replace") or "unknown"


def _write_names() -> bool:
    """Write the GPUs' names, one a line in hexadecimal digits; return whether there is a GPU.

    cuda.h: cuInit(unsigned), cuDeviceGetCount(int *), cuDeviceGet(CUdevice *, int),
    cuDeviceGetName(char *, int, CUdevice).
    """
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    number, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    status = cuda.cuInit(0)
    if status != 0:
        return status not in NO_GPU
    cuda.cuDeviceGetCount(ctypes.byref(number))
    for index in range(number.value):
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, len(name), device)
        sys.stdout.write(f"{name.value.hex()}\n")
    return number.value > 0


if __name__ == "__main__":
    sys.exit(0 if _write_names() else 1)


def import_nvml() -> Any:  # noqa: ANN401 - a module without types
    """Return the module; None where it is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the deprecated package pynvml warns when imported
        try:
            return importlib.import_module("pynvml")
        except ImportError:
            return None
