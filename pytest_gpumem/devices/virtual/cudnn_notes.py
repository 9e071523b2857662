"""A report's notes on cuDNN's convolutions, whose workspaces are cuDNN's own choice."""

from __future__ import annotations

import os
from operator import sub
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.virtual.library import Convolutions, SizeCounts
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from pytest_gpumem.devices.virtual.library import NativeLibrary

MIN_CUDNN: Final = 90800
"""the first cuDNN that plans for a device that the machine has not, by its release notes"""

MARGIN: Final = 25
"""percent: in benchmarks/results/convolution_ranges.txt a real GPU reserved at most 21 % more than
the virtual one with any workspaces that a convolution was seen to take, and in benchmark mode 19 %
more than with the largest plans or the least (benchmarks/results/published_segmentary.txt)"""

NEAREST: Final = "9.19.0"
"""of five that were asked in the place of older ones, the nearest to published figures
(benchmarks/results/published_cudnn.txt)"""

LIBRARY: Final = "GPUMEM_CUDNN"
"""the environment variable that names another cuDNN to ask"""

PLANS_KEPT: Final = "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT"
"""of PyTorch ("CUDA Environment Variables" in its documentation); it is read at the first
convolution of a process"""


def keep_no_plans() -> None:
    """Let PyTorch ask cuDNN anew at each convolution of this process, unless the variable is set.

    PyTorch keeps a plan, and the size of its workspace, by shapes and device index: the plan of one
    card would be taken for the next. Each convolution is a fraction of a millisecond slower.
    """
    os.environ.setdefault(PLANS_KEPT, "-1")


class ConvolutionWatch:
    """Watches the convolutions of one measured test."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._start = Convolutions()
        self._sizes_at_start = SizeCounts()
        self._largest = 0
        self._can_be_asked = False
        self.missing_package = ""
        """the package to install where cuDNN is not installed"""

    def set_version(self, version: int) -> None:
        """Set the version of the cuDNN that PyTorch was compiled for (90100 is 9.1.0)."""
        self._can_be_asked = version >= MIN_CUDNN

    def begin(self) -> None:
        """Count from now on."""
        if not self._can_be_asked or os.environ.get(LIBRARY):
            keep_no_plans()  # the test runs again with workspaces of another size
        self._start = self._library.convolutions()
        self._sizes_at_start = self._library.size_counts()
        self._library.largest_convolution()  # asking forgets it
        self._largest = 0

    def size_counts(self) -> SizeCounts:
        """Return how many sizes were not known, of cuDNN and of every library."""
        return SizeCounts(*map(sub, self._library.size_counts(), self._sizes_at_start))

    def counts(self) -> Convolutions:
        """Return how often cuDNN's plans ran."""
        return Convolutions(*map(sub, self._library.convolutions(), self._start))

    def range_reason(self) -> str:
        """Return the choice of cuDNN's that is not known, of workspaces that lie in a range."""
        version = self._library.cudnn_found()
        if not version:
            return "the workspaces of convolutions, which cuDNN did not compute"
        if version < MIN_CUDNN:
            return (
                f"the workspaces of convolutions, which cuDNN {self._version()} cannot compute here"
            )
        return (
            f"the workspaces of convolutions, which cuDNN {self._version()} computed in "
            "place of torch's own version"
        )

    def notes(self) -> list[str]:
        """Return sentences that a reader of the figures has to know about the convolutions."""
        ran = self.counts()
        sentences = []
        if ran.unknown:
            self._largest = max(self._largest, self._library.largest_convolution())
            version = self._library.cudnn_found()
            if not version and self.missing_package and not os.environ.get(LIBRARY):
                reason = (
                    "cuDNN is not installed (pip install --no-deps "
                    f"{self.missing_package}) and did not compute the workspaces of "
                    "convolutions"
                )
            elif not version:
                reason = "cuDNN did not compute the workspaces of convolutions"
            elif version < MIN_CUDNN:
                reason = (
                    f"cuDNN {self._version()} cannot compute the workspaces of "
                    f"convolutions here (9.8 and later can; {NEAREST}, named in {LIBRARY}, "
                    "was nearest to published runs)"
                )
            else:
                reason = "cuDNN could not compute the workspaces of some convolutions"
            sentences.append(
                f"{reason}, so a prediction does not include these workspaces: on real "
                "GPUs they were copies of a convolution's tensors and partial sums of its "
                f"result, here {format_size(self._largest)} or less"
            )
        if ran.astray:
            sentences.append(
                "cuDNN's plans ran with workspaces for another card, because PyTorch keeps "
                "plans for the life of a process: run the tests of each card in a separate "
                "process"
            )
        if ran.asked and os.environ.get(LIBRARY):
            sentences.append(
                f"cuDNN {self._version()} ({LIBRARY}) computed the workspaces of "
                "convolutions: torch's own version may use other sizes"
            )
        if self.size_counts().choices:
            sentences.append(
                "torch.backends.cudnn.benchmark is on: the fastest cuDNN plan is unknown "
                "here, so the plan with the largest workspace is used"
            )
        return sentences

    def _version(self) -> str:
        version = self._library.cudnn_found()
        return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
