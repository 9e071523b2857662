"""Records which results have unknown values, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pytest_gpumem.devices.base import FOREIGN_KERNELS
from pytest_gpumem.sizes import format_size

SHARE_OF_HOST: Final = 0.5
"""share of the host's free memory that values may use with values="full"; with "auto" the budget is
the limit"""
MAX_NAMED: Final = 3
"""maximum number of operators that a note names"""


@dataclass
class UnknownResults:
    """The results that the host did not compute in a run, with reasons."""

    failures: dict[str, str] = field(default_factory=dict)
    """reasons why the host could not compute operators, by the operators' names"""
    code: set[str] = field(default_factory=set)
    """operators, or other parts of compiled code (torch.compile), that were not computed"""
    kernels: set[str] = field(default_factory=set)
    """names of kernels that the program launched itself: Triton's, FlashInfer's"""
    captured: bool = False
    """whether an operator was captured in a CUDA graph, whose replays compute nothing"""

    def notes(self, *, full: bool, decided: bool, refused: int, lost: bool) -> list[str]:
        """Return sentences on unknown results.

        Args:
            full: whether all values were requested: then each unknown result is reported.
            decided: whether the step branched on unknown values.
            refused: bytes of results for which the host had no memory.
            lost: whether kernels outside of PyTorch's operators have made values unknown.
        """
        sentences = []
        if full and self.failures:
            reasons = [f"{name}: {reason}" for name, reason in sorted(self.failures.items())]
            unnamed = len(reasons) - MAX_NAMED
            also = f"; and {unnamed} more" if unnamed > 0 else ""
            sentences.append(
                "the results of these operators were not computed, so their values are "
                f"unknown ({'; '.join(reasons[:MAX_NAMED])}{also})"
            )
        if self.code and (full or decided):
            sentences.append(
                "compiled code ran (torch.compile), and the virtual GPU did not compute these of "
                f"its results, so their values are unknown: {_names(self.code)}"
            )
        if self.kernels and (full or decided):
            sentences.append(
                "the virtual GPU does not run kernels of Triton or FlashInfer, so what these write "
                f"is unknown: {_names(self.kernels)}"
            )
        if full and self.captured:
            sentences.append(
                "a CUDA graph was captured: its replays compute no values, and make all "
                "values on the device unknown (to have values, run the step without the "
                "graph)"
            )
        elif lost and (full or decided):
            sentences.append(
                f"{FOREIGN_KERNELS} compute no values, and made all values on the device unknown"
            )
        if full and refused:
            sentences.append(
                f"{format_size(refused)} of values did not fit into the host's free memory "
                f"(they may take {SHARE_OF_HOST:.0%} of it), and are unknown: use a "
                "smaller model or batch, or values='auto'"
            )
        return sentences


def _names(all_names: set[str]) -> str:
    """Return a text with the first few names and the number of the others."""
    names = sorted(all_names)
    also = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{also}"
