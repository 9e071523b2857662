"""What a report says of cuDNN's convolutions, whose workspaces are cuDNN's own choice."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.virtual.library import Convolutions
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from pytest_gpumem.devices.virtual.library import NativeLibrary

LEAST_CUDNN: Final = 90800
"""the first cuDNN that plans for a device that is not there, by its release notes"""

PLAN: Final = 512
"""bytes that a convolution's workspace had beyond copies of its tensors, in each of the six that
benchmarks/data/measured-workspaces.csv has of real GPUs"""

LIBRARY: Final = "GPUMEM_CUDNN"
"""the environment variable that names another cuDNN to ask"""

PLANS_KEPT: Final = "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT"
"""of PyTorch ("CUDA Environment Variables" in its documentation); it is read at the first
convolution of a process"""


def keep_no_plans() -> None:
    """Let PyTorch ask cuDNN anew at each convolution of this process, unless somebody said what.

    It keeps a plan, and the size of its workspace, by shapes and device index: one that was made
    for a card would be taken for the next. Each convolution is a fraction of a millisecond slower.
    """
    os.environ.setdefault(PLANS_KEPT, "-1")


class ConvolutionWatch:
    """Watches the convolutions of one measured test."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._before = Convolutions()
        self._largest = 0

    def begin(self) -> None:
        """Count from now on."""
        self._before = self._library.convolutions()
        self._library.largest_convolution()  # asking forgets it
        self._largest = 0

    def notes(self) -> list[str]:
        """Return what a reader of the figures has to know of the convolutions that ran."""
        ran = self._library.convolutions() - self._before
        said = []
        if ran.unknown:
            self._largest = max(self._largest, self._library.largest_convolution())
            said.append(
                f"{self._why_unknown()}, which are not in a prediction: where they were measured, "
                "they were copies of a convolution's tensors, here "
                f"{format_size(self._largest + PLAN)} or less"
            )
        if ran.astray:
            said.append(
                "cuDNN's plans ran with workspaces that it chose for another card, since PyTorch "
                "keeps them for the life of a process: run each card's tests in one of its own"
            )
        torch = sys.modules.get("torch")
        if ran.asked and os.environ.get(LIBRARY):
            said.append(
                f"cuDNN {self._found()} ({LIBRARY}) was asked for its workspaces: another than "
                "torch's may have others"
            )
        if ran.asked and torch is not None and torch.backends.cudnn.benchmark:
            said.append(
                "torch.backends.cudnn.benchmark is on: which of cuDNN's plans is the fastest is "
                "not known here, the one that its heuristics rank first is taken"
            )
        return said

    def _why_unknown(self) -> str:
        found = self._library.cudnn_found()
        if not found:
            return "cuDNN was not asked for its workspaces"
        if found < LEAST_CUDNN:
            return f"cuDNN {self._found()} cannot be asked for its workspaces (9.8 and later can)"
        return "cuDNN cannot be asked for the workspaces of some convolutions that ran"

    def _found(self) -> str:
        version = self._library.cudnn_found()
        return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
