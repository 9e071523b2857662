"""Python's binding of the virtual GPU's native library; the layouts are in native/base/base.h."""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import re
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from pytest_gpumem.devices.base import AllocatorEvent, Alternative, BlockUse
from pytest_gpumem.devices.virtual import native
from pytest_gpumem.devices.virtual.linked_functions import compare
from pytest_gpumem.devices.virtual.operator_functions import CalledFunctions, OperatorFunctions
from pytest_gpumem.spec import MAX_DEVICES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import ModuleType

    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.devices.virtual.linked_functions import LinkedFunctions

_WORD = ctypes.c_uint64
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, _WORD)


@functools.cache
def _words(count: int) -> type[ctypes.Array[ctypes.c_uint64]]:
    """Return an array class, cached: otherwise ctypes creates it again once no array is left."""
    return ctypes.c_uint64 * count


_CLOCK_RATE_KHZ = 1_500_000
"""a nonzero value, because programs may divide by it; no figure depends on it"""


class ValueLimits(NamedTuple):
    """Limits in bytes on stored values; native/base/values.c has the reasons."""

    small: int
    """a tensor or a copy up to this size is always stored"""
    largest: int
    """a tensor up to this size is stored if its inputs are known"""
    budget: int
    """total bytes per test of all stored tensors larger than ``small``"""
    backed_small: int
    """maximum host memory that device memory uses while no values are computed; also the maximum
    size of a deferred tensor"""
    backed: int
    """maximum host memory that device memory uses while values are computed"""
    lost: int
    """if operators' unknown results exceed this, only small tensors are stored"""


LIMITS: Final = ValueLimits(512 << 10, 16 << 20, 4 << 30, 256 << 20, 2 << 30, 128 << 20)
"""a copy of the native library's limits: ``_check_layouts`` compares both"""


class Capacities(NamedTuple):
    """Fixed sizes in the native library."""

    devices: int
    addresses: int
    """bytes of address space per device (native/runtime/memory.c)"""
    deferred: int
    """number of ranges of values that can be deferred (native/base/deferred.c)"""
    card: int
    """bytes of ``gm_card``"""
    account: int
    """bytes of ``gm_account``"""


USES: Final[tuple[BlockUse | Literal["end"], ...]] = (
    *("passing", "kept", "spanning"),
    *("end", "in use", "planned"),
)
"""the values of ``gm_use``, in order; "end" frees the preceding "spanning" blocks"""
LOST: Final = (1 << 64) - 1
_CARD_BYTES = (
    *("total_memory", "context_memory", "l2_cache_size", "shared_memory_per_block"),
    *("shared_memory_per_block_optin", "shared_memory_per_sm", "reserved_shared_memory_per_block"),
)
_CARD_NUMBERS = (
    *("major", "minor", "sm_count", "memory_bus_width", "max_threads_per_sm"),
    *("max_blocks_per_sm", "registers_per_sm", "clock_rate_khz"),
)


class _CardStruct(ctypes.Structure):
    """Mirrors the struct ``gm_card``."""

    _fields_ = (
        ("name", ctypes.c_char * 256),
        *((name, _WORD) for name in _CARD_BYTES),
        *((name, ctypes.c_int32) for name in _CARD_NUMBERS),
    )


class _WorkspaceNote(ctypes.Structure):
    """Mirrors the struct ``note`` in sizes.c."""

    _fields_ = (
        *((name, _WORD) for name in ("time", "address", "least", "usual", "most", "graph")),
        ("use", ctypes.c_int64),
    )


class _EstimatedLibrary(ctypes.Structure):
    """Mirrors the struct ``estimated_library`` in state.c."""

    _fields_ = (("name", ctypes.c_char_p), ("note", ctypes.c_char_p), ("range", ctypes.c_char_p))


class _AnswerStruct(ctypes.Structure):
    """Mirrors the struct ``answer`` in stream_order.c."""

    _fields_ = (*((name, _WORD) for name in ("recorded", "answered", "awaited", "device")),)


class EstimatedLibrary(NamedTuple):
    """A library with undocumented workspace sizes (native/base/estimated_libraries.h)."""

    name: str
    note: str
    """note in the report of a step that used the library"""
    range: str
    """description of the range assumed for its sizes (native/base/sizes.c), for reports; "" if no
    range is reported"""


class CopyFaults(NamedTuple):
    """Queued copies to the host that an operator did not make as queued."""

    left: int = 0
    """queued copies that were not made"""
    strays: int = 0
    """copies whose size was none of the possible sizes of the first copy in the queue"""
    stray_size: int = 0
    """bytes of the first stray"""
    expected_size: int = 0
    """bytes of the first copy in the queue when the first stray came; if it has several possible
    sizes, the last of them"""

    def __bool__(self) -> bool:
        """Return whether any fault was noted."""
        return bool(self.left or self.strays)


class Managed(NamedTuple):
    """Managed memory of this process in bytes; the devices' accounts do not include it."""

    bytes: int
    peak_bytes: int


class Account(NamedTuple):
    """``gm_account``: one virtual device's memory in bytes, and its numbers of calls by kind."""

    charged: int
    peak_charged: int
    mallocs: int
    frees: int
    failures: int


CAPACITIES: Final = Capacities(
    MAX_DEVICES, 1 << 40, 64, ctypes.sizeof(_CardStruct), 8 * len(Account._fields)
)
"""a copy of the native library's sizes: ``_check_layouts`` compares both"""


class SizeCounts(NamedTuple):
    """Counts the workspaces of unknown size in this process."""

    smaller: int = 0
    """workspaces that may be smaller than assumed"""
    larger: int = 0
    """workspaces that may be larger than assumed"""
    choices: int = 0
    """how often PyTorch times several cuDNN plans; here it uses the one with the largest
    workspace"""
    bounded: int = 0
    """workspaces counted in ``larger`` that are assumed to be zero because there is no estimate"""


class Convolutions(NamedTuple):
    """Counts how often cuDNN's plans ran in this process."""

    unknown: int = 0
    """convolutions whose workspace cuDNN could not compute; assumed to be zero"""
    asked: int = 0
    """convolutions and attention whose workspace cuDNN computed"""
    astray: int = 0
    """calls counted in ``asked`` whose plan PyTorch created for another card"""
    ranged: int = 0
    """queries for the size of a convolution's workspace that is known only as a range"""
    unfit: int = 0
    """how often such a workspace did not fit, so that PyTorch tried the next plan"""


def _check_layouts(library: ctypes.CDLL) -> None:
    """Raise if the library's constants and structs differ from Python's.

    A library left behind by an older version would read or write past these structs.
    """
    for name, expected in (("value_limits", LIMITS), ("capacities", CAPACITIES)):
        answered = _words(len(expected))()
        if hasattr(library, f"gpumem_{name}"):
            getattr(library, f"gpumem_{name}")(answered)
        if tuple(answered) != expected:
            message = (
                f"{library._name} was built from the sources of another version "
                f"(its gpumem_{name} has {tuple(answered)}, Python {tuple(expected)})"
            )
            raise OSError(message)


_INT = ctypes.c_int
_AT = (ctypes.c_void_p, _WORD)
_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("open_for_writing", "is_known", "open_deferred"), (ctypes.c_bool, *_AT)),
    **dict.fromkeys(("forget", "fill_zeros"), (None, *_AT)),
    **dict.fromkeys(("defer", "deferred_at"), (_WORD, *_AT)),
    **dict.fromkeys(
        ("thread_writes", "value_budget", "largest_convolution", "launches", "lost_to_kernels"),
        (_WORD,),
    ),
    **dict.fromkeys(("forget_contexts", "forget_managed_peak", "forget_allocator_events"), (None,)),
    **dict.fromkeys(("begin_apart", "count_operators", "forget_peak", "take_sizes"), (None, _INT)),
    **dict.fromkeys(("short_ways", "tell_assumed", "compute_values"), (None, _INT)),
    **dict.fromkeys(("show", "machine_device"), (_INT, _INT)),
    "in_operator": (ctypes.c_bool,),
    "cudnn_found": (_INT,),
    "guessed": (_WORD,),
    "describe": (ctypes.c_char_p, _INT),
    "unsupported_name": (ctypes.c_char_p, _INT, ctypes.POINTER(_WORD)),
    "set_versions": (None, _INT, _INT),
    "set_first_total": (None, _WORD),
    "fill_properties": (None, ctypes.c_void_p, _INT, _INT),
    "make_room": (None, _INT, _WORD),
    "set_value_limits": (None, _WORD, _WORD, _WORD),
    "switch_emptying": (None, ctypes.c_void_p),
    "tell_nonzeros": (None, ctypes.c_int64),
}
"""argument and result types of the library's functions"""


class NativeLibrary:
    """The loaded library. It implements CUDA for every library that is loaded after it.

    Raises:
        OSError: the library is missing, cannot be loaded or was built from other sources.
    """

    # -- functions of the library, which run without a Python frame --
    # Addresses are in device memory; the second argument is the number of bytes.

    thread_writes: Callable[[], int]
    """returns how many kernels this thread has launched, directly or through a library"""
    count_operators: Callable[[int], None]
    """counts operators that begin to run (1) or have ended (-1), but not their inner operators"""
    in_operator: Callable[[], bool]
    """returns whether this thread is inside an operator whose inner operators are not
    intercepted"""
    open_for_writing: Callable[[int, int], bool]
    """marks bytes as known before they are written; False if ValueLimits do not allow it: then they
    are unknown"""
    is_known: Callable[[int, int], bool]
    """returns whether all of these bytes are known"""
    forget: Callable[[int, int], None]
    """marks bytes as unknown"""
    fill_zeros: Callable[[int, int], None]
    """sets bytes to zeros, which are known and use no additional host memory"""
    defer: Callable[[int, int], int]
    """marks unknown bytes as computable later; returns the range's number, or 0 if another process
    may write there"""
    deferred_at: Callable[[int, int], int]
    """returns the number of the deferred range around these bytes; 0 if there is none, or it was
    overwritten"""
    open_deferred: Callable[[int, int], bool]
    """marks a deferred range as known before it is written; False if host memory is short"""
    set_versions: Callable[[int, int], None]
    """sets CUDA's version (13020 is 13.2) and cuDNN's (92600 is 9.26.0)"""
    set_first_total: Callable[[int], None]
    """sets the total memory per device that PyTorch's own libraries see; 0: the real total"""
    show: Callable[[int], int]
    """sets how many devices the process sees (0: none); returns the previous number"""
    machine_device: Callable[[int], int]
    """returns the machine's index of a device of this process; they differ if the process was
    started with ``CUDA_VISIBLE_DEVICES``"""
    forget_contexts: Callable[[], None]
    """removes the primary contexts of all devices, as when a program begins"""
    fill_properties: Callable[[int, int, int], None]
    """writes a device's cudaDeviceProp to an address, in the layout of a major version of CUDA"""
    make_room: Callable[[int, int], None]
    """sets how many bytes a device has in addition to its card's memory"""
    begin_apart: Callable[[int], None]
    """places a device's next allocations in unused address space, in the same order as on an empty
    device"""
    forget_peak: Callable[[int], None]
    """resets the peak in a device's account"""
    forget_managed_peak: Callable[[], None]
    """resets the peak of managed memory"""
    set_value_limits: Callable[[int, int, int], None]
    """sets the limits ``largest``, ``budget`` and ``backed`` of :class:`ValueLimits`"""
    value_budget: Callable[[], int]
    """returns how many bytes remain of the limit ``budget`` of :class:`ValueLimits`"""
    lost_to_kernels: Callable[[], int]
    """returns how often kernels outside of operators have made all values unknown"""
    short_ways: Callable[[int], None]
    """sets whether operators may take the short way, which bypasses Python (OperatorFlags)"""
    tell_assumed: Callable[[int], None]
    """sets whether any values are assumed; if so, computed operators go through Python"""
    compute_values: Callable[[int], None]
    """sets whether Python writes operators' results: then kernels that operators launch leave known
    values unchanged"""
    tell_nonzeros: Callable[[int], None]
    """sets the number of nonzeros in the result of this thread's next sparse sum or product; -1:
    unknown"""
    largest_convolution: Callable[[], int]
    """returns the largest upper bound, in bytes, of convolutions' unknown workspaces since the last
    call"""
    switch_emptying: Callable[[object], None]
    """sets the C function that switches whether PyTorch empties its cache after it has timed cuDNN
    plans"""
    take_sizes: Callable[[int], None]
    """selects the usual (0), the smallest (1) or the largest (2) of each unknown size"""
    forget_allocator_events: Callable[[], None]
    """clears the allocator's events at the start of a run"""
    cudnn_found: Callable[[], int]
    """returns the version of the cuDNN that was found (90501 is 9.5.1); 0 if none was, or before
    the first search"""

    def __init__(self, path: Path = native.LIBRARY) -> None:
        self._lib = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        _check_layouts(self._lib)
        # Other libraries dlopen these by SONAME: cuBLASLt opens the driver while torch is imported.
        self._by_name = [ctypes.CDLL(str(path)) for path in native.OPENED_BY_NAME]
        for name, (returns, *takes) in _FUNCTIONS.items():
            function = getattr(self._lib, f"gpumem_{name}")
            function.restype, function.argtypes = returns, takes
            if not hasattr(type(self), name):  # else a method of that name wraps the function
                self.__dict__[name] = function
        rows = ctypes.POINTER(_EstimatedLibrary)()
        count = self._lib.gpumem_estimated_libraries(ctypes.byref(rows))
        self.estimated = [
            EstimatedLibrary(row.name.decode(), row.note.decode(), row.range.decode())
            for row in rows[:count]
        ]
        self._guesses: tuple[int, dict[str, int]] = (-1, {})

    def _figures(self, name: str, count: int, *args: object) -> Sequence[int]:
        """Return the numbers that a function writes into an array, which is its last argument."""
        figures = _words(count)()
        getattr(self._lib, f"gpumem_{name}")(*args, figures)
        return list(figures)

    def linked_functions(self, folder: Path) -> LinkedFunctions:
        """Return the CUDA functions that torch's libraries link, and those missing in this one.

        ``folder`` contains torch's libraries.
        """
        return compare(folder, self._lib)

    def report_to(self, fd: int) -> None:
        """Also report refused calls, and a process's end in a test, to a file descriptor.

        The descriptor is a copy of standard error from before pytest captured it. A library whose
        call is refused may call ``exit``, and pytest then shows none of the captured output.
        """
        self._lib.gpumem_set_terminal(fd)
        atexit.register(self._lib.gpumem_set_terminal, -1)  # a normal exit needs no message

    def finds_driver(self) -> bool:
        """Return whether opening libcuda.so.1 by name finds this library.

        It finds a real driver if another library has already opened that one.
        """
        driver = self._by_name[native.OPENED_BY_NAME.index(native.DRIVER)]
        # The dynamic linker searches the loaded libraries first, in order.
        return ctypes.CDLL(native.DRIVER.name)._handle == driver._handle

    def set_architectures(self, values: Sequence[int]) -> None:
        """Set the compute capabilities that kernels are compiled for: 86 is 8.6."""
        array = (ctypes.c_int * len(values))(*values)
        self._lib.gpumem_set_architectures(array, len(values))

    def set_kernel_architectures(self, torch: ModuleType) -> None:
        """Set the compute capabilities of torch's kernels: 80 and 90 for "sm_80 sm_90a compute_90".

        The kernels sort, scan and select with CUB, which launches nothing for other architectures.
        """
        flags = torch._C._cuda_getArchFlags() or ""
        self.set_architectures([int(number) for number in re.findall(r"sm_(\d+)", flags)])

    def set_card(self, card: Card) -> None:
        """Set the card of all virtual devices."""
        self._lib.gpumem_set_card(
            ctypes.byref(
                _CardStruct(
                    name=card.device_name.encode(),
                    total_memory=card.total_memory,
                    context_memory=card.context,
                    l2_cache_size=card.l2_cache_size,
                    major=card.capability[0],
                    minor=card.capability[1],
                    sm_count=card.sm_count,
                    memory_bus_width=card.memory_bus_width,
                    clock_rate_khz=_CLOCK_RATE_KHZ,
                    **vars(card.limits),
                )
            )
        )

    def describe(self, count: int) -> str:
        """Return the value of GPUMEM_VIRTUAL for a child process with ``count`` of these cards."""
        return str(self._lib.gpumem_describe(count), "ascii")

    def account(self, device: int) -> Account:
        """Return a device's account."""
        return Account(*self._figures("account", 5, device))

    def managed(self) -> Managed:
        """Return the bytes of managed memory (``cudaMallocManaged``)."""
        return Managed(*self._figures("managed", 2))

    def operator_functions(self, key: int, called: CalledFunctions) -> OperatorFunctions:
        """Return the functions of operators' kernels; see OperatorFunctions for the arguments."""
        return OperatorFunctions(self._lib, key, called)

    def queue_copy(self, *forms: bytes) -> None:
        """Queue the bytes of this thread's next copy to the host: a form for each possible size."""
        for place, content in enumerate(forms):
            if not self._lib.gpumem_queue_copy(content, ctypes.c_uint64(len(content)), place > 0):
                raise MemoryError

    def drop_queued_copies(self) -> CopyFaults:
        """Empty this thread's queue; return the faults since the last call."""
        return CopyFaults(*self._figures("drop_queued_copies", 4))

    def readbacks(self) -> int:
        """Return how many copies of unknown bytes to the host this process has made."""
        return self._figures("readbacks", 2)[0]

    def on_readback(self, callback: Callable[[int], bool] | None) -> None:
        """Call ``callback`` on every copy of unknown bytes to the host.

        The callback receives the copy's size. If it returns True, the copy fails with the error
        text of :meth:`set_endless`.
        """
        # The attribute keeps the callback alive: ctypes does not.
        self._readback_callback = _CALLBACK(callback) if callback else _CALLBACK()
        self._lib.gpumem_on_readback(self._readback_callback)

    def on_known_read(self, callback: Callable[[int], bool] | None) -> None:
        """Call ``callback`` with the address of every copy of known bytes to the host.

        If it returns True, the bytes become unknown: they belong to an earlier tensor at that
        address.
        """
        self._known_read_callback = _CALLBACK(callback) if callback else _CALLBACK()
        self._lib.gpumem_on_known_read(self._known_read_callback)

    def set_endless(self, text: str) -> None:
        """Set the text of the CUDA error that a copy in an endless loop fails with."""
        self._lib.gpumem_set_endless(text.encode())

    def convolutions(self) -> Convolutions:
        """Return how often cuDNN's plans have run in this process."""
        return Convolutions(*self._figures("convolutions", 5))

    @staticmethod
    def _rows(read: Any, kind: type[ctypes.Structure]) -> Any:  # noqa: ANN401 - an array
        """Return the rows that a library function copies; None if some are lost."""
        read.restype = _WORD
        count = read(None, _WORD(0))
        if count == LOST:
            return None
        rows = (kind * count)()
        read(rows, _WORD(count))
        return rows

    def workspaces(self) -> list[Alternative] | None:
        """Return the workspaces of unknown size since the last ``take_sizes``; None if too many."""
        notes = self._rows(self._lib.gpumem_workspaces, _WorkspaceNote)
        if notes is None:
            return None
        workspaces: list[Alternative] = []
        end = 0.0  # time of the next "end"; 0: none follows
        for note in reversed(notes):
            time, use = note.time / 1000, USES[note.use]
            if use == "end":
                end = time
            elif note.least < note.most:
                sizes = note.least, note.usual, note.most
                ended = end if end and use == "spanning" else time
                workspaces.append(Alternative(time, use, note.address, *sizes, ended))
        return workspaces[::-1]

    def allocator_events(self) -> list[AllocatorEvent] | None:
        """Return the events that PyTorch's allocator queried, in order; None if too many."""
        events = self._rows(self._lib.gpumem_allocator_events, _AnswerStruct)
        if events is None:
            return None
        return [
            AllocatorEvent(
                *(event.recorded / 1000, event.answered / 1000),
                *(event.awaited / 1000 or math.inf, event.device),
            )
            for event in events
        ]

    def early_answers(self) -> tuple[int, int]:
        """Return how many events a GPU may not have reached when the allocator queried them.

        Returns:
            the number for the device allocator, and for the pinned memory allocator.
        """
        tensors, pinned = self._figures("early_answers", 2)
        return tensors, pinned

    def size_counts(self) -> SizeCounts:
        """Return how many workspace sizes have been unknown in this process."""
        return SizeCounts(*self._figures("uncertain_sizes", 4))

    def guesses(self) -> dict[str, int]:
        """Return the number of size queries to each library in ``estimated``, by its name.

        Each of these queries returned an estimate, or zero.
        """
        total, questions = self._guesses
        new_total = self._lib.gpumem_guessed()
        if new_total != total:
            names = [row.name for row in self.estimated]
            questions = dict(zip(names, self._figures("guesses", len(names)), strict=True))
            self._guesses = new_total, questions
        return questions

    def unsupported(self) -> dict[str, int]:
        """Return the unsupported functions that were called, with their numbers of calls."""
        calls = ctypes.c_uint64()
        functions = {}
        for index in range(self._lib.gpumem_unsupported_count()):
            name = self._lib.gpumem_unsupported_name(index, ctypes.byref(calls))
            functions[name.decode()] = calls.value
        return functions
