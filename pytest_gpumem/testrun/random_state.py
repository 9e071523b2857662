"""The random number generators of a test's start: a run in place of the first one draws alike."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class RandomState:
    """The state of the generators of Python, NumPy and PyTorch, on the host and on devices."""

    def __init__(self, devices: Iterable[int]) -> None:
        """Take the state of this moment."""
        import torch

        self._python = random.getstate()
        # An import of NumPy takes long, and one that comes later has drawn nothing yet.
        numpy = sys.modules.get("numpy.random")
        self._numpy = None if numpy is None else numpy.get_state()
        self._host = torch.get_rng_state()
        generators = torch.cuda.default_generators
        self._devices = [
            (generator, generator.get_state())
            for generator in (generators[device] for device in devices)
        ]

    def restore(self) -> None:
        """Have all of them go on from there."""
        import torch

        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)
        torch.set_rng_state(self._host)
        for generator, state in self._devices:
            generator.set_state(state)
