"""Hides the virtual GPU outside of marked tests, once torch is imported.

PyTorch counts its devices once per process and caches the number, so the native runtime always
reports all virtual devices. They are hidden by patching the functions that
``torch.cuda.is_available`` and ``torch.cuda.device_count`` call, so that a copy imported earlier
(``from torch.cuda import is_available``) finds no GPU either. (Below PyTorch, the native library
hides the devices from code that calls the driver or NVML.)
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType

COUNTS: Final = Patch(
    "torch._C",
    *("_cuda_getDeviceCount", "_accelerator_deviceCount"),
    reason="only code that may see the virtual GPU counts it",
)
NVML_COUNT: Final = Patch(
    "torch.cuda", "_device_count_nvml", reason="torch.cuda counts devices by NVML first"
)
LAST_COUNT: Final = Patch(
    "torch.cuda",
    "_cached_device_count",
    reason="torch.cuda keeps its first count, and later code may see another number of devices",
)
INITIALISATION: Final = Patch(
    "torch._C",
    "_cuda_init",
    reason="CUDA is not initialised while no GPU is shown: PyTorch keeps what its first try sees",
)
INSTALLED_CODE: Final = ("site-packages", "dist-packages")
"""folders of installed packages, whose lines are not the user's"""
HIDDEN: Final = (
    "No CUDA GPUs are available: the virtual GPU is visible only inside tests marked "
    "gpu_memory. Move the call into a marked test or into one of its fixtures, or show the "
    "GPU to all code of the session: --gpumem-visible=session"
)
"""error for code that initializes CUDA while no GPU is shown; it begins like PyTorch's own"""
COMPILERS_ANSWERS: Final = (
    *("torch.utils._triton", "torch._inductor.utils"),
    "torch._inductor.codegen.cuda.cuda_env",
)
"""modules of ``torch.compile`` with functions that cache facts about the device"""
_CACHED: Final = type(functools.cache(len))


class GpuLookup(NamedTuple):
    """A file that looked for GPUs during its import while none was shown."""

    path: str
    """the file's path, spelled as in Python's frame"""
    line: int
    """line of the file that called PyTorch, or that called or imported other code that did"""
    direct: bool
    """whether the line itself called PyTorch"""

    def place(self, root: Path) -> str:
        """Return the file, relative to a folder, and the line: "tests/test_model.py:12"."""
        return f"{os.path.relpath(self.path, root)}:{self.line}"


class DeviceVisibility:
    """Wraps PyTorch's device counts, so that they return the number of visible devices."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._shown = 0
        self.lookups: dict[str, GpuLookup] = {}
        """for each file's path, the first line that looked for GPUs; a direct call replaces an
        indirect one"""
        self._own_code = (str(Path(torch.__file__ or "").parent), __file__)
        # torch.cuda's count, and torch.accelerator's, which is separate before torch 2.8
        COUNTS.wrap(torch._C, self._counting)
        NVML_COUNT.put(torch.cuda, {"_device_count_nvml": self._count})
        INITIALISATION.wrap(torch._C, wrapped_by(self._initialise))  # a build without CUDA has none

    def _count(self) -> int:
        frame: FrameType | None = sys._getframe(1)
        direct = True
        while not self._shown and frame is not None:
            path = frame.f_code.co_filename
            if not path.startswith(self._own_code):
                # A module's frame runs during its import, except that of the main program, which is
                # pytest's own script.
                if frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] != "__main__":
                    earlier = self.lookups.get(path)
                    if earlier is None or (direct and not earlier.direct):
                        self.lookups[path] = GpuLookup(path, frame.f_lineno, direct)
                direct = direct and not path.startswith("/")  # "<frozen importlib._bootstrap>"
            frame = frame.f_back
        return self._shown

    def _counting(self, count: Callable[[], int]) -> Callable[[], int]:
        """Wrap PyTorch's count of devices to call the driver only while devices are shown.

        After a call of the driver, processes that this one forks cannot use CUDA.
        """

        def count_shown() -> int:  # _count skips frames of this file, which are not the program's
            if self._shown:
                count()
            return self._count()

        return count_shown

    def _initialise(self, initialise: Callable[[], None]) -> None:
        """Initialize CUDA; raise if no GPU is shown.

        PyTorch looks for NVML only once. If it does so while the GPU is hidden, NVML is missing,
        and its allocator later crashes on expandable segments: so refuse before PyTorch looks.
        """
        if not self._shown:
            raise RuntimeError(HIDDEN)
        initialise()

    def lookup_of(self, path: Path, root: Path) -> GpuLookup | None:
        """Return what looked for GPUs in a test's file, or else in its project; None if unknown."""
        if str(path) in self.lookups:
            return self.lookups[str(path)]
        for question in self.lookups.values():
            place = Path(question.path)
            if place.is_relative_to(root) and not set(place.parts) & set(INSTALLED_CODE):
                return question
        return None

    def show(self, count: int) -> None:
        """Set how many devices PyTorch's users see; 0 hides them."""
        self._shown = count
        LAST_COUNT.put(self._torch.cuda, {"_cached_device_count": None})
        # torch.compile caches these functions' first results for the whole process: no GPU, or an
        # earlier test's card.
        for name in COMPILERS_ANSWERS:
            module = sys.modules.get(name)
            for function in vars(module).values() if module else ():
                if isinstance(function, _CACHED):
                    function.cache_clear()
