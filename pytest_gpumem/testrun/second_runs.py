"""The reasons to run a test's body again, and what each such run finds.

``Runner.again`` takes one of these declarations. docs/explanation/second-runs.md lists them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pytest_gpumem.notes import Note, NoteKind


class SecondRun(NamedTuple):
    """One reason to run a test's body again."""

    cause: str
    """what follows "the test failed because" in the page's table"""
    does: str
    """what follows "its second run" in that table"""
    devices: str = "both"
    finds: str = ""
    """what follows "the test failed, and ran a second time to find"; "" if another note says it"""

    @property
    def note(self) -> Note:
        """The note that the test ran a second time, and why."""
        return Note(NoteKind.RUN, f"the test failed, and ran a second time to find {self.finds}")


OUT_OF_MEMORY: Final = SecondRun(
    "it ran out of memory",
    "has no limits, to find the memory that the test needs; it does not search for keepers, "
    "because the search would change this figure",
    finds="what it needs",
)
KEEPERS: Final = SecondRun(
    "its peak is over a limit, or grew",
    "searches for the keepers of the lines that caused the failure; if no line caused it, there is "
    "no second run",
    "the virtual GPU, and a real GPU with `--gpumem-attribution=on`, or if baselines, a page or a "
    "JSON report are written",
    finds="what keeps its blocks",
)
LINES: Final = SecondRun(
    "its peak is over a limit, or grew",
    "is recorded, to find the lines of the peak",
    "a real GPU",
    finds="where its peak comes from",
)
LEAST_SIZES: Final = SecondRun(
    "it takes too much, and its figures are [a bound](values.md#known-assumed-unknown)",
    "has the least sizes, to find the lower end of the range",
    "the virtual GPU",
)
PINNED: Final = SecondRun(
    "it pins more host memory than its limit or its baseline",
    "asks PyTorch after each C function whether more memory is pinned, to find the lines",
    finds="which lines pin memory",
)
EXPANDABLE: Final = SecondRun(
    "it takes too much, and its memory is fragmented",
    "has expandable segments, to find what they would reserve",
    "the virtual GPU",
)
TIMED_PLANS: Final = SecondRun(
    "its peak grew with `torch.backends.cudnn.benchmark`",
    "is measured: it times no plans",
    "a real GPU",
)
GROWTH: Final = SecondRun(
    "its memory grows from step to step (`steady`)",
    "collects garbage after each step, to tell leaks from garbage, and finds what holds the "
    "memory; if only garbage grew, the test passes",
    finds="what makes its memory grow",
)
LEAK: Final = SecondRun(
    "it leaves memory behind (`max_leak_mib`)",
    "shows whether each run leaves the same amount of memory",
)
ALL: Final = (
    *(OUT_OF_MEMORY, KEEPERS, LINES, LEAST_SIZES, EXPANDABLE, PINNED, TIMED_PLANS, GROWTH, LEAK),
)

# Trials with other inputs, which the report lists.
SIZES: Final = SecondRun("`batch_sizes`", "has each of the smaller batch sizes")
ADVICE: Final = SecondRun(
    "it ran out of memory and reads its batch size or its variant",
    "has each of `variants`, or smaller batch sizes, to find what fits",
)
