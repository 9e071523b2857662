"""Seeing that a step was the first of its optimizer: training's peak comes with the second.

An optimizer's state comes to life at the end of its first step, so the first step's activations and
gradients never lie beside it.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    from torch.optim import Optimizer

FRESH: Final = "one step ran with a fresh "
"""how the sentence begins; a hint that knows the next step's peak says more"""


@dataclass
class _Seen:
    optimizer: weakref.ref[Optimizer]
    name: str
    fresh: bool
    steps: int = 0
    state_bytes: int = 0


class OptimizerWatch:
    """Watches all optimizers between ``start`` and ``stop``, by torch's global step hooks.

    Args:
        before: is called before every step.
        after: is called after every step; not after one that an error ended.
    """

    def __init__(
        self,
        before: Callable[[], object] = bool,
        after: Callable[[Optimizer], object] = bool,
    ) -> None:
        self._tell_before = before
        self._tell_after = after
        self._compiling: Callable[[], bool] = bool
        """whether torch.compile looks at this rather than Python running it"""
        self._seen: dict[int, _Seen] = {}
        self._handles: list[Any] = []

    def start(self) -> None:
        """Begin to watch."""
        import torch
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._compiling = torch.compiler.is_compiling
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def stop(self) -> None:
        """End it."""
        while self._handles:
            self._handles.pop().remove()

    def forget(self) -> None:
        """Forget the steps so far, not that an optimizer is no longer fresh."""
        self._seen.clear()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Forget, at its end, the steps that are taken inside."""
        kept, self._seen = self._seen, {}
        try:
            yield
        finally:
            self._seen = kept

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        if self._compiling() or _is_inner(sys._getframe(1)):
            return
        self._tell_before()
        seen = self._seen.get(id(optimizer))
        if seen is None or seen.optimizer() is not optimizer:
            self._seen[id(optimizer)] = _Seen(
                weakref.ref(optimizer), type(optimizer).__name__, fresh=not optimizer.state
            )

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if self._compiling() or _is_inner(sys._getframe(1)):
            return
        self._tell_after(optimizer)
        seen = self._seen[id(optimizer)]
        seen.steps += 1
        if seen.fresh and seen.steps == 1:
            seen.state_bytes = _state_bytes(optimizer)

    def notes(self) -> list[str]:
        """Return a sentence for each optimizer that took its first step and no other."""
        return [
            f"{FRESH}{seen.name}: its state of {format_size(seen.state_bytes)} "
            "came last, the next step's peak has it as well; run two steps, or give warmup=1"
            for seen in self._seen.values()
            if seen.fresh and seen.steps == 1 and seen.state_bytes
        ]


def steps_around(frame: FrameType | None, wrapper: CodeType | None) -> int:
    """Return how many steps of optimizers are under way, from a frame outwards.

    Args:
        frame: where to begin.
        wrapper: what PyTorch runs around every step, which is what calls its hooks.
    """
    found = 0
    while frame is not None:
        found += frame.f_code is wrapper
        frame = frame.f_back
    return found


def _is_inner(wrapper: FrameType) -> bool:
    """Return whether a step is part of another: of a class that calls its base's."""
    return steps_around(wrapper.f_back, wrapper.f_code) > 0


def _state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of an optimizer's state on CUDA devices."""
    import torch

    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in (state.values() if isinstance(state, dict) else ())
        if isinstance(value, torch.Tensor) and value.is_cuda
    )
