"""Reading a snapshot's file, which may come from any machine: a pickle that can run nothing."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.errors import GpuMemError

if TYPE_CHECKING:
    import os
    from typing import NoReturn

_REMEDY: Final = "name a file of --gpumem-snapshots or of torch.cuda.memory._dump_snapshot"


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


def read_dump(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the snapshot in a file, as ``torch.cuda.memory._snapshot`` has it.

    Raises:
        SnapshotError: the file cannot be read, is no snapshot, or has more than plain containers.
    """
    name = str(path)
    try:
        with Path(path).open("rb") as stream:
            snapshot = _PlainUnpickler(stream).load()
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise SnapshotError(name, f"cannot be read: {problem}", _REMEDY) from error
    except _Refused as refused:
        problem = f"is a pickle that would call {refused}, which a snapshot never does"
        raise SnapshotError(name, problem, "do not load it with any other tool either") from None
    except Exception as error:
        # A damaged pickle raises whatever its instructions run into, MemoryError among them.
        problem = f"is not a pickle that can be read ({type(error).__name__})"
        raise SnapshotError(name, problem, _REMEDY) from error
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("segments"), list):
        problem = 'is no snapshot of PyTorch\'s allocator: it has no list of "segments"'
        raise SnapshotError(name, problem, _REMEDY)
    return snapshot
