"""Which device a session's steps run on: decided before torch is imported, once a process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.devices.sharing.xdist_order import take_turns
from pytest_gpumem.devices.virtual.device import VirtualDevice, real_gpu_expected
from pytest_gpumem.errors import DeviceError

if TYPE_CHECKING:
    from pytest_gpumem.devices.base import Device
    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.torchrun_env import TorchrunRank

RUN_DEVICE: Final = "GPUMEM_RUN_DEVICE"
RUN_CARD: Final = "GPUMEM_RUN_CARD"
"""variables by which ``gpumem run`` hands its device and card to pytest sessions in its program"""
DEFAULT_CARD: Final = "H100"
"""the virtual GPU's card where none is named"""


@dataclass(frozen=True)
class Choice:
    """The device that marked tests run on."""

    device: Device | None
    reason: str = ""
    """the reason for having no device"""
    demanded: bool = False
    """the device was asked for by name: its absence is an error, not a reason to skip"""


def choose(kind: str, card: Card, *, worker: str = "", rank: TorchrunRank | None = None) -> Choice:
    """Choose by ``--gpumem-device``; load the virtual GPU if it is chosen.

    Args:
        kind: "auto", "cuda", "virtual" or "none".
        card: the virtual GPU's card.
        worker: the name of this process among those of the session ("gw1"), which share the
            machine's GPUs; "": it is alone.
        rank: this process's rank, of torchrun: its device is the one of that number.
    """
    first = rank.local_rank if rank else 0
    if kind == "none":
        return Choice(None, "switched off by --gpumem-device=none")
    loaded = VirtualDevice.loaded()
    named = loaded is not None and loaded.named is not None  # by use_virtual_gpu()
    if kind == "cuda" or (kind == "auto" and real_gpu_expected() and not named):
        take_turns(worker)
        return Choice(CudaDevice(shared=bool(worker), first=first), demanded=True)
    try:
        device = VirtualDevice.load(card)
        device.first, device.least = first, rank.local_size if rank else 1
        return Choice(device)
    except DeviceError as error:
        if kind == "virtual":
            return Choice(None, str(error), demanded=True)
        return Choice(None, f"there is no GPU here, and no virtual GPU: {error}")
