"""All memory in use on virtual devices while a step runs, from their accounts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.devices.memory_use import Watch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.devices.virtual.library import NativeLibrary


class AccountWatch(Watch):
    """Reads the virtual GPU's accounts: exact, and free of cost."""

    source = "the virtual GPU's account"

    def __init__(self, library: NativeLibrary, context: int, devices: range) -> None:
        super().__init__(devices)
        self._library = library
        self._context = context

    def used(self, device: int) -> int:
        """Return the bytes charged, and those of the context."""
        return self._context + self._library.account(device).charged

    def start(self, reserved: Sequence[int]) -> None:
        """See :meth:`UseWatch.start`."""
        for device in self.devices:
            self._library.forget_peak(device)
        super().start(reserved)

    def look(self) -> None:
        """See :meth:`UseWatch.look`."""
        for device in self.devices:
            self._peaks[device] = self._context + self._library.account(device).peak_charged
