"""Observe how inference servers start: what they decide on memory, and why they refuse.

Each server's library has a module here, with HOOKS: by name of a module of the library, a function
that replaces some of its functions once it is imported. They report to :class:`ServerWatch`.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.servers import vllm, web_server
from pytest_gpumem.devices.torch_import import IMPORTS
from pytest_gpumem.devices.variables import CHILDREN
from pytest_gpumem.measurement import ServerStart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

LIBRARIES: Final = (vllm, web_server)
PROFILING_RUN: Final = "server profiling run"
"""name of the test's part in which a server measures what it needs beside the KV cache"""
SUFFIX: Final = ".server"
"""suffix of the file that a process writes about its server"""


class ServerWatch:
    """Collects what a server in this process decides, and writes it for the measuring process.

    A server may run in several processes: one for each device, and one that sizes the cache. Each
    writes a file of its own to the folders that the environment variable CHILDREN names.
    """

    def __init__(self) -> None:
        self.part: Callable[[str], AbstractContextManager[object]] = nullcontext
        """measures a block as a part of the test"""
        self.started: Callable[[], object] = nullcontext
        """called when the server has started in this process"""
        self.number: Callable[[int], int] = int
        """returns the test's index of a device of this process"""
        self._starts: dict[int, ServerStart] = {}
        self._shared: dict[str, Any] = {}
        """figures of all devices"""

    def install(self) -> None:
        """Register the hooks of all libraries, for the life of the process."""
        for library in LIBRARIES:
            for module, hook in library.HOOKS.items():
                IMPORTS.call_after(module, partial(hook, self))

    def forget(self) -> None:
        """Forget the starts so far: a later test starts a server of its own."""
        self._starts.clear()
        self._shared.clear()

    @contextmanager
    def profiling_run(self) -> Iterator[None]:
        """Measure the block as the server's profiling run."""
        with self.part(PROFILING_RUN):
            yield

    def decided(self, server: str, device: int, **figures: Any) -> None:  # noqa: ANN401 - of ServerStart
        """Record figures of a device, by their names in ServerStart."""
        start = self._starts.get(device, ServerStart(server, self.number(device)))
        self._starts[device] = replace(start, **figures)
        self._write()

    def decided_for_all(self, server: str, **figures: Any) -> None:  # noqa: ANN401 - of ServerStart
        """Record figures of all devices; a refusal is one of them."""
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
    """Read the files of a server's processes; return its starts, in the order of the devices."""
    starts: dict[int, ServerStart] = {}
    shared: dict[str, Any] = {}
    for path in paths:
        with suppress(OSError, ValueError):  # its process was killed while it wrote
            record = json.loads(path.read_bytes())
            for fields in record["starts"]:
                fields["unseen"] = tuple(fields["unseen"])
                starts[fields["device"]] = ServerStart(**fields)
            shared |= record["shared"]
    if shared and not starts:
        return (ServerStart(device=0, **shared),)
    return tuple(replace(starts[device], **shared) for device in sorted(starts))
