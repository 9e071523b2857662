"""Collects peaks of processes that a marked test or ``gpumem run`` starts, such as ranks.

Each Python process that uses a GPU writes a file to the folders that an environment variable names:
when it initializes CUDA, and again when it ends. The final file has the process's peaks, its
branches on values that were not computed, and notes on its figures. The file of a process that is
killed has no peaks, unless the process is an inference server that had started. If the test is
measured on another accelerator, a process writes the peaks of that accelerator.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from pytest_gpumem.backend import CUDA
from pytest_gpumem.devices import virtual
from pytest_gpumem.devices.servers import SUFFIX, WATCH, read_starts
from pytest_gpumem.devices.torch_import import IMPORTS
from pytest_gpumem.devices.variables import CHILDREN as FOLDERS
from pytest_gpumem.devices.variables import HOOK, PYTHON_PATH, UNTIL_STARTED, prepend, set_variable
from pytest_gpumem.measurement import Attribution, Peak
from pytest_gpumem.notes import Note, NoteKind, notes_of
from pytest_gpumem.patches import Patch, wrapped_by
from pytest_gpumem.processes import is_running
from pytest_gpumem.recording.allocator_view import PEAK_RESETS, VIEW
from pytest_gpumem.recording.recording import Span, now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    from pytest_gpumem.devices.base import Values
    from pytest_gpumem.measurement import ServerStart

PEAK_RESET: Final = Patch(
    "torch._C",
    *PEAK_RESETS,
    reason="a child process keeps the peaks that its program resets, to report them to its parent",
)
GROUP_JOINED: Final = Patch(
    "torch.distributed",
    *(f"{module}init_process_group" for module in ("", "distributed_c10d.", "device_mesh.")),
    reason="a child process without the variable RANK reports the rank with which it joins a group",
)
MEASURED: Final = "GPUMEM_CHILDREN_DEVICE"
"""environment variable with the type of device that the test is measured on: "cuda", "xpu" """
EXPLAINER: Final = "GPUMEM_CHILDREN_EXPLAINED"
"""environment variable with the class that attributes a process's peaks, and the project's folder:
"module:class:folder". A child process imports the class by name, because the package ``devices``
may not import ``explain``, which has the class"""
KILLED: Final = "an inference server was killed: its peaks are those until it had started"
IMPORTER: Final = os.getpid()
"""id of the process that imported this module: a process with another id is a fork of it"""


class ChildPart(NamedTuple):
    """A part of a process's run that has its own peaks."""

    peaks: dict[int, Peak]
    """peaks by the index of each device"""
    attributions: Mapping[int, Attribution] = MappingProxyType({})
    """attributions of the peaks, if the process recorded them"""


class Child(NamedTuple):
    """A process that used a GPU, or may have used one."""

    name: str
    """"rank 1 (pid 4711)"; "train.py (pid 4711)" if it has no rank"""
    part: str
    """the test's part that the process belongs to: "rank 1"; CHILD_PROCESSES if it has no rank"""
    peaks: dict[int, Peak]
    """peaks by the index of each device that the process used"""
    ended: bool
    """whether the process wrote its peaks: False while it runs (except for a server that has
    started), and after a kill or ``os._exit``"""
    guesses: virtual.GuessRows = ((), ())
    notes: Sequence[Note] = ()
    """notes on uncertain figures of the process"""
    attributions: Mapping[int, Attribution] = MappingProxyType({})
    """attributions of the peaks, if the process recorded them"""
    parts: Mapping[str, ChildPart] = MappingProxyType({})
    """by name: parts of the process's run"""
    is_user: bool = True
    """whether the process is known to have used a GPU; with some accelerators this is known only
    once the process has ended"""

    @property
    def use(self) -> str:
        """Return a predicate for sentences that says whether the process used a GPU."""
        return "used the GPU" if self.is_user else "may have used the GPU"


class ChildWatch:
    """Collects the GPU peaks of the processes that this one starts, and of their own children."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._owner = 0
        """id of the process that created the folder; 0: none. A fork creates its own folder"""

    @contextmanager
    def watching(self, values: Values, explainer: str = "") -> Iterator[None]:
        """Make processes started in the block write their peaks.

        Args:
            values: which values the processes compute on the virtual GPU.
            explainer: the class that attributes the processes' peaks; see EXPLAINER.
        """
        self.forget_ended()
        WATCH.install()
        with ExitStack() as stack:
            prepend(stack, FOLDERS, str(self._own_folder()))
            prepend(stack, PYTHON_PATH, HOOK)
            set_variable(stack, MEASURED, VIEW.backend.device_type)
            set_variable(stack, virtual.VALUES, values)
            set_variable(stack, EXPLAINER, explainer)
            yield

    def _own_folder(self) -> Path:
        if self._folder is None or self._owner != os.getpid():
            self._folder = folder = Path(tempfile.mkdtemp(prefix="gpumem-"))
            self._owner = owner = os.getpid()

            def remove() -> None:
                if os.getpid() == owner:
                    # Errors are ignored, because a launcher's ranks may outlive it and still write.
                    shutil.rmtree(folder, ignore_errors=True)

            atexit.register(remove)
        return self._folder

    def forget_ended(self) -> None:
        """Forget processes that have ended, and all starts of servers."""
        for path, record in self._records():
            if record["peaks"] is not None or not is_running(record["pid"]):
                path.unlink(missing_ok=True)
        WATCH.forget()
        for path in self._own_folder().glob(f"*{SUFFIX}"):
            path.unlink(missing_ok=True)

    def server_starts(self) -> tuple[ServerStart, ...]:
        """Return the starts of inference servers in this process and in its child processes."""
        files = self._own_folder().glob(f"*{SUFFIX}")
        return read_starts(sorted(files, key=lambda path: path.stat().st_mtime_ns))

    def _records(self) -> list[tuple[Path, dict[str, Any]]]:
        records = []
        for path in self._own_folder().glob("*.json"):
            with suppress(OSError, ValueError):
                records.append((path, json.loads(path.read_bytes())))
        return records

    def children(self) -> list[Child]:
        """Return the processes that used or may have used a GPU: first the ranks, in order."""
        records = [record for _, record in self._records()]
        records.sort(key=lambda record: (record["rank"] is None, record["rank"], record["pid"]))
        children = []
        for record in records:
            ranked = record["rank"] is not None
            part = f"rank {record['rank']}" if ranked else CHILD_PROCESSES
            name = part if ranked else record["script"]
            ended = record["peaks"] is not None
            notes = msgspec.convert(record["notes"], list[Note])
            whole = _read_part(record)
            parts = {each: _read_part(plain) for each, plain in record["parts"].items()}
            name = f"{name} (pid {record['pid']})"
            told = (ended, record["guesses"], notes)
            is_user = bool(whole.peaks) or record["is_user"]
            if ended and not is_user:
                continue
            children.append(
                Child(name, part, whole.peaks, *told, whole.attributions, parts, is_user)
            )
        # Remove the folder of a forked process (pytest-forked's) here: the process may end without
        # running Python's exit functions.
        if self._folder is not None and os.getpid() != IMPORTER:
            with suppress(OSError):  # not empty: another process uses the folder
                self._folder.rmdir()
                self._folder = None
        return children


CHILDREN: Final = ChildWatch()
"""watches the processes that marked tests start"""
CHILD_PROCESSES: Final = "child processes"
"""name of the test part for processes without a rank"""


def _read_part(record: Mapping[str, Any]) -> ChildPart:
    peaks = {int(index): Peak(*sizes) for index, sizes in (record["peaks"] or {}).items()}
    attributions = {
        int(index): msgspec.convert(plain, Attribution)
        for index, plain in record["attributions"].items()
    }
    return ChildPart(peaks, attributions)


def process_notes(children: Sequence[Child], root: Path) -> list[Note]:
    """Return notes on child processes' figures, and on uncomputed values that they branched on.

    The notes name no process, and do not depend on the order in which the processes ended.
    """
    device = virtual.loaded()  # without a virtual GPU, children have none either
    guesses = device.values.guess_notes((c.guesses for c in children), root) if device else ()
    notes = [*notes_of(NoteKind.VALUES, guesses)]
    notes += sorted({note for child in children for note in child.notes}, key=str)
    return [replace(note, text=f"in child processes: {note}") for note in notes]


def watch_this_process() -> None:
    """Use the parent's virtual GPU in this process, and write peaks for the parent."""
    if "torch" in sys.modules:
        return
    inherited, folders = virtual.begin_in_child(), os.environ.get(FOLDERS)

    def imported(torch: ModuleType) -> None:
        measured = os.environ.get(MEASURED, CUDA.device_type)
        if measured != CUDA.device_type:
            _Watch(torch, measured).begin()
        elif torch.version.cuda:
            watch = _Watch(torch)
            if inherited is not None:
                watch.report = inherited.report
                watch.number_on_the_machine = inherited.machine_device
            watch.begin()

    if folders:
        IMPORTS.call_after("torch", imported)


def watch_this_fork() -> None:
    """Write the peaks of this process, which was forked before its program used CUDA."""
    import torch

    watch, device = _Watch(torch), virtual.loaded()
    if device is not None:
        watch.report = device.report
    watch.begin()


class _Watch:
    """Records this process's peaks for its parent; resets by its program do not lower them."""

    def __init__(self, torch: ModuleType, device_type: str = CUDA.device_type) -> None:
        self._torch: Any = torch
        self._device_type = device_type
        self._folders = [Path(name) for name in os.environ.get(FOLDERS, "").split(os.pathsep)]
        self.number_on_the_machine: Callable[[int], int] = int
        """returns the parent's index of a device of this process"""
        self.report: Callable[[], tuple[virtual.GuessRows, Sequence[Note]]] = lambda: (((), ()), ())
        """returns the uncomputed values that the process branched on, and notes on its figures"""
        self._is_user = True
        """whether the process is known to use a device of the measured type"""
        self._rank = os.environ.get("RANK", "")
        self._peaks: dict[int, Peak] = {}
        self._parts: dict[str, tuple[dict[int, Peak], Span]] = {}
        """by name of a part: its peaks, and when it ran"""
        self._explainer: Any = None
        self._attributions: dict[str, dict[int, Any]] = {}
        """by part ("" is the whole run): attributions of the peaks, once the explainer has run"""
        self._explained: dict[int, Peak] = {}
        """the peaks of the whole run that the attributions explain"""
        self._began = now()

    def begin(self) -> None:
        """Start recording as soon as CUDA, or the accelerator, is initialized."""

        def fold_and_reset(reset: Callable[[int], object], device: int) -> object:
            self._fold()
            return reset(device)

        def join(initialise: Callable[..., object], *arguments: object, **options: object) -> None:
            initialise(*arguments, **options)
            self._rank = str(self._torch.distributed.get_rank())

        def announce() -> None:
            self._write({"peaks": None, "attributions": {}, "parts": {}})
            name, _, root = os.environ.get(EXPLAINER, "").rpartition(":")
            module, _, kind = name.rpartition(":")
            if module and self._device_type == CUDA.device_type:
                with suppress(Exception):  # a report must not break the child's own use of CUDA
                    self._explainer = getattr(importlib.import_module(module), kind)(root)
            self._write_at_end()

        PEAK_RESET.wrap(self._torch._C, wrapped_by(fold_and_reset))
        WATCH.part, WATCH.number = self._part, self.number_on_the_machine
        WATCH.started = self._server_started
        WATCH.install()
        GROUP_JOINED.wrap(self._torch.distributed, wrapped_by(join))
        module: Any = None
        with suppress(RuntimeError):  # the program imports the accelerator's package later
            module = self._torch.get_device_module(self._device_type)
        if hasattr(module, "_lazy_call"):  # torch.cuda and torch.xpu have it
            module._lazy_call(announce)
        else:
            self._is_user = False
            announce()

    def _write_at_end(self) -> None:
        """Write the peaks at the end of the process."""
        from multiprocessing.util import Finalize, register_after_fork

        def finalize(watch: _Watch) -> None:
            Finalize(None, watch._end, exitpriority=0)

        # multiprocessing's children skip atexit's functions, but run Finalize objects. They first
        # drop those that were registered while the main module was imported, and then call the
        # functions of register_after_fork, so another Finalize is registered there.
        finalize(self)
        register_after_fork(self, finalize)
        atexit.register(self._end)

    @property
    def _memory(self) -> Any:  # noqa: ANN401 - a module of torch
        """The module with the functions of memory: torch.cuda or torch.accelerator."""
        is_cuda = self._device_type == CUDA.device_type
        return self._torch.cuda if is_cuda else self._torch.accelerator

    def _devices(self) -> range:
        """Return the devices of the measured type that this process can use."""
        if self._device_type != CUDA.device_type:
            accelerator = self._torch.accelerator.current_accelerator()
            if accelerator is None or accelerator.type != self._device_type:
                return range(0)
        return range(self._memory.device_count())

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Measure the block as a part of the process's run."""
        self._fold()
        whole, self._peaks = self._peaks, {}
        began = now()
        for index in self._devices():
            self._memory.reset_peak_memory_stats(index)
        self._peaks = {}
        try:
            yield
        finally:
            self._fold()
            self._parts[name] = self._peaks, Span(began, now())
            self._peaks = {
                index: _higher(peak, whole.get(index)) for index, peak in self._peaks.items()
            }
            # End the recording here: a server captures CUDA graphs next, which would take minutes
            # longer while its history is recorded.
            self._attribute()

    def _end(self) -> None:
        with suppress(Exception):  # at interpreter shutdown anything may be gone
            self._write_peaks()

    def _write_peaks(self, *notes: Note) -> None:
        """Write the peaks so far."""
        self._fold()
        self._attribute()
        parts = {name: self._plain(name, peaks) for name, (peaks, _) in self._parts.items()}
        self._write({**self._plain("", self._peaks), "parts": parts}, *notes)

    def _attribute(self) -> None:
        """End the recording, and attribute the peaks.

        A later call only drops the whole run's attributions, if its peaks have risen since.
        """
        explainer, self._explainer = self._explainer, None
        if explainer is not None:
            self._explained = dict(self._peaks)
            measured = {"": (self._peaks, Span(self._began, now())), **self._parts}
            with suppress(Exception):  # a report must not break the program
                self._attributions = explainer.attributions(measured)
        elif self._peaks != self._explained:
            self._attributions.pop("", None)

    def _server_started(self) -> None:
        """Write the peaks once a server has started, as it may be killed when it is stopped."""
        notes = [] if os.environ.get(UNTIL_STARTED) else [Note(NoteKind.CHILD_PROCESS, KILLED)]
        with suppress(Exception):  # a report must not break the server
            self._write_peaks(*notes)

    def _plain(self, part: str, peaks: Mapping[int, Peak]) -> dict[str, Any]:
        number, attributions = self.number_on_the_machine, self._attributions.get(part, {})
        return {
            "peaks": {
                number(index): [peak.allocated, peak.reserved]
                for index, peak in peaks.items()
                if peak.reserved
            },
            "attributions": {number(index): plain for index, plain in attributions.items()},
        }

    def _fold(self) -> None:
        memory = self._memory
        for index in self._devices():
            allocated = memory.max_memory_allocated(index)
            # A backend may count no reserved memory.
            peak = Peak(allocated, max(allocated, memory.max_memory_reserved(index)))
            self._peaks[index] = _higher(peak, self._peaks.get(index))

    def _write(self, measured: Mapping[str, Any], *more: Note) -> None:
        guesses, notes = self.report()
        record = {
            "pid": os.getpid(),
            "rank": int(self._rank) if self._rank.isdecimal() else None,
            "script": Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python",
            "is_user": self._is_user,
            "guesses": guesses,
            "notes": msgspec.to_builtins([*notes, *more]),
            **measured,
        }
        for folder in self._folders:
            path = folder / f"{os.getpid()}.json"
            temporary = path.with_suffix(".part")
            with suppress(OSError):  # the folder is gone: this process outlives its parent
                temporary.write_text(json.dumps(record), encoding="utf-8")
                temporary.replace(path)


def _higher(peak: Peak, other: Peak | None) -> Peak:
    if other is None:
        return peak
    return Peak(max(peak.allocated, other.allocated), max(peak.reserved, other.reserved))
