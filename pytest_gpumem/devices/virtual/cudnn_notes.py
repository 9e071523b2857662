"""Notes on convolutions, whose workspace sizes cuDNN chooses."""

from __future__ import annotations

import os
from operator import sub
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.virtual.library import Convolutions, SizeCounts
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from pytest_gpumem.devices.virtual.library import NativeLibrary

MIN_CUDNN: Final = 90800
"""first version of cuDNN that can plan for a device that the machine lacks (its release notes)"""

CUDNN_MARGIN: Final = 25
"""percent by which a real GPU may reserve more than the upper end of the range: in benchmark mode
an L40S reserved up to 19 % more (benchmarks/results/published_segmentary.txt)"""

NEAREST: Final = "9.19.0"
"""version of cuDNN whose figures were nearest to published ones, among five versions tried in place
of older ones (benchmarks/results/published_cudnn.txt)"""

LIBRARY: Final = "GPUMEM_CUDNN"
"""environment variable with the path of another cuDNN to use"""

PLANS_KEPT: Final = "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT"
"""environment variable that limits PyTorch's cache of plans ("CUDA Environment Variables" in its
documentation); PyTorch reads it at the first convolution of a process"""


def keep_no_plans() -> None:
    """Disable PyTorch's cache of cuDNN plans in this process, unless the user has set its limit.

    PyTorch caches a plan, and its workspace size, by shapes and device index: the next card would
    reuse the previous card's plan. Each convolution becomes a fraction of a millisecond slower.
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
        """name of the package that contains cuDNN; "" if cuDNN is installed"""

    def set_version(self, version: int) -> None:
        """Set the version of the cuDNN that PyTorch was compiled for (90100 is 9.1.0)."""
        self._can_be_asked = version >= MIN_CUDNN

    def begin(self) -> None:
        """Start counting."""
        if not self._can_be_asked or os.environ.get(LIBRARY):
            keep_no_plans()  # a second run with other workspace sizes needs new plans
        self._start = self._library.convolutions()
        self._sizes_at_start = self._library.size_counts()
        self._library.largest_convolution()  # reading resets it
        self._largest = 0

    def size_counts(self) -> SizeCounts:
        """Return how many workspace sizes of all libraries were unknown since ``begin``."""
        return SizeCounts(*map(sub, self._library.size_counts(), self._sizes_at_start))

    def plan_counts(self) -> Convolutions:
        """Return how often cuDNN's plans have run since ``begin``."""
        return Convolutions(*map(sub, self._library.convolutions(), self._start))

    def range_reason(self) -> str:
        """Return why the sizes of convolutions' workspaces are known only as a range."""
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
        """Return sentences on the convolutions that a reader of the figures needs."""
        ran = self.plan_counts()
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
