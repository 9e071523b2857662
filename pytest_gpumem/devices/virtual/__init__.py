"""The facade of the virtual GPU: PyTorch over a native library that counts allocated bytes.

Other packages of pytest_gpumem ("rooms" in docs/architecture.md) import nothing below this module:
import-linter checks it. The virtual GPU itself imports devices and base modules. The facade
promises:

- Importing this module loads no library and none of the package's other modules, so that it costs a
  session on a real GPU nothing.
- ``load``, before torch is imported, gives the process a :class:`pytest_gpumem.devices.base.Device`
  that PyTorch treats as an NVIDIA GPU. Bytes are counted as PyTorch's own CUDA code requests them.
- The device is visible between its ``open`` and ``close``, or always after ``show_always``.
- Processes that are started while the device is visible have the same virtual GPU
  (``begin_in_child``).
- ``Device.trouble`` names a call of CUDA that is not supported. ``Device.alternatives`` and
  ``Device.notes`` list why a real GPU's figures may differ.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.devices.virtual.decisions import Row
    from pytest_gpumem.devices.virtual.device import VirtualDevice
    from pytest_gpumem.devices.virtual.inherited import InheritedGpu

    GuessRows = Sequence[Sequence[Row]]
    """two lists with one row per source line: the unknown values that a process branched on there,
    and the assumed values"""

INHERITED: Final = "GPUMEM_VIRTUAL"
"""environment variable that describes the virtual GPU to child processes, which see no driver"""
VALUES: Final = "GPUMEM_VALUES"
"""environment variable that selects the values that child processes compute ("auto", "full",
"off")"""


@functools.cache
def uncaptured_stderr() -> int:
    """Return a copy of standard error's file descriptor, made by this process's first call.

    pytest redirects standard error later. Messages must still reach the terminal when a native
    library ends the process or a call is refused.
    """
    try:
        return os.dup(2)
    except OSError:  # standard error is closed, as in a daemon
        return 2


def load(card: Card | str) -> VirtualDevice:
    """Return the virtual GPU, which the first call in a process loads.

    Args:
        card: the default card, or its name.

    Raises:
        SpecError: no card has this name.
        DeviceError: the virtual GPU cannot be loaded here, or torch is already imported.
    """
    from pytest_gpumem.devices.cards import find_card
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    return VirtualDevice.load(find_card(card) if isinstance(card, str) else card)


def loaded() -> VirtualDevice | None:
    """Return this process's virtual GPU; None before one is loaded."""
    module: Any = sys.modules.get(f"{__name__}.device")
    device: VirtualDevice | None = module and module.VirtualDevice.loaded()
    return device


def begin_in_child() -> InheritedGpu | None:
    """Set up this process for its parent's virtual GPU before torch is imported.

    The result is None if the parent has no virtual GPU.
    """
    if INHERITED not in os.environ:
        return None
    from pytest_gpumem.devices.virtual.inherited import InheritedGpu

    return InheritedGpu()


def prepare_many_cards() -> None:
    """Disable PyTorch's cache of cuDNN plans, because a plan is made for one card.

    PyTorch reads the cache's limit at the first convolution, so call this earlier.
    """
    from pytest_gpumem.devices.virtual.cudnn_notes import keep_no_plans

    keep_no_plans()


def unused_cause(path: Path, root: Path) -> str:
    """Return a clause on why a test may have used no memory; "" if no cause is known.

    Args:
        path: the test's file.
        root: the project's folder.
    """
    from pytest_gpumem.devices.virtual.quirks import CPU_LIBRARY, has_cpu_library

    device = loaded()
    if has_cpu_library():
        return CPU_LIBRARY
    if device is None or device.shown_always:
        return ""
    question = device.lookup_of(path, root)
    if question is None:
        return (
            "; if a file calls torch.cuda.is_available() at its top, the answer is False, because "
            "the virtual GPU is visible only in marked tests: --gpumem-visible=session shows it "
            "from the start"
        )
    return (
        f"; the virtual GPU is visible only in marked tests, and {question.place(root)} looked for "
        "GPUs during its import: --gpumem-visible=session shows the virtual GPU from the start"
    )


class Status(NamedTuple):
    """Whether a virtual GPU works on this machine."""

    problem: str = ""
    """why the libraries were not built, with the remedy; "" if they were"""
    cudnn: int = 0
    """version of the cuDNN that was found (92600 is 9.26.0); 0 if none was"""
    computes_workspaces: bool = False
    """whether that cuDNN can compute workspaces without a GPU"""
    stubs: Sequence[str] = ()
    """SONAMEs of the CUDA libraries that are not installed"""
    linked: tuple[int, Sequence[str]] = (0, ())
    """number of CUDA functions that torch links, and the names of those not implemented"""


def status() -> Status:
    """Run a convolution on the virtual GPU, and return whether it works in this process.

    The process must not have imported torch.

    Raises:
        DeviceError: the virtual GPU cannot be loaded here.
    """
    from pytest_gpumem.devices.virtual.cudnn_notes import MIN_CUDNN
    from pytest_gpumem.devices.virtual.native import build_problem

    problem = build_problem()
    if problem is not None:
        return Status(f"{problem.problem}; {problem.remedy}")
    device = load("T4")
    device.show_always(1)
    import torch

    images = torch.empty(1, 3, 8, 8, device="cuda")
    torch.nn.functional.conv2d(images, torch.empty(4, 3, 3, 3, device="cuda"))
    cudnn = device.library.cudnn_found()  # the first convolution loads it
    return Status("", cudnn, cudnn >= MIN_CUDNN, device.stubs, device.linked_functions())
