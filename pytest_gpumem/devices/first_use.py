"""The moment in which a program first uses CUDA, on whatever thread and in whatever process.

PyTorch initialises CUDA as it is first used. A program that forks before that may use CUDA in each
of its processes, and one that uses none makes no context: so nothing may be initialised for it.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Final

from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable

INITIALISE: Final = "_lazy_init"
"""torch.cuda's function that initialises CUDA; PyTorch's C++ calls it by this name too"""
USE: Final = Patch(
    "torch.cuda", INITIALISE, reason="measuring begins as the program first uses CUDA, not before"
)


class FirstUse:
    """Calls a function as CUDA is first used, once in a process; a fork before that has its own."""

    def __init__(
        self, begin: Callable[[], None], prepare: Callable[[], None] = lambda: None
    ) -> None:
        """Wait from now on.

        Args:
            begin: the function. It may use CUDA, and runs without PyTorch's modes.
            prepare: is called before CUDA is initialised by a use of it.
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
        """Call the function, unless that is done."""
        begin, self._begin = self._begin, None
        if begin is None:
            return
        self._restore()
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            begin()

    @staticmethod
    def _replace(old: Callable[[], None], new: Callable[[], None]) -> None:
        """Put a function in another one's place, in all of torch.cuda's modules that have it."""
        for name, module in list(sys.modules.items()):
            is_cudas = name == "torch.cuda" or name.startswith("torch.cuda.")
            if is_cudas and vars(module).get(INITIALISE) is old:
                USE.on(module, INITIALISE, new)
