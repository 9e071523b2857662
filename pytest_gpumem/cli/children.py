"""Peaks of the processes that a program of ``gpumem run`` starts: ranks of a launcher, workers.

Each Python process that uses a GPU leaves a file in a folder that the environment names: when it
initialises CUDA, and once more with its peaks when it ends. A process that is killed leaves the
first file only.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.devices.virtual.environment import (
    HOOK,
    INHERITED,
    PYTHON_PATH,
    prepend,
    set_variable,
    skip_shape_check,
)
from pytest_gpumem.measurement import Peak

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

VARIABLE: Final = "GPUMEM_RUN_CHILDREN"
"""the environment's name for the folder"""


class Child(NamedTuple):
    """One process that used a GPU."""

    name: str
    """"rank 1 (pid 4711)", or its script with its number"""
    peaks: dict[int, Peak]
    """by device; only those that it used"""
    ended: bool
    """whether it told its peaks; False after a kill or ``os._exit``"""


@contextmanager
def watched_children() -> Iterator[Path]:
    """Have the processes that are started in the block leave their peaks in the folder."""
    with ExitStack() as stack:
        # A launcher's ranks may outlive it by a moment, and write while the folder is removed.
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        set_variable(stack, VARIABLE, folder)
        prepend(stack, PYTHON_PATH, HOOK)
        yield Path(folder)


def read_children(folder: Path) -> list[Child]:
    """Return the processes that left a file, ranks in their order."""
    records = []
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError):
            records.append(json.loads(path.read_bytes()))
    records.sort(key=lambda record: (record["rank"] is None, record["rank"], record["pid"]))
    children = []
    for record in records:
        name = record["script"] if record["rank"] is None else f"rank {record['rank']}"
        peaks = {int(index): Peak(*sizes) for index, sizes in (record["peaks"] or {}).items()}
        children.append(Child(f"{name} (pid {record['pid']})", peaks, record["peaks"] is not None))
    return children


def watch_this_process() -> None:
    """Adapt this process to its parent's virtual GPU, and note its peaks for ``gpumem run``."""
    from pytest_gpumem.devices.torch_import import TorchImportHook

    folder, inherits = os.environ.get(VARIABLE), INHERITED in os.environ
    if "torch" in sys.modules or not (folder or inherits):
        return

    def imported(torch: ModuleType) -> None:
        if inherits:
            skip_shape_check(ExitStack())  # never closed: for as long as the process lives
        if folder and torch.version.cuda:
            _Watch(torch, Path(folder)).begin()

    TorchImportHook(imported).install()


class _Watch:
    """The peaks of this process, resets by its own code not counted."""

    def __init__(self, torch: ModuleType, folder: Path) -> None:
        self._torch: Any = torch
        self._folder = folder
        self._peaks: dict[int, Peak] = {}

    def begin(self) -> None:
        """Wait for CUDA's initialisation."""
        binding = self._torch._C._cuda_resetPeakMemoryStats

        def reset_peaks(device: int) -> object:
            self._fold()
            return binding(device)

        def announce() -> None:
            import atexit
            from multiprocessing.util import Finalize

            self._write(None)
            # multiprocessing's children end without Python's exit functions, but run these.
            Finalize(None, self._end, exitpriority=0)
            atexit.register(self._end)

        self._torch._C._cuda_resetPeakMemoryStats = reset_peaks
        self._torch.cuda._lazy_call(announce)

    def _end(self) -> None:
        with suppress(Exception):  # at an interpreter's end anything may be gone
            self._fold()
            self._write(
                {
                    index: [peak.allocated, peak.reserved]
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
        }
        path = self._folder / f"{os.getpid()}.json"
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(record), encoding="utf-8")
        temporary.replace(path)
