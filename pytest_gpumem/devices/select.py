"""Which device a session's steps run on: decided before torch is imported, once a process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.devices.virtual.device import VirtualDevice, real_gpu_expected
from pytest_gpumem.devices.xdist_order import take_turns
from pytest_gpumem.errors import DeviceError

if TYPE_CHECKING:
    from pytest_gpumem.devices.base import Device
    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.torchrun_env import Rank

WANTED: Final = ("auto", "cuda", "virtual", "none")
DEFAULT_CARD: Final = "H100"
"""what the virtual GPU is where nobody says"""


@dataclass(frozen=True)
class Choice:
    """What marked tests will find."""

    device: Device | None
    reason: str = ""
    """why there is no device"""
    demanded: bool = False
    """the device was asked for by name: its absence is an error, not a reason to skip"""


def choose(wanted: str, card: Card, *, worker: str = "", rank: Rank | None = None) -> Choice:
    """Choose by ``--gpumem-device``; loads the virtual GPU where it is the one.

    Args:
        wanted: one of ``WANTED``.
        card: what the virtual GPU is to be.
        worker: the name of this process among those of the session ("gw1"), which share the
            machine's GPUs; "": it is alone.
        rank: which of torchrun's this process is: its device is the one of that number.
    """
    first = rank.local_rank if rank else 0
    if wanted == "none":
        return Choice(None, "switched off by --gpumem-device=none")
    if wanted == "cuda" or (wanted == "auto" and real_gpu_expected()):
        take_turns(worker)
        return Choice(CudaDevice(shared=bool(worker), first=first), demanded=True)
    try:
        device = VirtualDevice.load(card)
        device.first, device.least = first, rank.local_size if rank else 1
        return Choice(device)
    except DeviceError as error:
        if wanted == "virtual":
            return Choice(None, str(error), demanded=True)
        return Choice(None, f"there is no GPU here, and no virtual one: {error}")
