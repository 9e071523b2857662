"""Peaks of the processes that a marked test or a program of ``gpumem run`` starts: ranks, workers.

Each Python process that uses a GPU leaves a file in the folders that the environment names: when it
initialises CUDA, and once more with its peaks when it ends, and with the values it decided by that
were not computed. A process that is killed leaves the first file only.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.devices.object_messages import carry_objects
from pytest_gpumem.devices.virtual.environment import (
    HOOK,
    INHERITED,
    PYTHON_PATH,
    prepend,
    set_variable,
    skip_shape_check,
)
from pytest_gpumem.measurement import Peak
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from pytest_gpumem.devices.base import Values
    from pytest_gpumem.devices.virtual.decisions import Decisions, Row
    from pytest_gpumem.devices.virtual.values.mode import ValueMode

PEAK_RESET: Final = Patch(
    "torch._C",
    "_cuda_resetPeakMemoryStats",
    reason="a child process keeps the peaks that its program resets, to tell them to its parent",
)
VARIABLE: Final = "GPUMEM_CHILDREN"
"""the environment's name for the folders: a test's, and that of a ``gpumem run`` around it"""
IMPORTER: Final = os.getpid()
"""the process that imported this; any other one that has it is a fork"""
VALUES: Final = "GPUMEM_VALUES"
"""the environment's name for the values that are computed"""


class Child(NamedTuple):
    """One process that used a GPU."""

    name: str
    """"rank 1 (pid 4711)", or its script with its number"""
    peaks: dict[int, Peak]
    """by device; only those that it used"""
    ended: bool
    """whether it told its peaks; False while it runs, and after a kill or ``os._exit``"""
    guesses: Sequence[Sequence[Row]] = ((), ())
    """the unknown and the assumed values that it decided by, as Decisions counts them"""
    notes: Sequence[str] = ()
    """sentences on values that were not computed, where all should have been"""


class ChildWatch:
    """The processes that this one starts, and theirs, where they use a GPU."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._owner = 0
        """the process that made the folder; a fork of it makes another one"""

    @contextmanager
    def watching(self, values: Values) -> Iterator[None]:
        """Have the processes that are started in the block leave their peaks.

        Args:
            values: which values they compute on the virtual GPU, from their start.
        """
        self.forget_ended()
        with ExitStack() as stack:
            prepend(stack, VARIABLE, str(self._own_folder()))
            prepend(stack, PYTHON_PATH, HOOK)
            set_variable(stack, VALUES, values)
            yield

    def _own_folder(self) -> Path:
        if self._folder is None or self._owner != os.getpid():
            self._folder = folder = Path(tempfile.mkdtemp(prefix="gpumem-"))
            self._owner = owner = os.getpid()

            def remove() -> None:
                if os.getpid() == owner:
                    # A launcher's ranks may outlive it by a moment, and write meanwhile.
                    shutil.rmtree(folder, ignore_errors=True)

            atexit.register(remove)
        return self._folder

    def forget_ended(self) -> None:
        """Forget all processes but those that still run, as a fixture's server may."""
        for path, record in self._records():
            if record["peaks"] is not None or not _runs(record["pid"]):
                path.unlink(missing_ok=True)

    def _records(self) -> list[tuple[Path, dict[str, Any]]]:
        records = []
        for path in self._own_folder().glob("*.json"):
            with suppress(OSError, ValueError):
                records.append((path, json.loads(path.read_bytes())))
        return records

    def children(self) -> list[Child]:
        """Return the processes that used a GPU, ranks in their order."""
        records = [record for _, record in self._records()]
        records.sort(key=lambda record: (record["rank"] is None, record["rank"], record["pid"]))
        children = []
        for record in records:
            name = record["script"] if record["rank"] is None else f"rank {record['rank']}"
            peaks = {int(index): Peak(*sizes) for index, sizes in (record["peaks"] or {}).items()}
            ended = record["peaks"] is not None
            values = record["guesses"], record["notes"]
            children.append(Child(f"{name} (pid {record['pid']})", peaks, ended, *values))
        self._leave_as_a_fork()
        return children

    def _leave_as_a_fork(self) -> None:
        """Remove the folder of a forked process, unless another process uses it.

        Such a process (pytest-forked's) may end without Python's exit functions.
        """
        if self._folder is not None and os.getpid() != IMPORTER:
            with suppress(OSError):  # it is not empty
                self._folder.rmdir()
                self._folder = None


CHILDREN: Final = ChildWatch()
"""those of marked tests"""
CHILD_PROCESSES: Final = "child processes"
"""the name of the part of a test that they are"""


def value_notes(children: Sequence[Child], root: Path) -> list[Note]:
    """Return notes on values that child processes decided by and that were not computed.

    They name no process, and are the same in whatever order the processes ended.
    """
    # Each Python process that a test starts imports this file, and most need no more of it.
    from pytest_gpumem.devices.virtual.decisions import Decisions

    decisions = Decisions()
    for child in children:
        decisions.add(child.guesses)
    uncomputed = sorted({note for child in children for note in child.notes})
    return [
        Note(NoteKind.VALUES, f"in child processes: {sentence}")
        for sentence in (*decisions.notes(root), *uncomputed)
    ]


def _runs(pid: int) -> bool:
    """Return whether a process runs; one that has ended, and is not waited for, does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in {"Z", "X"}


def watch_this_process() -> None:
    """Adapt this process to its parent's virtual GPU, and note its peaks for its parent."""
    from pytest_gpumem.devices.torch_import import IMPORTS

    folders, inherits = os.environ.get(VARIABLE), INHERITED in os.environ
    if "torch" in sys.modules or not (folders or inherits):
        return

    if inherits:
        from pytest_gpumem.devices.virtual.missing_libraries import supply_missing_libraries

        supply_missing_libraries()

    def imported(torch: ModuleType) -> None:
        if inherits:
            skip_shape_check(ExitStack())  # never closed: for as long as the process lives
            carry_objects(sys.modules.get("torch.distributed"))
        if torch.version.cuda:
            watch = _Watch(torch, [Path(folder) for folder in (folders or "").split(os.pathsep)])
            if inherits:
                watch.number_on_the_machine = _machine_device
                torch.cuda._lazy_call(watch.begin_values)
            if folders:
                watch.begin()

    IMPORTS.call_after("torch", imported)


def watch_this_fork() -> None:
    """Note the peaks of this process, a fork that uses CUDA first, for the program it is of."""
    import torch

    from pytest_gpumem.devices.virtual.device import VirtualDevice

    folders = os.environ.get(VARIABLE, "").split(os.pathsep)
    device = VirtualDevice.loaded()
    watch = _Watch(torch, [Path(folder) for folder in folders])
    if device is not None:
        watch.take_values(*device.values.counted)
    watch.begin()


def _machine_device(device: int) -> int:
    from pytest_gpumem.devices.virtual.library import NativeLibrary

    return NativeLibrary().machine_device(device)


class _Watch:
    """The peaks of this process, resets by its own code not counted, and its values."""

    def __init__(self, torch: ModuleType, folders: list[Path]) -> None:
        self._torch: Any = torch
        self._folders = folders
        self.number_on_the_machine: Callable[[int], int] = int
        """returns the parent's number of a device of this process"""
        self._peaks: dict[int, Peak] = {}
        self._decisions: Decisions | None = None
        self._stack = ExitStack()
        self._mode: ValueMode | None = None
        self._failure = ""
        """the reason why it has no values"""

    def begin_values(self) -> None:
        """Compute values, and count the unknown ones, from now on: as CUDA is initialised."""
        from pytest_gpumem.devices.virtual.decisions import Decisions
        from pytest_gpumem.devices.virtual.device import VirtualDevice
        from pytest_gpumem.devices.virtual.library import NativeLibrary
        from pytest_gpumem.devices.virtual.uncertain_numbers import watching

        if VirtualDevice.loaded() is not None:
            return  # a session of pytest, or use_virtual_gpu(), which have values of their own
        scope: Any = os.environ.get(VALUES, "off")
        try:
            library = NativeLibrary()
            self._decisions = decisions = Decisions(library.set_endless)
            self._stack.enter_context(watching(decisions, library))
            if scope != "off":
                from pytest_gpumem.devices.virtual.values.mode import ValueMode

                self._mode = ValueMode(library, scope, decisions).__enter__()
        except Exception as error:  # noqa: BLE001 - PyTorch would let it fail the use of CUDA
            self._failure = f"no values are computed: {type(error).__name__}: {error}"

    def take_values(self, decisions: Decisions, mode: ValueMode | None) -> None:
        """Tell of values that are computed already."""
        self._decisions, self._mode = decisions, mode

    def begin(self) -> None:
        """Wait for CUDA's initialisation."""

        def folding(reset: Callable[[int], object]) -> Callable[[int], object]:
            def reset_peaks(device: int) -> object:
                self._fold()
                return reset(device)

            return reset_peaks

        def announce() -> None:
            from multiprocessing.util import Finalize

            self._write(None)
            # multiprocessing's children end without Python's exit functions, but run these.
            Finalize(None, self._end, exitpriority=0)
            atexit.register(self._end)

        PEAK_RESET.wrap(self._torch._C, folding)
        self._torch.cuda._lazy_call(announce)

    def _end(self) -> None:
        with suppress(Exception):  # at an interpreter's end anything may be gone
            self._fold()
            self._write(
                {
                    self.number_on_the_machine(index): [peak.allocated, peak.reserved]
                    for index, peak in self._peaks.items()
                    if peak.reserved
                }
            )

    def _fold(self) -> None:
        cuda = self._torch.cuda
        for index in range(cuda.device_count()):
            old = self._peaks.get(index, Peak(0, 0))
            self._peaks[index] = Peak(
                max(old.allocated, cuda.max_memory_allocated(index)),
                max(old.reserved, cuda.max_memory_reserved(index)),
            )

    def _write(self, peaks: dict[int, list[int]] | None) -> None:
        rank = os.environ.get("RANK", "")
        record = {
            "pid": os.getpid(),
            "rank": int(rank) if rank.isdecimal() else None,
            "script": Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python",
            "peaks": peaks,
            "guesses": self._decisions.rows() if self._decisions else ((), ()),
            "notes": [*(self._mode.notes() if self._mode else ()), *filter(None, [self._failure])],
        }
        for folder in self._folders:
            path = folder / f"{os.getpid()}.json"
            temporary = path.with_suffix(".part")
            with suppress(OSError):  # the folder is gone: this process outlives its parent
                temporary.write_text(json.dumps(record), encoding="utf-8")
                temporary.replace(path)
