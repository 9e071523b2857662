"""The protocol of a device, real or virtual: code that measures can't tell them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.devices.memory_use import UseWatch
    from pytest_gpumem.measurement import DeviceInfo, DeviceKind
    from pytest_gpumem.notes import Note

Values = Literal["auto", "full", "off"]
"""values that a virtual GPU computes: within a test's budget, all, none"""

RangeEnd = Literal["usual", "least", "most"]
"""the size that is taken of a workspace whose library tells none"""

WorkspaceUse = Literal["passing", "kept", "held", "end", "in use", "planned"]
"""how long PyTorch keeps a workspace that it asked for: until the call has ended; as long as the
block that was allocated last before it; until an operation's descriptors are destroyed ("end"); or
a library was given it for one call, of a plan or without"""


class Workspace(NamedTuple):
    """A workspace whose size lies in a range, in bytes."""

    time: float
    """microseconds since 1970: of the question for its size, or of the call that it was for"""
    use: WorkspaceUse
    address: int
    """of one that is in use; 0: PyTorch allocated none"""
    least: int
    usual: int
    """the size that was answered; a number of elements, where a library is asked for that"""
    most: int


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


class ExtraRequests(NamedTuple):
    """Requests that a GPU may make besides those of the run: it decides by time whether it does."""

    time: float
    """microseconds since 1970, as ``ended``"""
    ended: float
    """what is not given back before is given back then"""
    device: int
    stream: int
    requests: tuple[int, ...]
    """the bytes of each block, in their order; 0 gives the last one back that is still held"""
    reason: str
    """the choice that is not known"""
    counted: bool
    """whether they count for a peak allocated: what a compiler allocates for itself does not"""
    beside: tuple[int, ...] = ()
    """addresses of blocks: while one of them lives, what is not given back is held as well"""
    instead: int = 0
    """address of a block in whose place they are: the first is made when it is given back"""
    since: float = 0
    """blocks that are older than this do not count"""


class UncertainSizes(NamedTuple):
    """Numbers of workspaces that may be smaller, or larger, than they were taken."""

    smaller: int = 0
    larger: int = 0
    """also tensors of other streams that a GPU may keep for longer, and extra requests"""
    reason: str = ""
    """the choice that is not known: "cuDNN's choice in benchmark mode" """
    judged: bool = False
    """whether limits are held to the largest of them"""
    margin: int = 0
    """percent that may be reserved beyond the largest, and below the least down to the
    allocated: so much depends on which of many workspaces the allocator's cache had room for"""
    unfit: int = 0
    """how often the larger found no room, and a smaller was taken"""


class ValueEngine(Protocol):
    """The values of a device's steps: a GPU computes them all, a virtual GPU the small ones."""

    @property
    def all_computed(self) -> bool:
        """Whether all values are computed, so that they mean something."""

    def compute(self, scope: Values) -> None:
        """Compute values within a test's budget from now on ("auto"), all ("full") or none ("off").

        A GPU computes all of them whatever is asked for.
        """

    def renew(self) -> None:
        """Begin anew with a test's budget of values: its body runs, or runs again."""

    def apart(self) -> AbstractContextManager[None]:
        """Return a context whose values count for no test's budget: a fixture of wider scope's."""

    def has_guessed(self, *, failed: bool = False) -> bool:
        """Return whether the step decided by values that are unknown or assumed.

        Args:
            failed: whether it failed by a value: values that it only kept count then.
        """

    def assume_masks(self, share: float) -> None:
        """Take this share of each unknown mask to be true, until the device is closed."""


class WorkspaceSizes(Protocol):
    """The workspaces since a device was opened that may have another size on a real GPU."""

    def uncertain(self) -> UncertainSizes:
        """Return how many of them there are, and why their sizes are not known."""

    def used(self) -> list[Workspace] | None:
        """Return these workspaces, in the order of their times; None: they are too many."""

    def allocator_events(self) -> list[AllocatorEvent] | None:
        """Return the allocator's events, in the order of its questions; None: they are too many."""

    def extra_requests(self) -> list[ExtraRequests] | None:
        """Return the requests that a GPU may make besides; None: too many."""

    def pinned_early(self) -> bool:
        """Return whether pinned memory was free again before a GPU may have copied it."""


class Device(Protocol):
    """A kind of GPU that steps can run on."""

    @property
    def kind(self) -> DeviceKind:
        """The kind: "cuda" or "virtual"."""

    @property
    def values(self) -> ValueEngine:
        """The values of its steps."""

    @property
    def workspaces(self) -> WorkspaceSizes:
        """The workspaces whose sizes are not known."""

    @property
    def first(self) -> int:
        """The number of the first device to measure on, as this process has them."""

    def expected(self) -> DeviceInfo | None:
        """Return the device that ``open`` will give, for the session's header.

        Torch is not imported for it; None where it is not known without.
        """

    def driver(self) -> str:
        """Return the driver's version, for the provenance."""

    def open(self, card: Card | None, count: int) -> DeviceInfo:
        """Make ``count`` devices ready, as ``card`` where one is named.

        A real GPU does not change with the card's name: the card's memory is then a cap.

        Raises:
            DeviceError: the device is missing, or is another one than was asked for.
        """

    def await_use(self, count: int, begin: Callable[[], None]) -> None:
        """Show ``count`` devices, and call a function when this process first uses CUDA.

        Before that CUDA is not initialised: processes that are forked meanwhile can use it, and
        call the function themselves.

        Args:
            count: the number of devices.
            begin: it calls ``open``. ``open`` calls it first, where CUDA was not used as yet.
        """

    def close(self) -> None:
        """Undo ``open``: to code outside of marked tests the machine is as it was."""

    def cap_total(self, index: int) -> int:
        """Return the bytes that PyTorch's memory fraction is a fraction of, on one device."""

    def make_room(self, extra: list[int]) -> None:
        """Give each device so many bytes beyond its card's memory, where that is possible.

        Foreign memory at the beginning of a step must not reduce the memory that the step can have.
        """

    def trouble(self) -> str | None:
        """Return the event since ``open`` that makes the figures worthless; None: no such event."""

    def notes(self, root: Path) -> list[Note]:
        """Return notes that a reader should know about the run since ``open``.

        Files are named as seen from ``root``.
        """

    def watch(self, devices: range) -> UseWatch:
        """Return a watch on the memory in use on some devices while a step runs."""

    def turn(self) -> AbstractContextManager[None]:
        """Return a test's turn on the devices that were opened: other processes' tests wait."""
