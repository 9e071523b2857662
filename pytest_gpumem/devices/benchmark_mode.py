"""Detects cuDNN's benchmark mode: PyTorch times plans at the first convolution of each shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

FUNCTION: Final = Patch(
    "torch._C",
    "_set_cudnn_benchmark",
    reason="figures of cuDNN's benchmark mode do not depend on earlier tests, or a note says so",
)
PROPERTY: Final = Patch("torch.backends.cudnn", "benchmark.setter", reason=FUNCTION.reason)
"""the setter is wrapped too, because it references the original function"""
TIMED: Final = Note(
    NoteKind.TIMED_PLANS,
    "torch.backends.cudnn.benchmark was on: the first convolution of a shape in a process times "
    "plans and takes more memory, so the peaks depend on the tests before, and a test that grew "
    "is measured in a second run: warmup=1 measures the second run always",
)


def watch_benchmark_mode(torch: ModuleType, turned_on: Callable[[], object]) -> None:
    """Call ``turned_on`` when a program turns ``torch.backends.cudnn.benchmark`` on."""

    def make(setter: Callable[[object], object]) -> Callable[[object], None]:
        def set_and_note(value: object) -> None:
            if value:
                turned_on()
            setter(value)

        return set_and_note

    FUNCTION.wrap(torch._C, make)
    switch: Any = type(torch.backends.cudnn).__dict__.get("benchmark")
    if hasattr(switch, "setter"):
        PROPERTY.on(switch, "setter", make(switch.setter))


class TimedPlans:
    """Records whether a real GPU may have timed plans since a test began."""

    was_on = False
    _watches = False

    def begin(self, torch: ModuleType) -> None:
        """Start a test: set ``was_on`` to the current mode.

        It becomes True once a program turns the mode on.
        """
        if not self._watches:
            self._watches = True
            watch_benchmark_mode(torch, self._see)
        self.was_on = torch.backends.cudnn.benchmark

    def _see(self) -> None:
        self.was_on = True


TIMED_PLANS: Final = TimedPlans()
