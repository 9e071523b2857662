"""Note an optimizer that took only its first step: training's peak comes with its second step.

An optimizer's state is allocated at the end of the first training step, so that step's activations
and gradients are never allocated beside the state.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.recording.collector import Uncounted
from pytest_gpumem.recording.plain_tensors import gradients_of, plain_tensors
from pytest_gpumem.recording.wrapped_functions import WRAPPED
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    from torch.optim import Optimizer


@dataclass
class _Progress:
    """The steps of one optimizer."""

    optimizer: weakref.ref[Optimizer]
    name: str
    fresh: bool
    steps: int = 0
    peak_before: int = 0
    """bytes; the peak when its first step began"""
    state_bytes: int = 0
    bytes_without_gradient: int = 0
    """bytes of the parameters without a gradient, in the step with most of them"""


class OptimizerWatch:
    """Watches all optimizers between ``start`` and ``stop``, by torch's global step hooks.

    Args:
        before_step: is called before every step.
        after_step: is called after every step, unless the step raised.
        peak: returns the peak so far, in bytes.
    """

    def __init__(
        self,
        before_step: Callable[[], object] | None = None,
        after_step: Callable[[Optimizer], object] | None = None,
        peak: Callable[[], int] = int,
    ) -> None:
        self._before_step = before_step
        self._after_step = after_step
        self._peak = peak
        self._progress: dict[int, _Progress] = {}
        self._under_way: list[int] = []
        """ids of the optimizers whose step is running, outermost first"""
        self._stack = ExitStack()

    def start(self) -> None:
        """Register the hooks."""
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        WRAPPED.hook(self._stack, register_optimizer_step_pre_hook(self._before))
        WRAPPED.hook(self._stack, register_optimizer_step_post_hook(self._after))

    def stop(self) -> None:
        """Remove the hooks."""
        self._stack.close()

    def forget(self) -> None:
        """Forget the steps so far; an optimizer that has state by now is not new afterwards."""
        self._progress.clear()

    @contextmanager
    def separately(self) -> Iterator[None]:
        """Forget the steps taken in the block when it ends."""
        outer, self._progress = self._progress, {}
        try:
            yield
        finally:
            self._progress = outer

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        around = self._steps_around(sys._getframe(1))
        self._under_way.append(id(optimizer))
        if id(optimizer) in around:  # a subclass's step called its base's
            return
        if self._before_step is not None and not around:
            self._before_step()
        progress = self._progress.get(id(optimizer))
        # Python may reuse the id of a freed object.
        if progress is None or progress.optimizer() is not optimizer:
            self._progress[id(optimizer)] = _Progress(
                weakref.ref(optimizer),
                type(optimizer).__name__,
                fresh=not optimizer.state,
                peak_before=self._peak(),
            )

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        around = self._steps_around(sys._getframe(1))
        progress = self._progress.get(id(optimizer))
        # With torch.compile, the second half of a step may run alone while the first is compiled.
        if id(optimizer) in around or progress is None or progress.optimizer() is not optimizer:
            return
        if self._after_step is not None and not around:
            self._after_step(optimizer)
        import torch

        # Some subclasses' own __torch_function__ raises, or records each call.
        with Uncounted(), torch._C.DisableTorchFunctionSubclass():
            without_gradient = bytes_without_gradient(optimizer)
            progress.steps += 1
            progress.bytes_without_gradient = max(progress.bytes_without_gradient, without_gradient)
            if progress.fresh and progress.steps == 1:
                progress.state_bytes = sum(
                    part.nbytes
                    for state in optimizer.state.values()
                    for value in (state.values() if isinstance(state, dict) else ())
                    if isinstance(value, torch.Tensor)
                    for part in plain_tensors(value)
                    if part.device.type == VIEW.backend.device_type
                )

    def _steps_around(self, wrapper: FrameType) -> list[int]:
        """Return the ids of the optimizers whose steps contain the step of ``wrapper``.

        No hook runs at the end of a step that raises: the frames on the stack show how many steps
        are still running.
        """
        depth = steps_around(wrapper.f_back, wrapper.f_code)
        del self._under_way[depth:]
        # No hook ran for steps that were already running when the watch began.
        self._under_way += [0] * (depth - len(self._under_way))
        return list(self._under_way)

    def notes(self) -> list[str]:
        """Return a sentence for each optimizer that took its first step and no other.

        Leave out an optimizer if the peak has risen by at least its state's bytes since its first
        step began, for example in a later forward and backward pass.
        """
        peak = self._peak()
        return [
            f"only one step ran with a new {progress.name}, and its state of "
            f"{format_size(progress.state_bytes)} was allocated last: the next step's peak "
            "includes this state; run two steps, or, if a fixture makes the optimizer, write "
            "warmup=1"
            for progress in self._progress.values()
            if progress.fresh
            and progress.steps == 1
            and progress.state_bytes > max(0, peak - progress.peak_before)
        ]

    def notes_on_gradients(self) -> list[str]:
        """Return a sentence for each optimizer that stepped parameters without a gradient."""
        return [
            f"parameters of {format_size(progress.bytes_without_gradient)} got no gradient "
            f"in a step of {progress.name}, so the figures lack these gradients; with "
            "other values than the assumed or unknown ones, these parameters may get gradients"
            for progress in self._progress.values()
            if progress.bytes_without_gradient
        ]


def bytes_without_gradient(optimizer: Optimizer) -> int:
    """Return the bytes of parameters without a gradient; 0 if no parameter has one.

    An optimizer that stores gradients elsewhere, as in a flat buffer, has none in any parameter.
    """
    trained = [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad
    ]
    gradients = zip(trained, gradients_of(trained), strict=True)
    without_gradient = [param for param, gradient in gradients if gradient is None]
    if len(without_gradient) == len(trained):
        return 0
    return sum(
        part.nbytes
        for param in without_gradient
        for part in plain_tensors(param)
        if part.device.type == VIEW.backend.device_type
    )


def steps_around(frame: FrameType | None, wrapper: CodeType | None) -> int:
    """Count the running optimizer steps, from a frame outwards."""
    number = 0
    while frame is not None:
        number += frame.f_code is wrapper
        frame = frame.f_back
    return number
