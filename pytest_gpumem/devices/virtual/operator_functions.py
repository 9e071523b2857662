"""The native library's kernel of PyTorch's operators, which Python calls without ctypes.

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
    """its results are computed of its arguments alone"""
    CHEAP = 256
    """its cost grows with the number of elements"""
    THREADS = 512
    """the host may use several threads for few elements: those of no other kind take one"""
    INDEXES = 1024
    """its second argument is a list of indices: masks, whose true elements are its size, or whole
    numbers, which are not"""
    CHANGES = 2048
    """it is computed natively where what it writes is known, and has no other short way"""
    RETURNS = 4096
    """it returns new tensors beside what it writes"""
    SCATTERS = 8192
    """it may write few elements of a large tensor"""


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
    """The functions of a loaded library, by the names that it gives them."""

    kernel: Callable[[Callable[..., Any]], Any]
    """returns a kernel that hands all calls to a function, until ``know`` is called"""
    know: Callable[..., None]
    """says of a kernel what its short way needs. Takes the kernel; the function for calls on no
    short way; an object that is handed to ``finish``; a function that computes the operator of the
    CPU's tensors; the operator's function for calls without a number in a tensor's place, and for
    those with one (None: they have no short way); its Ways; and three numbers with a bit for the
    place of each argument: those that it writes, those whose values do not matter, tensors"""
    running: Callable[[], tuple[Any, Any] | None]
    """returns the arguments of the operator that runs on this thread on the short way, those by
    name too; None: none does"""
    known_bytes: Callable[[Sequence[Any], Mapping[str, Any]], int | None]
    """takes an operator's arguments, and returns the bytes of all tensors among these; None: not
    all are plain, known, and as small as what is computed"""
    over: Callable[[torch.Tensor], torch.Tensor | None]
    """returns the CPU's tensor over the bytes of a tensor of the device, which keeps nothing alive;
    None: it is one that DLPack has not"""
    put: Callable[[torch.Tensor, torch.Tensor], bool | None]
    """writes the values of a tensor of the host where one of the device lies, which are known from
    then on; False: there is no room; None: the two are not alike, and nothing is done"""

    def __init__(self, library: ctypes.CDLL, key: int, called: CalledFunctions) -> None:
        """Prepare them.

        Args:
            library: the native one.
            key: the number of a dispatch key, excluded while an operator runs.
            called: the functions that the library calls.
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
        }
        c10 = ctypes.CDLL(str(Path(torch.__file__ or "").parent / "lib" / "libc10.so"))
        pointers = ctypes.cast(c10[_EXCLUDE], ctypes.c_void_p).value, *_exchanging_functions()
        made: Any = ctypes.py_object
        prepare = ctypes.PYFUNCTYPE(made, made, ctypes.c_uint64, *[ctypes.c_void_p] * 3)
        functions = prepare(("gpumem_operator_functions", library))(given, key, *pointers)
        self.__dict__.update(functions)
        self.count_opened: Callable[[int], None] = library.gpumem_count_opened
        """counts operators of this thread's that begin to run (1), or have ended (-1), with those
        inside of them seen: none of these takes the short way"""


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
