"""Split an unmodified program into phases, each a part of its measurement.

A phase lasts until the program starts another kind of work: calls of modules with gradients, calls
without gradients, or writing a checkpoint. An optimizer step ends the first training step.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.patches import Patch, wrapped_by
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.recording.module_hooks import hook_calls
from pytest_gpumem.recording.optimizer_watch import OptimizerWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.testrun.run import Run

LOAD: Final = "load"
FIRST: Final = "first step"
LATER: Final = "later steps"
EVALUATION: Final = "evaluation"
CHECKPOINT: Final = "checkpoint"
SAVES: Final = Patch(
    "torch",
    *("save", "distributed.checkpoint.save", "distributed.checkpoint.state_dict_saver.save"),
    reason="a program that is measured by phases writes a checkpoint by these",
)


class Phases:
    """Measures the phases of a run's program, from ``start`` to ``stop``."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._name = ""
        self._steps = 0
        self._part = ExitStack()
        """ends the current phase when closed"""
        self._stack = ExitStack()
        self._optimizers = OptimizerWatch(after_step=self._end_step)

    def start(self) -> None:
        """Start with the phase in which the program loads its model."""
        import torch

        hook_calls(self._stack, self._before_module)
        self._optimizers.start()
        self._stack.callback(self._optimizers.stop)
        SAVES.wrap(torch, wrapped_by(self._save), self._stack)
        self._enter(LOAD)

    def stop(self) -> None:
        """End the last phase."""
        self._part.close()
        self._stack.close()

    def _enter(self, name: str) -> None:
        if name == self._name or threading.current_thread() is not threading.main_thread():
            return
        if VIEW.backend.is_capturing():  # no device call is allowed during a capture
            return
        self._part.close()
        self._name = name
        self._part.enter_context(self._run.part(name, {}))

    def _before_module(self, *_call: object) -> None:
        import torch

        if self._name == CHECKPOINT:
            return
        training = FIRST if not self._steps else LATER
        self._enter(training if torch.is_grad_enabled() else EVALUATION)

    def _end_step(self, _optimizer: object) -> None:
        self._steps += 1

    def _save(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the function
        before = self._name
        self._enter(CHECKPOINT)
        try:
            return save(*args, **kwargs)
        finally:
            self._enter(before)
