"""The protocol of a device, real or virtual: the measuring code treats both alike."""

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
"""how long PyTorch keeps a block: "passing": until the call ends; "kept": as long as another block;
"spanning": until a known time; "in use": a library received it for one call, without a plan;
"planned": with a plan"""


class Alternative(NamedTuple):
    """A block whose size on a GPU may differ from its size in the run; size 0: no block.

    Times are microseconds since 1970, sizes bytes.
    """

    time: float
    """when the workspace's size was queried, its call was made, or the block was requested"""
    use: BlockUse
    address: int
    """address of the block itself if it is in use, otherwise of the block together with which it is
    freed; 0: PyTorch allocated no such block, or the block that it allocated just before"""
    least: int
    usual: int
    """size in the run; a number of elements if the library is queried for elements"""
    most: int
    ended: float = 0
    """when a "spanning" block ends, or a "kept" one may end at the earliest; 0: no such time"""
    place: tuple[int, int] | None = None
    """device and stream; None: those of the previous request"""
    reason: str = ""
    """the unknown choice on which the block depends; "": a replay at the upper bound always
    includes the block"""
    counted: bool = True
    """whether peaks include the block; for a block that a compiler allocates for itself, peaks have
    only the memory that stays in the allocator's cache"""


class AllocatorEvent(NamedTuple):
    """An event that PyTorch's allocator recorded when a tensor in use by a stream was dropped.

    Until the event has completed, PyTorch keeps the tensor's memory (``record_stream``). A GPU may
    reach it any time up to the moment at which the program waits for it. Times are microseconds
    since 1970.
    """

    recorded: float
    answered: float
    """when the allocator learned that the event had completed"""
    awaited: float
    """when the program had waited for the event in any way; infinity: never"""
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
    """percent by which peak reserved may exceed the largest replayed peak, as the allocator's cache
    may serve other workspaces on a GPU; at the lower end, nothing is reserved beyond the allocated
    memory"""
    pinned_early: bool = False
    """whether pinned memory was free again before a GPU may have finished copying it"""


FOREIGN_KERNELS: Final = (
    "kernels outside of PyTorch's operators (TorchScript's fused code, a replayed CUDA graph, an "
    "extension)"
)
"""kernels that compute no values on the virtual GPU, in reports"""


class ValueEngine:
    """Controls which values a device's steps compute; a real GPU always computes all."""

    @property
    def all_computed(self) -> bool:
        """Whether all values are computed, so that they are meaningful."""
        return True

    @property
    def lost_to_kernels(self) -> bool:
        """Whether kernels that compute nothing, in any mode, made values unknown in this run."""
        return False

    def compute(self, scope: Values) -> None:
        """Compute values from now on: within a test's budget ("auto"), all ("full") or none."""

    def renew(self) -> None:
        """Reset the test's budget of values before its body runs, or runs again."""

    def separately(self) -> AbstractContextManager[None]:
        """Return a context for a wider fixture's set-up, whose values use no test's budget."""
        return nullcontext()

    def has_guessed(self, *, failed: bool = False) -> bool:  # noqa: ARG002 - a virtual GPU's
        """Return whether the step branched on values that are unknown or assumed.

        Args:
            failed: whether the step failed because of a value: then values that it read without
                branching count too.
        """
        return False

    def bounds(self, root: Path) -> str:  # noqa: ARG002 - a virtual GPU's
        """Return the lines where a size is an upper bound; "" if there are none.

        Such a size depends on unknown values. File names are relative to ``root``.
        """
        return ""

    def least_sizes(self) -> AbstractContextManager[None]:
        """Return a context in which sizes that depend on unknown values have their lower bound."""
        return nullcontext()

    def assume_masks(self, share: float) -> None:
        """Assume that this share of each unknown mask is true, until the device is closed."""


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
        """Return what a real GPU may do differently in the run since ``open``."""
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
            begin: calls ``open``. ``open`` calls it first if CUDA has not been used yet.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Undo ``open``, for code outside of marked tests."""

    def make_room(self, extra: list[int]) -> None:
        """Add bytes to each device beyond its card's memory, where that is possible.

        Memory that is already in use when a step begins must not reduce what the step can have.
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
            by_program: create the process group when the block calls ``init_process_group``.

        Raises:
            DeviceError: this process has a default process group, or PyTorch has no NCCL.
        """
        raise NotImplementedError
