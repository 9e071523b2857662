"""The versions and settings that measurements are made with."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

from pytest_gpumem.devices import driver
from pytest_gpumem.measurement import Provenance

if TYPE_CHECKING:
    from pytest_gpumem.measurement import DeviceInfo


def provenance(info: DeviceInfo) -> Provenance:
    """Return the versions and the allocator settings of this process."""
    import torch

    return Provenance(
        torch=str(torch.__version__),
        cuda=f"HIP {torch.version.hip}" if torch.version.hip else str(torch.version.cuda),
        cudnn=cudnn_version(),
        driver=driver.version(info.kind),
        allocator=os.environ.get(
            "PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        ),
    )


@cache
def cudnn_version() -> str:
    """Return cuDNN's version, "none" where PyTorch can use none; a slow question, asked once."""
    from torch.backends import cudnn

    try:
        return str((cudnn.version() if cudnn.is_available() else None) or "none")
    except RuntimeError:  # the GPU is older than this cuDNN supports, or the libraries differ
        return "none"
