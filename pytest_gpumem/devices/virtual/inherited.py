"""The virtual GPU of a process that another process with one has started.

The parent's environment has the native library preloaded; the rest is done here.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pytest_gpumem.devices.torch_import import IMPORTS
from pytest_gpumem.devices.virtual import VALUES
from pytest_gpumem.devices.virtual.environment import skip_shape_check
from pytest_gpumem.devices.virtual.missing_libraries import supply_missing_libraries
from pytest_gpumem.devices.virtual.ranks.object_messages import carry_objects

if TYPE_CHECKING:
    from types import ModuleType

    from pytest_gpumem.devices.virtual import GuessRows
    from pytest_gpumem.devices.virtual.decisions import Decisions
    from pytest_gpumem.devices.virtual.values.mode import ValueMode


class InheritedGpu:
    """Adapts this process at its import of torch, and computes values once it initialises CUDA."""

    def __init__(self) -> None:
        self._stack = ExitStack()  # never closed: for as long as the process lives
        self._decisions: Decisions | None = None
        self._mode: ValueMode | None = None
        self._failure = ""
        """the reason why it has no values"""
        supply_missing_libraries()
        IMPORTS.call_after("torch", self._adapt)

    def _adapt(self, torch: ModuleType) -> None:
        skip_shape_check(self._stack)
        carry_objects(sys.modules.get("torch.distributed"))
        if torch.version.cuda:
            torch.cuda._lazy_call(self._begin_values)

    def _begin_values(self) -> None:
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

    def guesses(self) -> tuple[GuessRows, list[str]]:
        """Return the values that this process decided by, and sentences on those not computed."""
        rows: GuessRows = self._decisions.rows() if self._decisions else ((), ())
        notes = self._mode.notes() if self._mode else ()
        return rows, [*notes, *filter(None, [self._failure])]

    def machine_device(self, index: int) -> int:
        """Return the parent's number of a device of this process."""
        from pytest_gpumem.devices.virtual.library import NativeLibrary

        return NativeLibrary().machine_device(index)
