"""Queries NVIDIA's driver by calling its libraries, as some sandboxes lack files in /dev and /proc.

A process initializes the driver (cuInit) only once: from then on CUDA_VISIBLE_DEVICES is fixed, and
processes that it forks cannot use a GPU. Once loaded, the driver's library would also occupy the
SONAME that the virtual GPU's library needs. So a separate process makes the query.

This file is also that process's program: it prints the names of the GPUs, and ends with status 1 if
there are none. It imports nothing else from this package.
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
"""results of cuInit if there is no GPU (CUresult in cuda.h): CUDA_ERROR_NOT_INITIALIZED and
CUDA_ERROR_STUB_LIBRARY come from libraries without a driver, CUDA_ERROR_NO_DEVICE from a driver"""
SLOW_S: Final = 60
"""seconds that the driver may take to initialize"""


class VisibleGpus(NamedTuple):
    """The GPUs that the driver reported to a separate process."""

    expected: bool = False
    """whether a GPU was found, or the driver failed or took too long to initialize: then PyTorch is
    to report the error"""
    names: tuple[str, ...] = ()
    """the GPUs' names, hex-encoded"""


def visible_gpus(environment: Mapping[str, str] = os.environ) -> VisibleGpus:
    """Return the GPUs visible to CUDA in this environment: CUDA_VISIBLE_DEVICES may hide some."""
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
    except OSError:  # Python does not start
        return VisibleGpus()
    names = process.stdout.decode("ascii", "replace").split()
    return VisibleGpus(process.returncode != 1, tuple(names))


def version(kind: str = "cuda") -> str:
    """Return the version of a device's driver, or "unknown"; "virtual" for the virtual GPU."""
    import torch

    if kind == "virtual":
        return kind
    if kind != "cuda":
        return "unknown"
    if not torch.version.hip:
        return nvidia_version()
    try:
        return Path("/sys/module/amdgpu/version").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return "unknown"


def nvidia_version() -> str:
    """Return the version of NVIDIA's driver ("580.159.03"), "unknown" if NVML reports none.

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
    """Print the GPUs' names hex-encoded, one per line; return whether there is a GPU.

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
    """Import and return NVML's module; None if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the deprecated package pynvml warns when imported
        try:
            return importlib.import_module("pynvml")
        except ImportError:
            return None
