"""Caps PyTorch's caching allocator at the lower of the test's own cap and the measurement's.

PyTorch has one cap per device, a fraction of the device's memory. During a measurement the lower of
two caps applies: the fraction that the test's code sets, of the card's memory; and the
measurement's limit in bytes. If the test's code reads the fraction, it gets the one that it has
set.
"""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.patches import Patch
from pytest_gpumem.recording.allocator_view import VIEW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SET_FRACTION: Final = "_cuda_setMemoryFraction"
GET_FRACTION: Final = "_cuda_getMemoryFraction"
SET_SETTINGS: Final = "_accelerator_setAllocatorSettings"
GET_SETTINGS: Final = "_accelerator_getAllocatorSettings"
BINDINGS: Final = Patch(
    "torch._C",
    *(SET_FRACTION, GET_FRACTION, SET_SETTINGS, GET_SETTINGS),
    reason="a fraction that a program sets is of the card's memory, and a limit may be lower",
)
_SETTING: Final = re.compile(r"(per_process_memory_fraction\s*:\s*)([^\s,]+)")


def device_range(devices: int | range) -> range:
    """Return a number of devices as a range from the first one; return a range unchanged."""
    return range(devices) if isinstance(devices, int) else devices


def cap_fraction(limit: int, total: int) -> float:
    """Return the fraction that caps the allocator at exactly ``limit`` bytes of ``total``.

    PyTorch computes the cap as ``size_t(fraction * total)`` (c10/cuda/CUDACachingAllocator.cpp).
    """
    if limit >= total:
        return 1.0
    fraction = limit / total
    while int(fraction * total) < limit:
        fraction = math.nextafter(fraction, 1.0)
    while int(fraction * total) > limit:
        fraction = math.nextafter(fraction, 0.0)
    return fraction


@dataclass
class _Cap:
    """The caps on one device; sizes in bytes."""

    fraction: float = 1.0
    """the cap that the test's code sets, as a fraction of ``memory``"""
    memory: int = 0
    """bytes of the card, which ``fraction`` refers to"""
    total: int = 0
    """bytes that PyTorch's own fraction refers to"""
    limit: int | None = None
    """the cap that the measurement sets, in bytes; None without one"""
    foreign: int = 0
    """reserved bytes that do not count towards the test's fraction"""


class MemoryCaps:
    """Wraps PyTorch's bindings for the fraction, and sets the lower of a device's two caps."""

    def __init__(self) -> None:
        self._real: dict[str, Callable[..., Any]] = {}
        self._caps: dict[int, _Cap] = {}
        self._set_as: dict[str, str] = {}
        """the program's own fractions, by the fractions that replace them in PyTorch's settings"""

    def install(self) -> None:
        """Wrap the bindings, once."""
        if self._real:
            return
        import torch

        def set_fraction(fraction: float, device: int) -> None:
            self.cap(device).fraction = fraction
            self.apply(device)

        def get_fraction(device: int) -> float:
            cap = self.cap(device)
            if cap.fraction >= 1.0:
                return 1.0
            return int(cap.fraction * cap.memory) / cap.memory  # as PyTorch computes it, from bytes

        def set_settings(settings: str) -> None:
            self._real[SET_SETTINGS](_SETTING.sub(self._fraction_of_total, settings))

        def get_settings() -> str:
            def fraction_given(match: re.Match[str]) -> str:
                return match[1] + self._set_as.get(match[2], match[2])

            return _SETTING.sub(fraction_given, self._real[GET_SETTINGS]())

        wrappers: dict[str, Callable[..., Any]] = {
            SET_FRACTION: set_fraction,
            GET_FRACTION: get_fraction,
            SET_SETTINGS: set_settings,
            GET_SETTINGS: get_settings,
        }
        # Only bindings that this torch has are wrapped. torch 2.6 has none that reads the fraction.
        # Versions whose settings' functions have other names read a fraction in the settings only
        # when CUDA is initialized.
        self._real = BINDINGS.values(torch._C)
        BINDINGS.put(torch._C, wrappers)

    def _fraction_of_total(self, match: re.Match[str]) -> str:
        """Convert the fraction in a setting from the card's memory to PyTorch's total.

        With ``throw_on_cudamalloc_oom``, PyTorch's allocator refuses memory beyond that fraction of
        the total (c10/cuda/CUDACachingAllocator.cpp, in torch 2.12). Settings read back from
        PyTorch already have the converted fraction.
        """
        value = self._set_as.get(match[2], match[2])
        cap = self.cap(0)  # all devices are the same card
        try:
            fraction = float(value)
        except ValueError:
            return match[0]  # unchanged, because PyTorch raises an error that quotes it
        if cap.memory == cap.total or not 0.0 <= fraction <= 1.0:
            return match[1] + value
        fraction_text = repr(cap_fraction(int(fraction * cap.memory), cap.total))
        self._set_as[fraction_text] = value
        return match[1] + fraction_text

    def cap(self, device: int) -> _Cap:
        """Return the caps on a device."""
        self.install()
        if device not in self._caps:
            import torch

            # PYTORCH_ALLOC_CONF may have set a fraction when CUDA was initialized
            get_fraction = self._real.get(GET_FRACTION)
            with _current_device_kept():
                fraction = 1.0 if get_fraction is None else get_fraction(device)
            total = int(torch.cuda.get_device_properties(device).total_memory)
            self._caps[device] = _Cap(min(1.0, float(fraction)), memory=total, total=total)
        return self._caps[device]

    def apply(self, device: int) -> None:
        """Set the lower of a device's caps in PyTorch."""
        cap = self.cap(device)
        limits = [] if cap.limit is None else [cap.limit]
        if cap.fraction < 1.0:
            limits.append(int(cap.fraction * cap.memory) + cap.foreign)
        fraction = cap_fraction(min(limits, default=cap.total), cap.total)
        with _current_device_kept():
            self._real[SET_FRACTION](fraction, device)


@contextmanager
def _current_device_kept() -> Iterator[None]:
    """Restore the current device after the block: PyTorch 2.6's bindings change it."""
    import torch

    current = torch.cuda.current_device()
    try:
        yield
    finally:
        torch.cuda.set_device(current)


CAPS: Final = MemoryCaps()


@contextmanager
def kept_fractions(devices: int | range) -> Iterator[None]:
    """After the block, restore the test's fractions on some devices, and lift the limits."""
    if not VIEW.backend.caps:
        yield
        return
    fractions = {device: CAPS.cap(device).fraction for device in device_range(devices)}
    try:
        yield
    finally:
        for device, fraction in fractions.items():
            cap = CAPS.cap(device)
            cap.fraction, cap.limit, cap.foreign = fraction, None, 0
            CAPS.apply(device)


def set_cap(device: int, limit: int | None, foreign: int = 0) -> None:
    """Cap a device's caching allocator at ``limit`` reserved bytes; None lifts this cap.

    Args:
        device: index of the device.
        limit: bytes, including ``foreign``.
        foreign: bytes reserved by earlier tests, which do not count towards the test's fraction.
    """
    if not VIEW.backend.caps:
        return
    cap = CAPS.cap(device)
    cap.limit, cap.foreign = limit, foreign
    CAPS.apply(device)


def set_memory(device: int, memory: int, total: int) -> None:
    """Make the fractions that the test's code sets refer to a card's memory.

    Args:
        device: index of the device.
        memory: bytes of the card.
        total: bytes that PyTorch's own fraction refers to.
    """
    cap = CAPS.cap(device)
    if (cap.memory, cap.total) != (memory, total):
        cap.memory, cap.total = memory, total
        CAPS.apply(device)
