"""Limit the memory that a step may reserve: by PyTorch's cap, and a virtual device's size.

Both grow by the foreign memory (see :mod:`pytest_gpumem.meter.isolation`), so that the step has as
much as if it ran alone.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_gpumem.devices.memory_cap import set_cap
from pytest_gpumem.recording.allocator_view import VIEW

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.devices.base import Device
    from pytest_gpumem.meter.isolation import Isolation


class Room:
    """The bytes that a step may reserve on each of its devices."""

    def __init__(self, device: Device, isolation: Isolation) -> None:
        self._device = device
        self._isolation = isolation
        self._limit: int | None = None
        self._extra = 0

    @property
    def capacity(self) -> int:
        """Bytes that the step may reserve on each device.

        They are the cap; without one, what the step has reserved plus the device's free memory.
        """
        if self._limit is not None:
            return self._limit
        free = [VIEW.backend.memory_info(device)[0] for device in self._isolation.devices]
        counted = [peak.reserved for peak in self._isolation.read().own_held]
        return min(map(sum, zip(free, counted, strict=True)))

    def cap(self, limit: int | None) -> int | None:
        """Limit the bytes that the step may reserve on each device; return the previous limit.

        None is no limit.
        """
        previous, self._limit = self._limit, limit
        isolation = self._isolation
        for device, foreign in zip(isolation.devices, isolation.kept_foreign, strict=True):
            bytes_in_all = None if limit is None else limit + foreign.reserved
            set_cap(device, bytes_in_all, foreign.reserved)
        return previous

    @contextmanager
    def capped(self, limit: int | None) -> Iterator[None]:
        """Set another cap within the block."""
        outer_limit = self.cap(limit)
        try:
            yield
        finally:
            self.cap(outer_limit)

    def enlarge(self, extra: int | None = None) -> None:
        """Enlarge a virtual device by the foreign memory and by ``extra`` further bytes.

        None keeps the ``extra`` of the last call.
        """
        self._extra = self._extra if extra is None else extra
        self._device.make_room(
            [peak.reserved + self._extra for peak in self._isolation.kept_foreign]
        )

    def follow_foreign(self) -> None:
        """Update the cap and the device's size after foreign memory was released or adopted."""
        self.cap(self._limit)
        self.enlarge()
