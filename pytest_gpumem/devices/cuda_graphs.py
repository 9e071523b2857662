"""Tracks CUDA graphs: the blocks that live graphs may use, and captures that have not ended.

A graph writes to the workspace that cuBLAS had on its stream, even if that block was freed
since, so no test may get that block.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from pytest_gpumem.devices.torch_import import IMPORTS
from pytest_gpumem.patches import Patch, wrapped_by
from pytest_gpumem.recording.allocator_view import VIEW

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    BlockKey = tuple[int, int]
    """device and address of a block"""

CAPTURES: Final = Patch(
    "torch.cuda.graphs",
    *("CUDAGraph.capture_begin", "CUDAGraph.capture_end", "CUDAGraph.reset"),
    reason="a test gets no memory that a CUDA graph may write to, and captures left open are ended",
)


class Graphs:
    """Tracks the graphs captured since torch was imported."""

    def __init__(self) -> None:
        self._blocks: WeakKeyDictionary[Any, set[BlockKey]] = WeakKeyDictionary()
        """for each live graph: the blocks that existed when its capture ended"""
        self._capturing: list[tuple[Any, Any]] = []
        """graphs whose capture has not ended, each with its stream"""
        self._watches = False

    def watch(self) -> None:
        """Start watching captures now, or when torch is imported."""
        if not self._watches:
            self._watches = True
            IMPORTS.call_after("torch", self._wrap)

    def _wrap(self, torch: ModuleType) -> None:
        @wrapped_by
        def call(method: Callable[..., object], graph: Any, *args: Any, **options: Any) -> object:  # noqa: ANN401 - PyTorch's
            result = method(graph, *args, **options)
            if method.__name__ == "capture_begin":
                self._capturing.append((graph, torch.cuda.current_stream()))
            else:
                self._blocks.pop(graph, None)
                self._capturing = [pair for pair in self._capturing if pair[0] is not graph]
                if method.__name__ == "capture_end":
                    self._blocks[graph] = {*VIEW.live_blocks()}
            return result

        graphs = sys.modules.get(CAPTURES.module)  # None if the import of torch failed
        if graphs is not None:
            CAPTURES.wrap(graphs, call)

    @property
    def blocks(self) -> set[BlockKey]:
        """Device and address of each block that existed when a live graph's capture ended."""
        return set().union(*self._blocks.values())

    def end_captures(self) -> None:
        """End captures that a test has left open: CUDA refuses most calls during a capture."""
        while self._capturing:
            import torch

            graph, stream = self._capturing.pop()
            with warnings.catch_warnings(), torch.cuda.stream(stream):
                warnings.simplefilter("ignore")  # the graph may be empty
                # capture_end may have ended the capture and then raised, as for a warning with
                # -W error: a second call would leave an error for the next test.
                is_capturing = torch.cuda.is_current_stream_capturing()
                for end in (graph.capture_end, graph.reset) if is_capturing else (graph.reset,):
                    with suppress(RuntimeError):  # the capture may have become invalid
                        end()


GRAPHS: Final = Graphs()
