"""Initialising CUDA once a process: after an error PyTorch's next try would end the process."""

from __future__ import annotations

import os
from typing import Final

from pytest_gpumem.errors import DeviceError

SETTINGS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""variables with settings of PyTorch's allocator, which are read when CUDA is initialised"""

_failures: list[DeviceError] = []
"""the error of this process's only try, where it failed"""


def start_cuda() -> None:
    """Initialise CUDA, unless that is done.

    Raises:
        DeviceError: it failed, now or before; another try might end the process.
    """
    import torch

    for failure in _failures:
        raise DeviceError(failure.given, failure.problem, failure.remedy) from failure.__cause__
    try:
        torch.cuda.init()
    except Exception as error:
        failure = _failure(error)
        failure.__cause__ = error.with_traceback(None)
        _failures.append(failure)
        raise failure from error


def _failure(error: Exception) -> DeviceError:
    """Return the error to raise; a setting that PyTorch cannot parse is named."""
    message = f"{type(error).__name__}: {error}"
    setting = next((f"{name}={os.environ[name]}" for name in SETTINGS if os.environ.get(name)), "")
    if not setting:
        return DeviceError(
            "the CUDA device",
            f"PyTorch cannot initialise CUDA ({message})",
            'check whether python -c "import torch; torch.cuda.init()" works in this environment',
        )
    return DeviceError(
        setting,
        f"PyTorch cannot initialise CUDA with these allocator settings ({message})",
        "correct or unset the variable; write a setting like max_split_size_mb:128",
    )
