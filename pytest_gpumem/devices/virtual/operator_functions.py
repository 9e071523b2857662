"""Functions of the native library that Python calls around each operator, without ctypes.

A call by ctypes with an address and a size takes 0.25 us, and one of these 0.05.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

METH_NOARGS: Final = 0x0004
METH_O: Final = 0x0008
METH_FASTCALL: Final = 0x0080
"""calling conventions of CPython's stable ABI ("Common Object Structures" in Python's C API)"""


# c10::impl::tls_set_dispatch_key_excluded(DispatchKey, bool), declared in
# c10/core/impl/LocalDispatchKeySet.h; DispatchKey is an enum of uint16_t
_EXCLUDE: Final = "_ZN3c104impl29tls_set_dispatch_key_excludedENS_11DispatchKeyEb"


class _MethodDef(ctypes.Structure):
    """``PyMethodDef``."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


class OperatorFunctions(NamedTuple):
    """The functions."""

    begins: Callable[[], None]
    """an operator begins to run: from now on its launches change no values"""
    ended: Callable[..., bool]
    """it has ended; with addresses and sizes: it has written these ranges alone, which are unknown.
    Returns whether so much is unknown now that the test is a large one"""
    forget_ranges: Callable[..., None]
    """takes addresses and sizes: their bytes are unknown from now on"""
    could_know: Callable[[int], bool]
    """takes an address: whether the byte there is known, or could be computed"""


_DEFINITIONS: Final = (
    _MethodDef(b"operator_begins", None, METH_NOARGS, None),
    _MethodDef(b"operator_ended", None, METH_FASTCALL, None),
    _MethodDef(b"forget_ranges", None, METH_FASTCALL, None),
    _MethodDef(b"could_know", None, METH_O, None),
)
"""which Python reads at each call"""


def operator_functions(library: ctypes.CDLL, key: int) -> OperatorFunctions:
    """Return the functions of a loaded library; ``key`` is excluded while an operator runs."""
    import torch

    api = ctypes.pythonapi
    c10 = ctypes.CDLL(str(Path(torch.__file__ or "").parent / "lib" / "libc10.so"))
    library.gpumem_prepare_operators(
        (ctypes.c_void_p * 3)(*map(id, (None, False, True))),  # which CPython's id() is
        ctypes.cast(api.Py_IncRef, ctypes.c_void_p),
        ctypes.cast(api.PyLong_AsUnsignedLongLong, ctypes.c_void_p),
        ctypes.cast(c10[_EXCLUDE], ctypes.c_void_p),
        ctypes.c_uint64(key),
    )
    prototype = ctypes.PYFUNCTYPE(
        ctypes.py_object, ctypes.POINTER(_MethodDef), ctypes.c_void_p, ctypes.c_void_p
    )
    make = prototype(("PyCFunction_NewEx", api))
    for definition in _DEFINITIONS:
        function = getattr(library, f"gpumem_{definition.name.decode()}")
        definition.function = ctypes.cast(function, ctypes.c_void_p)
    return OperatorFunctions(*(make(definition, None, None) for definition in _DEFINITIONS))
