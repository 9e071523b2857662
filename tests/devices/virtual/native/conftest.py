"""Private libraries give address space back: each takes terabytes, of 128 that a process has."""

import ctypes
from pathlib import Path

import pytest

LEAST = 1 << 39
"""bytes: no device's addresses and no pool's are fewer"""


@pytest.fixture(autouse=True)
def address_space_given_back(request):
    """Unmap the large ranges that a test's private library has reserved."""
    if "library" not in request.fixturenames:
        yield
        return
    earlier = reserved()
    yield
    munmap = ctypes.CDLL(None, use_errno=True).munmap
    munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    for start, end in without(reserved(), earlier):
        if end - start >= LEAST:
            assert munmap(start, end - start) == 0


def reserved():
    """The process's anonymous ranges of addresses, in order; neighbours may be one range."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [line[0].split("-") for line in lines if len(line) == 5]
    return [(int(start, 16), int(end, 16)) for start, end in ranges]


def without(ranges, excluded):
    """Ranges less those that are excluded."""
    for start, end in ranges:
        free = start
        for excluded_start, excluded_end in excluded:
            if free < excluded_end and excluded_start < end:
                if free < excluded_start:
                    yield free, excluded_start
                free = excluded_end
        if free < end:
            yield free, end
