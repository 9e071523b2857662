"""Hiding the virtual GPU outside of marked tests, from the import of torch on.

PyTorch counts its devices once in a process and keeps the answer, so the native runtime always
tells it the truth. Hiding happens above PyTorch: in the bindings behind ``torch.cuda.is_available``
and ``torch.cuda.device_count``, so that even a name imported earlier (``from torch.cuda import
is_available``) sees the machine as it is. (Below PyTorch, the native library hides it from code
that asks the driver or NVML.)
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
OTHERS_CODE: Final = ("site-packages", "dist-packages")
"""folders of installed packages: a line in them is no line of the user's"""
HIDDEN: Final = (
    "No CUDA GPUs are available: the virtual GPU is visible only inside tests marked "
    "gpu_memory. Move the call into a marked test or into one of its fixtures, or show the "
    "GPU to all code of the session: --gpumem-visible=session"
)
"""the error of code that initialises CUDA where no GPU is shown, in the words of PyTorch's own"""
COMPILERS_ANSWERS: Final = (
    *("torch.utils._triton", "torch._inductor.utils"),
    "torch._inductor.codegen.cuda.cuda_env",
)
"""modules of ``torch.compile`` with functions that keep answers about the device"""
_CACHED: Final = type(functools.cache(len))


class Question(NamedTuple):
    """A file that looked for GPUs during its import, and none was shown."""

    path: str
    """as Python has it"""
    line: int
    """of the file: the line that asked, or that called or imported the code that did"""
    direct: bool
    """whether the line itself asked PyTorch"""

    def place(self, root: Path) -> str:
        """Return "tests/test_model.py:12", as seen from a folder."""
        return f"{os.path.relpath(self.path, root)}:{self.line}"


class Curtain:
    """Stands in for PyTorch's device counts: tells its users the number of visible devices."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._shown = 0
        self.unanswered: dict[str, Question] = {}
        """the first one of each file; one that asked itself replaces one that did not"""
        self._own_code = (str(Path(torch.__file__ or "").parent), __file__)
        # of torch.cuda, and of torch.accelerator where that asks for itself (before torch 2.8)
        COUNTS.wrap(torch._C, self._counting)
        NVML_COUNT.put(torch.cuda, {"_device_count_nvml": self._count})
        INITIALISATION.wrap(torch._C, wrapped_by(self._initialise))  # not in a build without CUDA

    def _count(self) -> int:
        frame: FrameType | None = sys._getframe(1)
        direct = True
        while not self._shown and frame is not None:
            path = frame.f_code.co_filename
            if not path.startswith(self._own_code):
                # The frames of an import; pytest's own script is the main program.
                if frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] != "__main__":
                    earlier = self.unanswered.get(path)
                    if earlier is None or (direct and not earlier.direct):
                        self.unanswered[path] = Question(path, frame.f_lineno, direct)
                direct = direct and not path.startswith("/")  # "<frozen importlib._bootstrap>"
            frame = frame.f_back
        return self._shown

    def _counting(self, count: Callable[[], int]) -> Callable[[], int]:
        """Return PyTorch's question of the driver, which lets no forked process use CUDA later."""

        def count_shown() -> int:  # in this file, whose frames are no program's
            if self._shown:
                count()
            return self._count()

        return count_shown

    def _initialise(self, initialise: Callable[[], None]) -> None:
        """Initialise CUDA, and refuse that while no GPU is shown.

        PyTorch keeps what its first try sees: after one without NVML, its allocator of expandable
        segments ends the process with a segmentation fault.
        """
        if not self._shown:
            raise RuntimeError(HIDDEN)
        initialise()

    def question_of(self, path: Path, root: Path) -> Question | None:
        """Return the question of a test's file, else of another file of its project."""
        if str(path) in self.unanswered:
            return self.unanswered[str(path)]
        for question in self.unanswered.values():
            place = Path(question.path)
            if place.is_relative_to(root) and not set(place.parts) & set(OTHERS_CODE):
                return question
        return None

    def show(self, count: int) -> None:
        """Let PyTorch's users see so many devices; 0 hides them."""
        self._shown = count
        LAST_COUNT.put(self._torch.cuda, {"_cached_device_count": None})
        # The compiler keeps its first answers for the whole process: those of a test without a GPU,
        # or of the card of an earlier one.
        for name in COMPILERS_ANSWERS:
            module = sys.modules.get(name)
            for function in vars(module).values() if module else ():
                if isinstance(function, _CACHED):
                    function.cache_clear()
