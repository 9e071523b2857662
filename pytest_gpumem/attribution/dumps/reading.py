"""Reading a snapshot's file, which may come from any machine: a pickle that can run nothing."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from pytest_gpumem.errors import GpuMemError

if TYPE_CHECKING:
    import os
    from typing import NoReturn

_REMEDY: Final = "name a file of --gpumem-snapshots or of torch.cuda.memory._dump_snapshot"
VALUES_PER_BYTE: Final = 128
"""of a file, which may refer to a list many times; an event of 40 bytes may have a stack of 500
frames, each of seven values"""
FEW_VALUES: Final = 1_000_000
"""values that a file of any size may have"""
_CONTAINERS: Final = (dict, list, tuple, set, frozenset)


Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Frame(msgspec.Struct):
    """A line of a stack, of Python or C++."""

    filename: str
    name: str
    line: Count


class DumpedBlock(msgspec.Struct):
    """A block of a segment."""

    size: Count
    state: str
    address: Count | None = None
    frames: list[Frame] | None = None


class Segment(msgspec.Struct):
    """A segment when the snapshot was taken, sizes in bytes."""

    device: Count
    address: Count
    total_size: Count
    blocks: list[DumpedBlock]


class Event(msgspec.Struct):
    """An event of the recorded history."""

    action: str
    size: Count
    addr: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)] = -1
    """an out of memory has none"""
    frames: list[Frame] | None = None

    def __post_init__(self) -> None:
        if self.addr < 0 and self.action in {"alloc", "free_requested"}:
            raise ValueError(f"{self.action} without an address")


class DumpSettings(msgspec.Struct):
    """Settings of the allocator."""

    roundup_power2_divisions: dict[str, Count] | None = None


class Snapshot(msgspec.Struct):
    """All that is read of a snapshot; it may have more."""

    segments: list[Segment]
    device_traces: list[list[Event]] | None = None
    allocator_settings: DumpSettings | None = None


class SnapshotError(GpuMemError):
    """A file that is no snapshot of PyTorch's allocator, or is not safe to read."""


class _Refused(Exception):  # noqa: N818 - it never leaves this module
    """A pickle that asks for more than plain containers."""


class _PlainUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, tuples, text and figures; a pickle of more runs none of it."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        """Refuse every class and function: a snapshot has none."""
        raise _Refused(f"{module_name}.{global_name}")

    def persistent_load(self, pid: object, /) -> NoReturn:
        """Refuse a reference to an object outside of the pickle."""
        raise _Refused(f"a persistent object {pid!r:.60}")


def read_dump(path: str | os.PathLike[str]) -> Snapshot:
    """Return the snapshot in a file, which ``torch.cuda.memory._dump_snapshot`` has written.

    Raises:
        SnapshotError: the file cannot be read, is no snapshot, or has more than plain containers.
    """
    name = str(path)
    try:
        with Path(path).open("rb") as stream:
            snapshot = _PlainUnpickler(stream).load()
            read = stream.tell()
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise SnapshotError(name, f"cannot be read: {problem}", _REMEDY) from error
    except _Refused as refused:
        problem = f"is a pickle that would call {refused}, which no snapshot does"
        raise SnapshotError(name, problem, "do not load this file with any other tool") from None
    except Exception as error:
        # A damaged pickle raises whatever its instructions run into, MemoryError among them.
        problem = f"is not a pickle that can be read ({type(error).__name__})"
        raise SnapshotError(name, problem, _REMEDY) from error
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("segments"), list):
        problem = 'is no snapshot of PyTorch\'s allocator: it has no list of "segments"'
        raise SnapshotError(name, problem, _REMEDY)
    if _values(snapshot) > max(FEW_VALUES, VALUES_PER_BYTE * read):
        problem = f"refers to its lists too often: {read:,} bytes stand for too many values"
        raise SnapshotError(name, problem, _REMEDY)
    return as_snapshot(snapshot, name)


def _values(whole: Any) -> float:  # noqa: ANN401 - any plain container
    """Return the number of values in a container, those of a shared one at each of its places.

    It is infinite where a container is within itself. The time is that of the shared containers.
    """
    unfinished = 0.0
    counts: dict[int, float] = {}
    pending = [whole]
    while pending:
        container = pending[-1]
        key = id(container)
        values = [*container, *container.values()] if type(container) is dict else container
        inner = [value for value in values if isinstance(value, _CONTAINERS)]
        if key not in counts:
            counts[key] = unfinished
            if any(counts.get(id(value)) == unfinished for value in inner):
                return math.inf
            if missing := [value for value in inner if id(value) not in counts]:
                pending += missing
                continue
        counts[key] = 1.0 + len(values) + sum(counts[id(value)] for value in inner)
        pending.pop()
    return counts[id(whole)]


def as_snapshot(content: dict[str, Any], name: str) -> Snapshot:
    """Return a snapshot's plain containers, checked.

    Raises:
        SnapshotError: it has not the form of a snapshot.
    """
    try:
        return msgspec.convert(content, Snapshot)
    except (msgspec.ValidationError, UnicodeError) as error:
        problem = f"is not a readable snapshot: {error}"
        raise SnapshotError(name, problem, _REMEDY) from None
