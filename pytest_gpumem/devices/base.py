"""The protocol of a device, real or virtual: code that measures can't tell them apart."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.devices.memory_use import UseWatch
    from pytest_gpumem.measurement import DeviceInfo
    from pytest_gpumem.notes import Note

Values = Literal["auto", "full", "off"]
"""values that a virtual GPU computes: within a test's budget, all, none"""

RangeEnd = Literal["usual", "least", "most"]
"""the size that is taken of a workspace whose library tells none"""

BlockUse = Literal["passing", "kept", "spanning", "in use", "planned"]
"""how long PyTorch keeps a block: until the call has ended; as long as another block; until a known
time; or a library was given it for one call, without a plan or of one"""


class Alternative(NamedTuple):
    """A block that may have another size on a GPU than in the run; 0: no block.

    Times are microseconds since 1970, sizes bytes.
    """

    time: float
    """of the question for a workspace's size, of the call that it was for, or of the request"""
    use: BlockUse
    address: int
    """of the block itself if it is in use, or of the one as long as which it is kept. 0: PyTorch
    allocated none, or it is kept as long as the block that was allocated last before"""
    least: int
    usual: int
    """in the run; a number of elements, where a library is asked for that"""
    most: int
    ended: float = 0
    """of one that is spanning; one that is kept stays at least until then"""
    place: tuple[int, int] | None = None
    """device and stream; None: those of the request before"""
    reason: str = ""
    """the choice that is not known, if the upper end is also told without this choice"""
    counted: bool = True
    """whether peaks include the block: of those that a compiler allocates for itself they include
    only the memory that stays in the allocator's cache"""


class AllocatorEvent(NamedTuple):
    """An event that PyTorch's allocator recorded when a tensor was dropped which a stream uses.

    Until it is over, PyTorch keeps the tensor's memory (``record_stream``). A GPU may reach it any
    time up to the moment at which the program waits for it. Times are microseconds since 1970.
    """

    recorded: float
    answered: float
    """when the allocator was told that it is over"""
    awaited: float
    """when the program had waited for it, by whichever way; infinite: never"""
    device: int


class Alternatives(NamedTuple):
    """All that a GPU may do otherwise than a run did. A real GPU: nothing."""

    blocks: Sequence[Alternative] | None = ()
    """in the order of their times; None: they are too many"""
    events: Sequence[AllocatorEvent] | None = ()
    """in the order of the allocator's questions; None: they are too many"""
    smaller: bool = False
    """whether any block may be smaller"""
    larger: bool = False
    """whether any block may be larger, or be kept for longer"""
    reason: str = ""
    """the choice that is not known: "cuDNN's choice in benchmark mode" """
    judged: bool = False
    """whether limits are held to the largest peaks"""
    margin: int = 0
    """percent that may be reserved beyond the largest, and below the least down to the
    allocated: so much depends on which of many workspaces the allocator's cache had room for"""
    pinned_early: bool = False
    """whether pinned memory was free again before a GPU may have copied it"""


class ValueEngine:
    """The values of a device's steps: a GPU's kernels compute them all, always."""

    @property
    def all_computed(self) -> bool:
        """Whether all values are computed, so that they mean something."""
        return True

    def compute(self, scope: Values) -> None:
        """Compute from now on the values within a test's budget ("auto"), all ("full") or none."""

    def renew(self) -> None:
        """Begin anew with a test's budget of values: its body runs, or runs again."""

    def apart(self) -> AbstractContextManager[None]:
        """Return a context whose values count for no test's budget: a fixture of wider scope's."""
        return nullcontext()

    def has_guessed(self, *, failed: bool = False) -> bool:  # noqa: ARG002 - a virtual GPU's
        """Return whether the step decided by values that are unknown or assumed.

        Args:
            failed: whether it failed by a value: values that it only kept count then.
        """
        return False

    def bounds(self, root: Path) -> str:  # noqa: ARG002 - a virtual GPU's
        """Return where sizes that depend on unknown values are the largest possible; "": nowhere.

        Files are named as seen from ``root``.
        """
        return ""

    def least_sizes(self) -> AbstractContextManager[None]:
        """Return a context in which such sizes are the least possible."""
        return nullcontext()

    def assume_masks(self, share: float) -> None:
        """Take this share of each unknown mask to be true, until the device is closed."""


class Device:
    """A kind of GPU that steps can run on; the answers here are those of a real GPU."""

    values = ValueEngine()
    """the values of its steps"""

    def alternatives(self) -> Alternatives:
        """Return all that a GPU may do otherwise than the run since ``open``."""
        return Alternatives()

    def open(self, card: Card | None, count: int) -> DeviceInfo:
        """Make ``count`` devices ready, as ``card`` where one is named, until ``close``.

        The first of them becomes PyTorch's current device. A real GPU does not change with the
        card's name: the card's memory is then a cap. Other processes that share the GPUs wait for
        ``close``.

        Raises:
            DeviceError: the device is missing, or is another one than was asked for.
        """
        raise NotImplementedError

    def await_use(self, count: int, begin: Callable[[], None]) -> None:
        """Show ``count`` devices, and call a function when this process first uses CUDA.

        Before that CUDA is not initialised: processes that are forked meanwhile can use it, and
        call the function themselves.

        Args:
            count: the number of devices.
            begin: it calls ``open``. ``open`` calls it first, where CUDA was not used as yet.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Undo ``open``: to code outside of marked tests the machine is as it was."""

    def make_room(self, extra: list[int]) -> None:
        """Give each device so many bytes beyond its card's memory, where that is possible.

        Foreign memory at the beginning of a step must not reduce the memory that the step can have.
        """

    def trouble(self) -> str | None:
        """Return the event since ``open`` that makes the figures worthless; None: no such event."""
        return None

    def notes(self, root: Path) -> list[Note]:  # noqa: ARG002 - a virtual GPU's
        """Return notes that a reader should know about the run since ``open``.

        Files are named as seen from ``root``.
        """
        return []

    def watch(self, devices: range) -> UseWatch:
        """Return a watch on the memory in use on some devices while a step runs."""
        raise NotImplementedError

    def join_alone(
        self, rank: int, size: int, *, by_program: bool = False
    ) -> AbstractContextManager[None]:
        """Return a context in which this process is rank ``rank`` of ``size``, without the others.

        Args:
            rank: this process's rank.
            size: number of ranks.
            by_program: the process group is made when the block calls ``init_process_group``.

        Raises:
            DeviceError: this process has a default process group, or PyTorch has none of NCCL.
        """
        raise NotImplementedError
