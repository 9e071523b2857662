"""The caps on PyTorch's caching allocator: the test's own, and the measurement's.

PyTorch knows one cap a device, a fraction of its memory. While something is measured, the lower
one of two holds: the fraction that the test's code sets, of the card's memory, and a limit in
bytes. The test's code reads its own fraction back.
"""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SET_FRACTION: Final = "_cuda_setMemoryFraction"
GET_FRACTION: Final = "_cuda_getMemoryFraction"
SET_SETTINGS: Final = "_accelerator_setAllocatorSettings"
GET_SETTINGS: Final = "_accelerator_getAllocatorSettings"
BINDINGS: Final = Patch(
    "torch._C",
    *(SET_FRACTION, GET_FRACTION, SET_SETTINGS, GET_SETTINGS),
    reason="a program's fraction is of the card's memory, and a test's limit may be lower",
)
_SETTING: Final = re.compile(r"(per_process_memory_fraction\s*:\s*)([^\s,]+)")


def device_range(devices: int | range) -> range:
    """Return a number of devices as a range from the first one; a range as it is."""
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
    """set by the test's code"""
    memory: int = 0
    """the fraction is of this: the card's memory"""
    total: int = 0
    """PyTorch's own fraction is of this"""
    limit: int | None = None
    """set by the measurement"""
    foreign: int = 0
    """reserved memory that takes nothing from the test's fraction"""


class MemoryCaps:
    """Wraps PyTorch's bindings of the fraction, and applies the lower cap."""

    def __init__(self) -> None:
        self._real: dict[str, Callable[..., Any]] = {}
        self._caps: dict[int, _Cap] = {}
        self._set_as: dict[str, str] = {}
        """the fractions in settings that PyTorch was given, and those of the program they are of"""

    def install(self) -> None:
        """Wrap the bindings; nothing if that is done."""
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
        # torch 2.6 cannot be asked for the fraction. Older names of the settings' functions are of
        # versions that read a fraction in settings only once, when CUDA is initialised.
        self._real = BINDINGS.values(torch._C)
        BINDINGS.put(torch._C, wrappers)

    def _fraction_of_total(self, match: re.Match[str]) -> str:
        """Return the setting with the fraction of PyTorch's total that is as many bytes.

        With ``throw_on_cudamalloc_oom``, PyTorch's allocator refuses memory beyond a fraction of
        the total in its settings (c10/cuda/CUDACachingAllocator.cpp, in torch 2.12). Settings that
        were read from PyTorch and are set again have that fraction already.
        """
        value = self._set_as.get(match[2], match[2])
        cap = self.cap(0)  # all devices are of one card
        try:
            fraction = float(value)
        except ValueError:
            return match[0]  # PyTorch's error names it
        if cap.memory == cap.total or not 0.0 <= fraction <= 1.0:
            return match[1] + value
        told = repr(cap_fraction(int(fraction * cap.memory), cap.total))
        self._set_as[told] = value
        return match[1] + told

    def cap(self, device: int) -> _Cap:
        """Return the caps on a device."""
        self.install()
        if device not in self._caps:
            import torch

            # PYTORCH_ALLOC_CONF may have set a fraction when CUDA was initialised
            get_fraction = self._real.get(GET_FRACTION)
            with _current_device_kept():
                fraction = 1.0 if get_fraction is None else get_fraction(device)
            total = int(torch.cuda.get_device_properties(device).total_memory)
            self._caps[device] = _Cap(min(1.0, float(fraction)), memory=total, total=total)
        return self._caps[device]

    def apply(self, device: int) -> None:
        """Tell PyTorch the lower one of the caps on a device."""
        cap = self.cap(device)
        limits = [] if cap.limit is None else [cap.limit]
        if cap.fraction < 1.0:
            limits.append(int(cap.fraction * cap.memory) + cap.foreign)
        fraction = cap_fraction(min(limits, default=cap.total), cap.total)
        with _current_device_kept():
            self._real[SET_FRACTION](fraction, device)


@contextmanager
def _current_device_kept() -> Iterator[None]:
    """Keep the current device: PyTorch 2.6 makes that one current whose fraction is read or set."""
    import torch

    current = torch.cuda.current_device()
    try:
        yield
    finally:
        torch.cuda.set_device(current)


CAPS: Final = MemoryCaps()


@contextmanager
def kept_fractions(devices: int | range) -> Iterator[None]:
    """Put the test's fractions of some devices back afterwards, and lift the limits."""
    fractions = {device: CAPS.cap(device).fraction for device in device_range(devices)}
    try:
        yield
    finally:
        for device, fraction in fractions.items():
            cap = CAPS.cap(device)
            cap.fraction, cap.limit, cap.foreign = fraction, None, 0
            CAPS.apply(device)


def set_cap(device: int, limit: int | None, foreign: int = 0) -> None:
    """Cap a device's caching allocator at ``limit`` bytes reserved; None lifts this cap.

    Args:
        device: its number.
        limit: bytes, foreign memory included.
        foreign: bytes reserved by earlier tests, on top of which a fraction of the test's holds.
    """
    cap = CAPS.cap(device)
    cap.limit, cap.foreign = limit, foreign
    CAPS.apply(device)


def set_memory(device: int, memory: int, total: int) -> None:
    """Make fractions that the test's code sets fractions of a card's memory.

    Args:
        device: its number.
        memory: the card's bytes.
        total: bytes that PyTorch's own fraction is a fraction of.
    """
    cap = CAPS.cap(device)
    if (cap.memory, cap.total) != (memory, total):
        cap.memory, cap.total = memory, total
        CAPS.apply(device)
