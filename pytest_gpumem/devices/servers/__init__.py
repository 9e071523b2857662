"""Observe the start of inference servers: their memory decisions, and why they refuse to start.

Each supported library has a module here with HOOKS, which maps names of the library's modules to
functions. Such a hook is called once its module is imported: it wraps functions of that module,
which then report to :class:`ServerWatch`.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.servers import sglang, vllm, web_server
from pytest_gpumem.devices.torch_import import IMPORTS
from pytest_gpumem.devices.variables import CHILDREN
from pytest_gpumem.measurement import ServerStart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

LIBRARIES: Final = (sglang, vllm, web_server)
PROFILING_RUN: Final = "server profiling run"
"""name of the test's part in which a server measures the memory that it needs besides the KV
cache"""
SUFFIX: Final = ".server"
"""suffix of the file that a process writes about its server"""


class ServerWatch:
    """Collects what this process sees of a server's start, and writes it for the measuring process.

    A server may run in several processes: one for each device, and one that sizes the cache. Each
    process writes its own file to the folders named by the environment variable CHILDREN.
    """

    def __init__(self) -> None:
        self.part: Callable[[str], AbstractContextManager[object]] = nullcontext
        """returns a context that measures a block as the named part of the test"""
        self.started: Callable[[], object] = nullcontext
        """called when the server has started in this process"""
        self.is_profiling = False
        """whether a profiling run is in progress, whose peak the server reads from PyTorch"""
        self.number: Callable[[int], int] = int
        """converts a device index of this process to the measuring process's index"""
        self._is_installed = False
        self._starts: dict[int, ServerStart] = {}
        self._shared: dict[str, Any] = {}
        """fields of ServerStart that are equal on all devices"""

    def install(self) -> None:
        """Register the hooks of all libraries, once for the life of the process."""
        if self._is_installed:
            return
        self._is_installed = True
        for library in LIBRARIES:
            for module, hook in library.HOOKS.items():
                IMPORTS.call_after(module, partial(hook, self))

    def forget(self) -> None:
        """Forget all starts, so that the next test begins without any."""
        self._starts.clear()
        self._shared.clear()

    @contextmanager
    def profiling_run(self) -> Iterator[None]:
        """Measure the block as the server's profiling run."""
        self.is_profiling = True
        try:
            with self.part(PROFILING_RUN):
                yield
        finally:
            self.is_profiling = False

    @contextmanager
    def observing(self, server: str) -> Iterator[None]:
        """Print the block's exception instead of raising it, so that the server still starts."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - another release of the server may differ
            reason = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"gpumem: figures of {server} cannot be read ({reason})\n")

    def decided(self, server: str, device: int, **figures: Any) -> None:  # noqa: ANN401 - of ServerStart
        """Record fields of a device's ServerStart."""
        start = self._starts.get(device, ServerStart(server, self.number(device)))
        self._starts[device] = replace(start, **figures)
        self._write()

    def decided_for_all(self, server: str, **figures: Any) -> None:  # noqa: ANN401 - of ServerStart
        """Record fields of ServerStart that all devices share, such as a refusal."""
        self._shared |= {"server": server, **figures}
        self._write()

    def _write(self) -> None:
        record = {
            "starts": [asdict(start) for start in self._starts.values()],
            "shared": self._shared,
        }
        for folder in filter(None, os.environ.get(CHILDREN, "").split(os.pathsep)):
            path = Path(folder) / f"{os.getpid()}{SUFFIX}"
            temporary = path.with_suffix(".part")
            with suppress(OSError):  # the folder is gone: this process outlives its parent
                temporary.write_text(json.dumps(record), encoding="utf-8")
                temporary.replace(path)


WATCH: Final = ServerWatch()


def read_starts(paths: Iterable[Path]) -> tuple[ServerStart, ...]:
    """Merge the files of a server's processes; return one start per device, ordered by device.

    A file written later replaces the figures of earlier ones: a test may start several servers.
    """
    starts: dict[int, ServerStart] = {}
    shared: dict[str, Any] = {}
    for path in paths:
        with suppress(OSError, ValueError):  # the process was killed while writing it
            record = json.loads(path.read_bytes())
            for fields in record["starts"]:
                fields["unseen"] = tuple(fields["unseen"])
                starts[fields["device"]] = ServerStart(**fields)
            shared |= record["shared"]
    if shared and not starts:
        return (ServerStart(device=0, **shared),)
    return tuple(replace(starts[device], **shared) for device in sorted(starts))
