"""Hide the objects of imported libraries from Python's garbage collector, so that it runs fast.

A marked test collects garbage several times. With torch and all of pytest's items, a collection
traverses half a million objects, which takes longer than what is tested. ``gc.freeze`` would hide
them, but a measurement itself freezes and unfreezes objects. So the frozen objects are moved from
the collector's list into a separate list, which nothing traverses. They then behave like frozen
objects, and measuring uses the collector as usual.
"""

import atexit
import ctypes
import gc
import sys

HEAD = ctypes.c_size_t * 2
"""PyGC_Head: the next and the previous object, the latter with flags in its two lowest bits"""
FLAGS = 3


def hide_objects():
    """Hide all existing objects; return whether that was possible.

    It is not if the collector's list has another layout (Python 3.14, free threading).
    """
    if sys.implementation.name != "cpython" or not (3, 10) <= sys.version_info < (3, 14):
        return False
    gc.collect()
    gc.freeze()
    last = []
    gc.freeze()  # ``last`` is now the last object in the list
    tail = _head(id(last) - ctypes.sizeof(HEAD))
    old = _head(tail[0])
    if not _is_whole(old, gc.get_freeze_count()):
        gc.unfreeze()
        return False
    new = _head(_new_head())
    first = _head(old[0])
    new[0], new[1] = ctypes.addressof(first), ctypes.addressof(tail)
    first[1] = ctypes.addressof(new) | first[1] & FLAGS
    tail[0] = ctypes.addressof(new)
    old[0] = old[1] = ctypes.addressof(old)
    atexit.register(_put_back, old, new)
    return True


def _put_back(old, new):
    """Put the objects back for the interpreter's end: libraries report objects that stay alive."""
    gc.unfreeze()
    first, tail = _head(new[0]), _head(new[1] & ~FLAGS)
    old[0], old[1] = ctypes.addressof(first), ctypes.addressof(tail)
    first[1] = ctypes.addressof(old) | first[1] & FLAGS
    tail[0] = ctypes.addressof(old)
    gc.unfreeze()


def _head(address):
    return HEAD.from_address(address)


def _new_head():
    """Allocate a list head that is never freed."""
    allocate = ctypes.pythonapi.PyMem_RawMalloc
    allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    return allocate(ctypes.sizeof(HEAD))


def _is_whole(head, count):
    """Whether a list has ``count`` objects, each linked to the one before it."""
    start = previous = ctypes.addressof(head)
    for _ in range(count):
        current = HEAD.from_address(previous)[0]
        if HEAD.from_address(current)[1] & ~FLAGS != previous:
            return False
        previous = current
    return HEAD.from_address(previous)[0] == start and head[1] & ~FLAGS == previous
