"""Chooses the device that a session's steps run on, once per process, before torch's import."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices import virtual
from pytest_gpumem.devices.accelerator import (
    OPTION,
    Accelerator,
    AcceleratorDevice,
    accelerator_expected,
    query_accelerator,
)
from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.devices.cuda_graphs import GRAPHS
from pytest_gpumem.devices.driver import visible_gpus
from pytest_gpumem.devices.torch_build import installed_torch
from pytest_gpumem.devices.xdist_order import take_turns
from pytest_gpumem.errors import DeviceError

if TYPE_CHECKING:
    from pytest_gpumem.devices.base import Device
    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.torchrun_env import TorchrunRank

RUN_DEVICE: Final = "GPUMEM_RUN_DEVICE"
RUN_CARD: Final = "GPUMEM_RUN_CARD"
"""variables by which ``gpumem run`` passes its device and card to pytest sessions in its program"""
DEFAULT_CARD: Final = "H100"
"""the virtual GPU's card if none is named"""
AMD_FILE: Final = Path("/dev/kfd")
"""device file of AMD's driver (ROCm's documentation on containers)"""


@dataclass(frozen=True)
class Choice:
    """The device that marked tests run on."""

    device: Device | None
    reason: str = ""
    """why there is no device; "" if there is one"""
    demanded: bool = False
    """whether marked tests fail, instead of being skipped, if the device is missing, because it was
    requested by name"""

    @property
    def card(self) -> Card | None:
        """The virtual GPU's card for tests that name none; None on a real GPU."""
        loaded = virtual.loaded()
        return loaded.card if loaded is not None and loaded is self.device else None


def choose(kind: str, card: Card, *, worker: str = "", rank: TorchrunRank | None = None) -> Choice:
    """Choose the device for ``--gpumem-device``, and load the virtual GPU if it is chosen.

    Args:
        kind: "auto", "cuda", "accelerator", "virtual" or "none".
        card: the virtual GPU's card.
        worker: pytest-xdist's name of this worker, such as "gw1", which shares the machine's GPUs
            with the others; "" outside of workers.
        rank: this process's torchrun rank, whose local rank is the index of its device.
    """
    first = rank.local_rank if rank else 0
    if kind == "none":
        return Choice(None, "switched off by --gpumem-device=none")
    GRAPHS.watch()
    loaded = virtual.loaded()
    named = loaded is not None and loaded.named is not None  # use_virtual_gpu() was called
    if kind == "cuda" or (kind == "auto" and not named and real_gpu_expected()):
        take_turns(worker)
        return Choice(CudaDevice(shared=bool(worker), first=first), demanded=True)
    asks = kind == "auto" and not named and not is_inherited() and accelerator_expected()
    found = query_accelerator() if asks else None
    if kind == OPTION or isinstance(found, Accelerator):
        return Choice(AcceleratorDevice(found, shared=bool(worker), first=first), demanded=True)
    try:
        device = virtual.load(card)
        device.first, device.least = first, rank.local_size if rank else 1
        return Choice(device)
    except DeviceError as error:
        if kind == "virtual":
            return Choice(None, str(error), demanded=True)
        other = f" ({found})" if found else ""
        return Choice(None, f"there is no GPU here{other}, and no virtual GPU: {error}")


def device_of_program() -> tuple[Device, int]:
    """Return the device that this program's own code uses, and how many of its kind it can see.

    If there is a CUDA device, CUDA is initialized: at that moment ``gpumem run`` begins to measure.
    """
    import torch

    visible = torch.cuda.device_count()
    if visible:
        torch.cuda.init()
    elif torch.accelerator.is_available():
        return AcceleratorDevice(), torch.accelerator.device_count()
    return virtual.loaded() or CudaDevice(), visible


def is_inherited() -> bool:
    """Return whether a marked test, or gpumem run, started this process on its virtual GPU."""
    return virtual.INHERITED in os.environ


def real_gpu_expected(amd_file: Path = AMD_FILE) -> bool:
    """Return whether this machine has a GPU for the installed torch, and does not hide it.

    A ROCm build of torch needs a GPU of AMD's, any other build one of NVIDIA's.
    """
    if is_inherited():
        return False  # child processes on the virtual GPU see no driver
    # HIP reads CUDA's variable too (ROCm's documentation, "GPU isolation techniques").
    variables = ["CUDA_VISIBLE_DEVICES"]
    amd = False
    if amd_file.exists():
        # The search for torch may load the virtual GPU, so it runs only with AMD's driver.
        build = installed_torch()
        amd = build is not None and build.hip is not None
        variables += ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"] if amd else []
    if any(os.environ.get(name, "0").strip() in {"", "-1"} for name in variables):
        return False
    return amd or visible_gpus().expected
