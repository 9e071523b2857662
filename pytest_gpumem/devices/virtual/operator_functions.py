"""Calls the native library's functions for PyTorch's operators, without ctypes.

native/base/operator_functions.c documents them.
"""

from __future__ import annotations

import ctypes
import enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

# c10::impl::tls_set_dispatch_key_excluded(DispatchKey, bool), declared in
# c10/core/impl/LocalDispatchKeySet.h; DispatchKey is an enum of uint16_t
_EXCLUDE: Final = "_ZN3c104impl29tls_set_dispatch_key_excludedENS_11DispatchKeyEb"


class OperatorFlags(enum.IntFlag):
    """Flags that describe an operator to the native library; the *short way* bypasses Python."""

    SHORT = 1
    """some of its calls can bypass Python"""
    LIKE = 2
    """the values of its arguments do not matter"""
    CONSTANT = 4
    """its large results may be deferred"""
    COPIES = 8
    ASSUMED = 16
    """if it returns several results, they may be assumed when its inputs are unknown"""
    READS = 32
    """it returns a number to the host"""
    ALLOCATES = 64
    """its result is uninitialized memory"""
    COMPUTES = 128
    """its results depend on its arguments alone"""
    CHEAP = 256
    """it costs a test's budget nothing if its tensors have few elements"""
    THREADS = 512
    """the CPU may use several threads even for few elements, so it is run with one thread"""
    INDEXES = 1024
    """its second argument is a list of indices: masks, whose true elements determine the size of
    the result, or integers, which do not"""
    CHANGES = 2048
    """it overwrites values; if these are known, it bypasses Python and is computed natively"""
    RETURNS = 4096
    """it returns new tensors besides what it writes"""
    SCATTERS = 8192
    """it may write few elements of a large tensor"""


class CalledFunctions(NamedTuple):
    """Python functions that the native library calls."""

    describe: Callable[[Any], Sequence[int]]
    """returns the struct ``extent`` for a tensor; needed before torch 2.10, which has no DLPack
    exchange API for tensors"""
    finish: Callable[..., None]
    """called after an operator whose values may be computed, with the operator, its arguments and
    its result; also with the host's result, if the library has computed it and not written it"""
    large: Callable[[], None]
    """called when so many values are unknown that only small tensors are computed from then on"""
    affords: Callable[..., bool]
    """called with an operator, its arguments, its result and the bytes of its arguments; deducts
    its cost from the test's budget, or returns False if the budget is too small"""
    refund: Callable[[], None]
    """returns the last deducted cost to the budget"""


class OperatorFunctions:
    """Functions of a loaded library, by the names that the library uses."""

    kernel: Callable[[Callable[..., Any]], Any]
    """returns a kernel that passes all calls to a function, until ``know`` is called"""
    know: Callable[..., None]
    """configures a kernel's short way. Arguments: the kernel; the function for all other calls; an
    object to pass to ``finish``; a function that computes the operator on CPU tensors; two
    functions that run the operator, one for calls that pass no number in place of a tensor, one for
    calls that do (None: such calls have no short way); its flags; and three bit masks over its
    arguments: those that it writes, those whose values do not matter, those that are tensors"""
    running: Callable[[], tuple[Any, Any] | None]
    """returns the arguments, positional and by name, of the operator running on this thread on the
    short way; None without one"""
    known_bytes: Callable[[Sequence[Any], Mapping[str, Any]], int | None]
    """takes an operator's arguments, and returns the total bytes of the tensors among them; None:
    some tensor is not plain, not known, or too large to compute"""
    over: Callable[[torch.Tensor], torch.Tensor | None]
    """returns a CPU tensor over the bytes of a device tensor, which it does not keep alive; None:
    DLPack cannot express it"""
    put: Callable[[torch.Tensor, torch.Tensor], bool | None]
    """writes a host tensor's values to a device tensor, which is known from then on; False if host
    memory is short; None if the tensors differ in layout, so that nothing is written"""

    def __init__(self, library: ctypes.CDLL, key: int, called: CalledFunctions) -> None:
        """Create the functions.

        Args:
            library: the native library.
            key: number of a dispatch key to exclude while an operator runs.
            called: functions that the library calls.
        """
        import torch

        given = {
            **called._asdict(),
            "tensor": torch.Tensor,
            "parameter": torch.nn.Parameter,
            "buffer": torch.nn.Buffer,
            "device": torch.device,
            "generator": torch.Generator,
            "get_num_threads": torch.get_num_threads,
            "set_num_threads": torch.set_num_threads,
            "is_neg": torch.Tensor.is_neg,
            "function_modes": torch._C._len_torch_function_stack,
            "dispatch": torch.Tensor.__torch_dispatch__,
        }
        c10 = ctypes.CDLL(str(Path(torch.__file__ or "").parent / "lib" / "libc10.so"))
        pointers = ctypes.cast(c10[_EXCLUDE], ctypes.c_void_p).value, *_exchanging_functions()
        made: Any = ctypes.py_object
        prepare = ctypes.PYFUNCTYPE(made, made, ctypes.c_uint64, *[ctypes.c_void_p] * 3)
        functions = prepare(("gpumem_operator_functions", library))(given, key, *pointers)
        self.__dict__.update(functions)
        self.count_opened: Callable[[int], None] = library.gpumem_count_opened
        """counts this thread's operators that begin to run (1) or have ended (-1) and whose inner
        operators are intercepted: until they end, no operator of the thread takes the short way"""


def _exchanging_functions() -> tuple[int | None, int | None]:
    """Return the addresses of two functions of DLPack's exchange API, or None if torch lacks them.

    These are ``dltensor_from_py_object_no_sync`` and ``managed_tensor_to_py_object_no_sync``.
    """
    import torch

    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None, None
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    # struct DLPackExchangeAPI of dlpack.h: a header of two words, then function pointers
    table = (ctypes.c_void_p * 6).from_address(get(capsule, b"dlpack_exchange_api"))
    major = ctypes.c_uint32.from_address(ctypes.addressof(table)).value
    return (table[5], table[4]) if major == 1 else (None, None)
