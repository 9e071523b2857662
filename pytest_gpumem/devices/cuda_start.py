"""Initializes CUDA once per process, and detects a program's first use of it.

After an error, PyTorch's next attempt would end the process. CUDA must not be initialized earlier
than the program does: a program that forks before it uses CUDA can use it in each of its processes,
and a program that uses no CUDA creates no context.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Final

from pytest_gpumem.errors import DeviceError
from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""environment variables with settings of PyTorch's allocator, read when CUDA is initialized"""

_failures: list[DeviceError] = []
"""the error of this process's only attempt; empty unless it failed"""


def start_cuda() -> None:
    """Initialize CUDA unless it is initialized.

    Raises:
        DeviceError: the initialization failed, now or earlier; another attempt might end the
            process.
    """
    import torch

    for failure in _failures:
        raise DeviceError(failure.given, failure.problem, failure.remedy) from failure.__cause__
    try:
        torch.cuda.init()
    except Exception as error:
        failure = _failure(error)
        failure.__cause__ = error.with_traceback(None)
        _failures.append(failure)
        raise failure from error


def _failure(error: Exception) -> DeviceError:
    """Return the error to raise, which names an allocator setting if that may be the cause."""
    message = f"{type(error).__name__}: {error}"
    setting = next((f"{name}={os.environ[name]}" for name in SETTINGS if os.environ.get(name)), "")
    if not setting:
        return DeviceError(
            "the CUDA device",
            f"PyTorch cannot initialise CUDA ({message})",
            'check whether python -c "import torch; torch.cuda.init()" works in this environment',
        )
    return DeviceError(
        setting,
        f"PyTorch cannot initialise CUDA with these allocator settings ({message})",
        "correct or unset the variable; write a setting like max_split_size_mb:128",
    )


INITIALISE: Final = "_lazy_init"
"""name of the function of torch.cuda that initializes CUDA; PyTorch's C++ code calls it by name"""
USE: Final = Patch(
    "torch.cuda", INITIALISE, reason="measuring begins when the program first uses CUDA, not before"
)


class FirstUse:
    """Calls a function once in this process, when CUDA is first used.

    A process forked before that use calls the function at its own first use.
    """

    def __init__(
        self, begin: Callable[[], None], prepare: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for the first use of CUDA from now on.

        Args:
            begin: the function to call. It may use CUDA, and runs outside of PyTorch's dispatch
                modes.
            prepare: called just before a use of CUDA initializes it.
        """
        self._begin: Callable[[], None] | None = begin
        import torch

        initialise = getattr(torch.cuda, INITIALISE)

        @functools.wraps(initialise)
        def initialise_and_begin() -> None:
            if self._begin is not None:
                prepare()
            initialise()
            if self._begin is not None and torch.cuda.is_initialized():
                self.happen()

        self._replace(initialise, initialise_and_begin)
        self._restore = functools.partial(self._replace, initialise_and_begin, initialise)

    def happen(self) -> None:
        """Call the function now, unless it has been called."""
        begin, self._begin = self._begin, None
        if begin is None:
            return
        self._restore()
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            begin()

    @staticmethod
    def _replace(old: Callable[[], None], new: Callable[[], None]) -> None:
        """Replace a function in all of torch.cuda's modules that have it."""
        for name, module in list(sys.modules.items()):
            is_cudas = name == "torch.cuda" or name.startswith("torch.cuda.")
            if is_cudas and vars(module).get(INITIALISE) is old:
                USE.on(module, INITIALISE, new)
