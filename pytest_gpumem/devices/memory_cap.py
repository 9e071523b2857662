"""The cap on what PyTorch's caching allocator may reserve on a device."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


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


@contextmanager
def kept_fractions(devices: int | range) -> Iterator[None]:
    """Put the caps of some devices back afterwards, the user's own or none."""
    fractions = {device: memory_fraction(device) for device in device_range(devices)}
    try:
        yield
    finally:
        for device, fraction in fractions.items():
            set_memory_fraction(device, fraction)


def memory_fraction(device: int) -> float:
    """Return the fraction of a device's memory that PyTorch's allocator may reserve."""
    import torch

    get_fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if get_fraction is None:  # torch 2.6
        return 1.0
    with _current_device_kept():
        return min(1.0, float(get_fraction(device)))


def set_memory_fraction(device: int, fraction: float) -> None:
    """Set the fraction of a device's memory that PyTorch's allocator may reserve."""
    import torch

    with _current_device_kept():
        torch.cuda.set_per_process_memory_fraction(fraction, device)


@contextmanager
def _current_device_kept() -> Iterator[None]:
    """Put the current device back: older versions of PyTorch make another one current."""
    import torch

    device = torch.cuda.current_device()
    try:
        yield
    finally:
        torch.cuda.set_device(device)


def set_cap(device: int, limit: int | None, total: int) -> None:
    """Cap a device's caching allocator at ``limit`` bytes reserved; None lifts the cap."""
    set_memory_fraction(device, 1.0 if limit is None else cap_fraction(limit, total))
