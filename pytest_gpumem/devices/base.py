"""The interface of devices, through which measuring code uses real and virtual ones."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from pytest_gpumem.backend import CUDA, Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.devices.memory_use import UseWatch
    from pytest_gpumem.measurement import DeviceInfo
    from pytest_gpumem.notes import Note

Values = Literal["auto", "full", "off"]
"""values that a virtual GPU computes: those within a test's budget, all, or none"""

RangeEnd = Literal["usual", "least", "most"]
"""which size to assume for a workspace whose library reports none"""

BlockUse = Literal["passing", "kept", "spanning", "in use", "planned"]
"""how long PyTorch keeps a block: "passing": until the call that requested it ends; "kept": until
another block is freed; "spanning": until a known time. For workspaces recorded when a library
received them for one call: "in use", or "planned" if the call runs a cuDNN plan"""


class Alternative(NamedTuple):
    """A block whose size on a GPU may differ from its size in the run; size 0: no block.

    Times are microseconds since 1970, sizes bytes.
    """

    time: float
    """when the workspace's size was queried; for an "in use" or "planned" one, when the library
    received it; for a block that only a GPU allocates, when a GPU would request it"""
    use: BlockUse
    address: int
    """for an "in use" or "planned" block: its own address; 0 if PyTorch allocated none. For a
    "kept" block: address of the block with which it is freed; 0: the block allocated just before"""
    least: int
    usual: int
    """size in the run. All three sizes count elements if the library reports elements"""
    most: int
    ended: float = 0
    """when a "spanning" block ends, or a "kept" one may end at the earliest; 0: no such time"""
    place: tuple[int, int] | None = None
    """device and stream; None: those of the previous request"""
    reason: str = ""
    """the unknown choice on which the block depends, so that a replay may leave it out; "": each
    replay at the upper bound includes the block"""
    counted: bool = True
    """whether peaks include the block; of a block that a compiler allocates for itself, peaks
    include only the memory that stays in the allocator's cache"""


class AllocatorEvent(NamedTuple):
    """A CUDA event that PyTorch's allocator recorded on a stream that used a dropped tensor.

    Until the event has completed, PyTorch keeps the tensor's memory (``record_stream``). A GPU may
    reach the event at any time until the program waits for it. Times are microseconds since 1970.
    """

    recorded: float
    answered: float
    """when the allocator learned that the event had completed"""
    awaited: float
    """when the program had waited for the event, directly or indirectly; infinity: never"""
    device: int


class Alternatives(NamedTuple):
    """The blocks and events of a run that may differ on a real GPU; empty on a real GPU."""

    blocks: Sequence[Alternative] | None = ()
    """blocks in order of time; None if there were too many"""
    events: Sequence[AllocatorEvent] | None = ()
    """events in the order in which the allocator queried them; None if there were too many"""
    smaller: bool = False
    """whether any block may be smaller"""
    larger: bool = False
    """whether any block may be larger, or live longer"""
    reason: str = ""
    """the unknown choices, such as "cuDNN's choice in benchmark mode"; "" if there are none"""
    judged: bool = False
    """whether limits are checked against the largest peaks"""
    margin: int = 0
    """percent by which peak reserved may exceed the largest replayed peak, because on a GPU the
    allocator's cache may serve other workspaces. If this is not 0, the lower bound of peak reserved
    is that of peak allocated"""
    pinned_early: bool = False
    """whether pinned memory became free although a GPU might not have finished copying it"""


FOREIGN_KERNELS: Final = (
    "kernels outside of PyTorch's operators (TorchScript's fused code, a replayed CUDA graph, an "
    "extension)"
)
"""name in reports for kernels that compute no values on the virtual GPU"""


class ValueEngine:
    """Controls which values a device's steps compute; a real GPU always computes all."""

    @property
    def all_computed(self) -> bool:
        """Whether all values are computed, so that they are meaningful."""
        return True

    @property
    def lost_to_kernels(self) -> bool:
        """Whether kernels outside of PyTorch's operators made values unknown in this run."""
        return False

    def compute(self, scope: Values) -> None:
        """Compute values from now on: within a test's budget ("auto"), all ("full") or none."""

    def renew(self) -> None:
        """Reset the test's budget of values before its body runs, or runs again."""

    def separately(self) -> AbstractContextManager[None]:
        """Return a context to set up a wider-scope fixture outside the test's budget of values."""
        return nullcontext()

    def has_guessed(self, *, failed: bool = False) -> bool:  # noqa: ARG002 - a virtual GPU's
        """Return whether the step branched on values that are unknown or assumed.

        Args:
            failed: whether the step failed because of a value: then values that it read without
                branching count too.
        """
        return False

    def bounds(self, root: Path) -> str:  # noqa: ARG002 - a virtual GPU's
        """Return the source lines, as text, where a tensor's size is only an upper bound.

        Such a size depends on unknown values. The text is "" if there are none; its file names are
        relative to ``root``.
        """
        return ""

    def least_sizes(self) -> AbstractContextManager[None]:
        """Return a context in which sizes that depend on unknown values have their lower bound."""
        return nullcontext()

    def assume_masks(self, share: float) -> None:
        """Assume that this share of each unknown mask's elements is true, until ``close``."""


class Device:
    """A kind of GPU that steps can run on; the default methods are those of a real GPU."""

    values = ValueEngine()
    backend: Backend = CUDA
    option = "cuda"
    """the value of ``--gpumem-device`` that chooses this kind"""

    def describe(self) -> list[str]:
        """Return sentences for the session's header: what the device is, and what it cannot do."""
        return [f"{self.option} device"]

    def explains(self) -> bool:
        """Return whether peaks can be explained: whether the allocator records its history."""
        return True

    def alternatives(self) -> Alternatives:
        """Return the blocks and events since ``open`` that may differ on a real GPU."""
        return Alternatives()

    def open(self, card: Card | None, count: int) -> DeviceInfo:
        """Set up ``count`` devices, as ``card`` if one is named, until ``close``.

        The first of them becomes PyTorch's current device. On a real GPU the card's memory is only
        a cap. Other processes that share the GPUs wait for ``close``.

        Raises:
            DeviceError: the device is missing, or is not the requested one.
        """
        raise NotImplementedError

    def await_use(self, count: int, begin: Callable[[], None]) -> None:
        """Show ``count`` devices, and call a function when this process first uses CUDA.

        CUDA stays uninitialized until then: processes that are forked earlier can use CUDA, and
        call the function themselves.

        Args:
            count: the number of devices.
            begin: the function, which calls ``open``. If the measurement calls ``open`` before the
                process uses CUDA, ``open`` calls this function first.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Undo ``open``, for code outside of marked tests."""

    def make_room(self, extra: list[int]) -> None:
        """Add bytes to each device beyond its card's memory, where that is possible.

        Memory that is already in use when a step begins must not reduce what the step can allocate.
        """

    def trouble(self) -> str | None:
        """Return why the figures since ``open`` are invalid; None if they are valid."""
        return None

    def notes(self, root: Path) -> list[Note]:  # noqa: ARG002 - a virtual GPU's
        """Return notes for the reader about the run since ``open``.

        File names are relative to ``root``.
        """
        return []

    def watch(self, devices: range) -> UseWatch:
        """Return a watch on the memory in use on some devices during a step."""
        raise NotImplementedError

    def join_alone(
        self, rank: int, size: int, *, by_program: bool = False
    ) -> AbstractContextManager[None]:
        """Return a context in which this process is rank ``rank`` of ``size``, without the others.

        Args:
            rank: this process's rank.
            size: number of ranks.
            by_program: whether to create the process group only when the block calls
                ``init_process_group``.

        Raises:
            DeviceError: this process has a default process group, or PyTorch has no NCCL.
        """
        raise NotImplementedError
