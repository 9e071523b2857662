"""The native library's kernel of PyTorch's operators, which Python calls without ctypes.

native/base/operator_functions.c says what it does.
"""

from __future__ import annotations

import ctypes
import enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

METH_VARARGS: Final = 0x0001
METH_KEYWORDS: Final = 0x0002
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


_KERNEL: Final = _MethodDef(b"operator", None, METH_VARARGS | METH_KEYWORDS, None)
_RUNNING: Final = _MethodDef(b"running", None, METH_NOARGS, None)
_KNOWN_BYTES: Final = _MethodDef(b"known_bytes", None, METH_FASTCALL, None)
_FORGET_RANGES: Final = _MethodDef(b"forget_ranges", None, METH_FASTCALL, None)
_OVER: Final = _MethodDef(b"over", None, METH_O, None)
_PUT: Final = _MethodDef(b"put", None, METH_FASTCALL, None)
"""which Python reads at each call"""
_FUNCTIONS: Final = (
    *("PyObject_Call", "PyObject_CallFunctionObjArgs", "PyObject_Type", "PyObject_GetAttr"),
    *("PyList_GetItem", "PyList_Size", "PyTuple_GetItem", "PyTuple_Size", "PyTuple_Pack"),
    *("PyTuple_New", "PyTuple_SetItem", "PyList_New", "PyList_SetItem"),
    *("PyDict_GetItem", "PyDict_Next", "PyUnicode_Compare", "Py_IncRef", "Py_DecRef"),
    *("PyErr_Clear", "PyErr_ExceptionMatches"),
    *("PyLong_AsUnsignedLongLong", "PyLong_FromUnsignedLongLong"),
    *("PyType_IsSubtype", "PyGC_Disable", "PyGC_Enable"),
)
"""of Python's, which the native library calls"""


class Ways(enum.IntFlag):
    """A description of an operator for the native library."""

    SHORT = 1
    """some of its calls take the short way"""
    LIKE = 2
    """the values of its arguments do not matter"""
    CONSTANT = 4
    """its large results may be computed later"""
    COPIES = 8
    """it copies bytes"""
    ASSUMED = 16
    """several results may be assumed where nothing is known"""
    READS = 32
    """it returns a number to the host"""
    ALLOCATES = 64
    """its result has no values in it"""
    COMPUTES = 128
    """what it returns, or writes, is computed of its arguments alone"""
    CHEAP = 256
    """what it costs grows with the number of elements"""
    THREADS = 512
    """the host may use several threads for few elements: those of no other kind take one"""
    INDEXES = 1024
    """its second argument is a list of indices: masks, whose true elements are its size, or whole
    numbers, which are not"""
    CHANGES = 2048
    """it is computed natively where what it writes is known, and has no other short way"""
    RETURNS = 4096
    """it returns new tensors beside what it writes"""


class CalledFunctions(NamedTuple):
    """Functions of Python's that a library calls."""

    describe: Callable[[Any], Sequence[int]]
    """returns of a tensor what the struct ``extent`` has, where PyTorch does not export tensors by
    DLPack's exchange API: before 2.10"""
    finish: Callable[..., None]
    """is called with an operator, its arguments and its result where its values may be computed;
    with the host's result too where that is computed and not written"""
    large: Callable[[], None]
    """is called once so much is unknown that a test is a large one"""
    affords: Callable[..., bool]
    """is called with an operator, its arguments, its result and the bytes of its arguments; takes
    its cost off the test's budget, and returns False if that has not so much"""
    refund: Callable[[], None]
    """gives the cost back that was taken last"""


class OperatorFunctions:
    """The functions of a loaded library."""

    def __init__(self, library: ctypes.CDLL, key: int, called: CalledFunctions) -> None:
        """Prepare them.

        Args:
            library: the native one.
            key: the number of a dispatch key, excluded while an operator runs.
            called: the functions that the library calls.
        """
        import torch

        api = ctypes.pythonapi
        c10 = ctypes.CDLL(str(Path(torch.__file__ or "").parent / "lib" / "libc10.so"))
        self._kept = (
            *(None, False, True, torch.Tensor, torch.nn.Parameter, torch.nn.Buffer),
            *(list, tuple, int, bool, float, complex, torch.device, torch.Generator, Exception),
            *("device", "type", "cpu", *called),
            *(torch.get_num_threads, torch.set_num_threads, torch.Tensor.is_neg),
            torch._C._len_torch_function_stack,
        )
        functions = [ctypes.cast(getattr(api, name), ctypes.c_void_p).value for name in _FUNCTIONS]
        functions += ctypes.cast(c10[_EXCLUDE], ctypes.c_void_p).value, *_exchanging_functions()
        pointers = [*map(id, self._kept), *functions]  # CPython's id() is the address
        library.gpumem_prepare_operators(
            (ctypes.c_void_p * len(pointers))(*pointers), ctypes.c_uint64(key)
        )
        made, word = ctypes.py_object, ctypes.c_uint64
        self._make = ctypes.PYFUNCTYPE(made, ctypes.POINTER(_MethodDef), made, ctypes.c_void_p)(
            ("PyCFunction_NewEx", api)
        )
        for definition in (_KERNEL, _RUNNING, _KNOWN_BYTES, _FORGET_RANGES, _OVER, _PUT):
            function = getattr(library, f"gpumem_{definition.name.decode()}")
            definition.function = ctypes.cast(function, ctypes.c_void_p)
        self.running: Callable[[], tuple[Any, Any] | None] = self._make(_RUNNING, None, None)
        """returns the arguments of the operator that runs on this thread on the short way, those
        by name too; None: none does"""
        self.known_bytes: Callable[[Sequence[Any], Mapping[str, Any]], int | None]
        self.known_bytes = self._make(_KNOWN_BYTES, None, None)
        """takes an operator's arguments, and returns the bytes of all tensors among these; None:
        not all are plain, known, and as small as what is computed"""
        self.forget_ranges: Callable[..., None] = self._make(_FORGET_RANGES, None, None)
        """takes addresses and sizes: their bytes are unknown from now on"""
        self.over: Callable[[torch.Tensor], torch.Tensor | None] = self._make(_OVER, None, None)
        """returns the CPU's tensor over the bytes of a tensor of the device, which keeps nothing
        alive; None: it is one that DLPack has not"""
        self.put: Callable[[torch.Tensor, torch.Tensor], bool | None]
        self.put = self._make(_PUT, None, None)
        """writes the values of a tensor of the host where one of the device lies, which are known
        from then on; False: there is no room; None: the two are not alike, and nothing is done"""
        self._new = ctypes.PYFUNCTYPE(ctypes.c_int64, made)(("gpumem_new_operator", library))
        self._know = ctypes.PYFUNCTYPE(None, word, *[made] * 5, *[word] * 4)(
            ("gpumem_know_operator", library)
        )
        self.count_opened: Callable[[int], None] = library.gpumem_count_opened
        """counts operators of this thread's that begin to run (1), or have ended (-1), with those
        inside of them seen: none of these takes the short way"""

    def kernel(self, slow: Callable[..., Any]) -> Any:  # noqa: ANN401 - a function of C's
        """Return a kernel that hands all calls to a function, until :meth:`know` is called."""
        number = self._new(slow)
        if number < 0:
            raise MemoryError
        return self._make(_KERNEL, number, None)

    def know(  # noqa: PLR0913, PLR0917 - the fields of a struct
        self,
        kernel: Any,  # noqa: ANN401 - a function of C's
        slow: Callable[..., Any],
        op: object,
        host: Callable[..., Any],
        functions: tuple[Callable[..., Any], Callable[..., Any] | None],
        ways: Ways,
        written: int,
        unread: int,
        tensors: int = 0,
    ) -> None:
        """Say of a kernel what its short way needs.

        Args:
            kernel: of :meth:`kernel`.
            slow: takes the calls that do not take it.
            op: is handed to ``finish``.
            host: computes it of tensors of the CPU.
            functions: run the operator: the first one where no number is in a tensor's place, the
                other one where one is; None: such a call does not take the short way.
            ways: what the operator is like.
            written: has a bit for each place of an argument that the operator writes.
            unread: likewise of those whose values do not matter.
            tensors: likewise of those that are tensors.
        """
        self._know(kernel.__self__, slow, op, host, *functions, ways, written, unread, tensors)


def _exchanging_functions() -> tuple[int | None, int | None]:
    """Return the addresses of two functions of DLPack's exchange API; None: there are none.

    These are ``dltensor_from_py_object_no_sync`` and ``managed_tensor_to_py_object_no_sync``.
    """
    import torch

    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None, None
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    # struct DLPackExchangeAPI of dlpack.h: two words of a header, then functions
    table = (ctypes.c_void_p * 6).from_address(get(capsule, b"dlpack_exchange_api"))
    major = ctypes.c_uint32.from_address(ctypes.addressof(table)).value
    return (table[5], table[4]) if major == 1 else (None, None)
