"""The virtual GPU's native library as Python calls it: the layouts of native/base/base.h."""

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
    """Return the class of an array; ctypes makes each anew once the last such one has died."""
    return ctypes.c_uint64 * count


_CLOCK_RATE_KHZ = 1_500_000
"""no figure depends on it; code that divides by it must not find 0"""


class ValueLimits(NamedTuple):
    """The bytes up to which values are kept; native/base/values.c says why."""

    small: int
    """of a tensor, or a copy, that is always kept"""
    largest: int
    """of the largest one that is kept where its inputs are known"""
    budget: int
    """of all larger than small ones of a test"""
    backed_small: int
    """of the host's memory that device memory takes, where small ones alone are kept"""
    backed: int
    """of the host's memory that device memory takes"""
    lost: int
    """of unknown results of operators, after which small ones alone are kept"""


LIMITS: Final = ValueLimits(512 << 10, 16 << 20, 4 << 30, 256 << 20, 2 << 30, 128 << 20)
"""those of the native library, which is checked as it is loaded"""


class Capacities(NamedTuple):
    """How much the native library has room for."""

    devices: int
    addresses: int
    """bytes of address space of each device (native/runtime/memory.c)"""
    deferred: int
    """ranges of values that can be computed later (native/base/deferred.c)"""
    card: int
    """bytes of ``gm_card``"""
    account: int
    """bytes of ``gm_account``"""


USES: Final[tuple[BlockUse | Literal["end"], ...]] = (
    *("passing", "kept", "spanning"),
    *("end", "in use", "planned"),
)
"""of ``gm_use``, in its order; at an "end" the spanning ones of before are given back"""
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
    """``gm_card``."""

    _fields_ = (
        ("name", ctypes.c_char * 256),
        *((name, _WORD) for name in _CARD_BYTES),
        *((name, ctypes.c_int32) for name in _CARD_NUMBERS),
    )


class _WorkspaceNote(ctypes.Structure):
    """``note`` of sizes.c."""

    _fields_ = (
        *((name, _WORD) for name in ("time", "address", "least", "usual", "most", "graph")),
        ("use", ctypes.c_int64),
    )


class _EstimatedLibrary(ctypes.Structure):
    """``estimated_library`` of state.c."""

    _fields_ = (("name", ctypes.c_char_p), ("note", ctypes.c_char_p), ("range", ctypes.c_char_p))


class _AnswerStruct(ctypes.Structure):
    """``answer`` of stream_order.c."""

    _fields_ = (*((name, _WORD) for name in ("recorded", "answered", "awaited", "device")),)


class EstimatedLibrary(NamedTuple):
    """A library whose sizes its maker does not document: native/base/estimated_libraries.h."""

    name: str
    note: str
    """of a report on a step that used the library"""
    range: str
    """where its sizes are taken to lie (native/base/sizes.c); "" where no range is told"""


class CopyFaults(NamedTuple):
    """The queued copies to the host that an operator did not make as they were queued."""

    left: int = 0
    """copies that were queued and not made"""
    strays: int = 0
    """copies of a size that no form of the next queued one has"""
    stray_size: int = 0
    """bytes of the first stray"""
    expected_size: int = 0
    """bytes of the last form that was queued in its place"""

    def __bool__(self) -> bool:
        """Return whether any fault was noted."""
        return bool(self.left or self.strays)


class Managed(NamedTuple):
    """Managed memory of this process in bytes: it lies beside the devices' accounts."""

    bytes: int
    peak_bytes: int


class Account(NamedTuple):
    """``gm_account``: one virtual device's memory in bytes, and the number of its calls."""

    charged: int
    peak_charged: int
    mallocs: int
    frees: int
    failures: int


CAPACITIES: Final = Capacities(
    MAX_DEVICES, 1 << 40, 64, ctypes.sizeof(_CardStruct), 8 * len(Account._fields)
)
"""those of the native library, which is checked as it is loaded"""


class SizeCounts(NamedTuple):
    """How many sizes of workspaces were not known in this process."""

    smaller: int = 0
    """those that may be smaller than they were taken"""
    larger: int = 0
    """those that may be larger"""
    choices: int = 0
    """of plans of cuDNN's that PyTorch timed; the one with the largest workspace is kept"""
    bounded: int = 0
    """of the larger, those that were taken as zero for want of an estimate"""


class Convolutions(NamedTuple):
    """How often cuDNN's plans ran in this process."""

    unknown: int = 0
    """convolutions with a workspace that cuDNN could not be asked for; taken as zero"""
    asked: int = 0
    """of convolutions and attention, with the workspace that cuDNN names"""
    astray: int = 0
    """of these, on another card than PyTorch had the plan made for"""
    ranged: int = 0
    """questions for a convolution's workspace that lies in a range"""
    unfit: int = 0
    """how often that found no room, so that PyTorch took the next plan"""


def _check_layouts(library: ctypes.CDLL) -> None:
    """Compare the figures and the structs that Python shares with the library with its own.

    A library that an older version left behind would read past these structs, or write past them.
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
    **dict.fromkeys(("thread_writes", "value_budget", "largest_convolution", "launches"), (_WORD,)),
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
"""what functions of the library return, and take"""


class NativeLibrary:
    """The loaded library. It answers for CUDA to every library that is loaded after it.

    Raises:
        OSError: it is missing, cannot be loaded or was built from other sources than these.
    """

    # -- functions of the library, which run without a frame of Python's --
    # An address is of device memory, and how many bytes there.

    thread_writes: Callable[[], int]
    """returns how often this thread has launched a kernel, or called a library that does"""
    count_operators: Callable[[int], None]
    """counts operators that begin to run (1), or have ended (-1), by themselves"""
    in_operator: Callable[[], bool]
    """returns whether this thread runs an operator whose inner ones are not seen"""
    open_for_writing: Callable[[int, int], bool]
    """makes bytes known that are written now; False: they are too many"""
    is_known: Callable[[int, int], bool]
    """returns whether all are known"""
    forget: Callable[[int, int], None]
    """makes them unknown"""
    fill_zeros: Callable[[int, int], None]
    """makes them zeros, which are known and take no memory of the host"""
    defer: Callable[[int, int], int]
    """notes that they, unknown now, could be computed, and returns the range's number: 0 where
    another process may write there"""
    deferred_at: Callable[[int, int], int]
    """returns the number of the deferred range that holds them, unwritten since; or 0"""
    open_deferred: Callable[[int, int], bool]
    """makes a deferred range known, which is written now; False: the host has no room"""
    set_versions: Callable[[int, int], None]
    """sets CUDA's version (13020 is 13.2) and cuDNN's (92600 is 9.26.0)"""
    set_first_total: Callable[[int], None]
    """lets PyTorch's own libraries see so much memory on each device; 0: what there is"""
    show: Callable[[int], int]
    """shows so many devices to the process (0: none); returns the previous count"""
    machine_device: Callable[[int], int]
    """returns the number that a device of this process has on the machine: another one where the
    process was started with ``CUDA_VISIBLE_DEVICES``"""
    forget_contexts: Callable[[], None]
    """has no device with a primary context, as where a program begins"""
    fill_properties: Callable[[int, int, int], None]
    """writes to an address a device's cudaDeviceProp, in the layout of a major version of CUDA"""
    make_room: Callable[[int, int], None]
    """gives a device so many bytes more than its card has"""
    begin_apart: Callable[[int], None]
    """has a device's next allocations lie in the order of an empty device, whatever it holds"""
    forget_peak: Callable[[int], None]
    """lets a device's account count its peak from now on"""
    forget_managed_peak: Callable[[], None]
    """lets managed memory count its peak from now on"""
    set_value_limits: Callable[[int, int, int], None]
    """sets the bytes of the largest piece that is kept, of all larger ones, and of host memory that
    these take (:class:`ValueLimits`)"""
    value_budget: Callable[[], int]
    """returns the bytes of larger than small tensors that may be kept yet"""
    short_ways: Callable[[int], None]
    """says whether operators that compute nothing are handed to no function of Python's"""
    tell_assumed: Callable[[int], None]
    """says whether any values are assumed: then Python looks at all that is computed"""
    compute_values: Callable[[int], None]
    """says whether Python writes the results of operators: their launches change nothing"""
    tell_nonzeros: Callable[[int], None]
    """sets how many nonzeros sparse sums and products have on this thread; -1: unknown"""
    largest_convolution: Callable[[], int]
    """returns the most bytes of workspace that a convolution with an unknown one may have had since
    the last call"""
    switch_emptying: Callable[[object], None]
    """sets the C function by which PyTorch's emptying of its cache after timing is switched"""
    take_sizes: Callable[[int], None]
    """takes the usual one (0), the least (1) or the most (2) of all unknown sizes"""
    forget_allocator_events: Callable[[], None]
    """forgets such events: a run begins"""
    cudnn_found: Callable[[], int]
    """returns the version of the cuDNN to ask (90501 is 9.5.1), 0 without one"""

    def __init__(self, path: Path = native.LIBRARY) -> None:
        self._lib = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        _check_layouts(self._lib)
        # Libraries open these by name: cuBLASLt the driver's during the import of torch.
        self._by_name = [ctypes.CDLL(str(path)) for path in native.OPENED_BY_NAME]
        for name, (returns, *takes) in _FUNCTIONS.items():
            function = getattr(self._lib, f"gpumem_{name}")
            function.restype, function.argtypes = returns, takes
            if not hasattr(type(self), name):  # else a method calls it
                self.__dict__[name] = function
        rows = ctypes.POINTER(_EstimatedLibrary)()
        count = self._lib.gpumem_estimated_libraries(ctypes.byref(rows))
        self.estimated = [
            EstimatedLibrary(row.name.decode(), row.note.decode(), row.range.decode())
            for row in rows[:count]
        ]
        """the libraries whose sizes are estimates"""
        self._guesses: tuple[int, dict[str, int]] = (-1, {})

    def _figures(self, name: str, count: int, *args: object) -> Sequence[int]:
        """Return the figures that a function writes into the array that is its last argument."""
        figures = _words(count)()
        getattr(self._lib, f"gpumem_{name}")(*args, figures)
        return list(figures)

    def linked_functions(self, folder: Path) -> LinkedFunctions:
        """Compare the functions that torch's libraries in a folder link with those answered."""
        return compare(folder, self._lib)

    def report_to(self, fd: int) -> None:
        """Send every refusal to a file descriptor too, and the end of this process in a test.

        A copy of standard error that was made before pytest captured it. A library that is refused
        something may call ``exit``, and pytest then shows nothing of what it captured.
        """
        self._lib.gpumem_set_terminal(fd)
        atexit.register(self._lib.gpumem_set_terminal, -1)  # Python ends: no library ended it

    def finds_driver(self) -> bool:
        """Return whether libcuda.so.1 is this library to all that look for that name.

        It is a driver's where another library has opened that one before.
        """
        driver = self._by_name[native.OPENED_BY_NAME.index(native.DRIVER)]
        # The dynamic linker looks through the loaded libraries first, in their order.
        return ctypes.CDLL(native.DRIVER.name)._handle == driver._handle

    def set_architectures(self, values: Sequence[int]) -> None:
        """Set the compute capabilities that kernels were compiled for: 86 is 8.6."""
        array = (ctypes.c_int * len(values))(*values)
        self._lib.gpumem_set_architectures(array, len(values))

    def set_kernel_architectures(self, torch: ModuleType) -> None:
        """Set those of torch's kernels: 80 and 90 of "sm_80 sm_90a compute_90".

        CUB, which sorts, scans and selects in them, launches nothing for another architecture.
        """
        flags = torch._C._cuda_getArchFlags() or ""
        self.set_architectures([int(number) for number in re.findall(r"sm_(\d+)", flags)])

    def set_card(self, card: Card) -> None:
        """Make every virtual device one of these."""
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
        """Return a device's accounts."""
        return Account(*self._figures("account", 5, device))

    def managed(self) -> Managed:
        """Return the bytes of managed memory (``cudaMallocManaged``)."""
        return Managed(*self._figures("managed", 2))

    def operator_functions(self, key: int, called: CalledFunctions) -> OperatorFunctions:
        """Return the functions of operators' kernels; OperatorFunctions documents the arguments."""
        return OperatorFunctions(self._lib, key, called)

    def queue_copy(self, *forms: bytes) -> None:
        """Let this thread's next copy to the host bring the form that has as many bytes as it."""
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
        """Call ``callback`` at every copy of unknown bytes to the host.

        It takes the copy's size. Where it returns True the copy fails, with the error of
        :meth:`set_endless`.
        """
        # kept as an attribute: ctypes does not keep the callback alive for the library
        self._readback_callback = _CALLBACK(callback) if callback else _CALLBACK()
        self._lib.gpumem_on_readback(self._readback_callback)

    def on_known_read(self, callback: Callable[[int], bool] | None) -> None:
        """Call ``callback`` with the address of every copy of known bytes to the host.

        Where it returns True they are unknown: they are of an earlier tensor at that address.
        """
        self._known_read_callback = _CALLBACK(callback) if callback else _CALLBACK()
        self._lib.gpumem_on_known_read(self._known_read_callback)

    def set_endless(self, text: str) -> None:
        """Set the text of the CUDA error of a copy in a loop that would not end."""
        self._lib.gpumem_set_endless(text.encode())

    def convolutions(self) -> Convolutions:
        """Return how often cuDNN's plans ran in this process so far."""
        return Convolutions(*self._figures("convolutions", 5))

    @staticmethod
    def _rows(read: Any, kind: type[ctypes.Structure]) -> Any:  # noqa: ANN401 - an array
        """Return the rows that a function of the library copies; None: some are lost."""
        read.restype = _WORD
        count = read(None, _WORD(0))
        if count == LOST:
            return None
        rows = (kind * count)()
        read(rows, _WORD(count))
        return rows

    def workspaces(self) -> list[Alternative] | None:
        """Return the workspaces of unknown size since sizes were last taken; None: too many."""
        notes = self._rows(self._lib.gpumem_workspaces, _WorkspaceNote)
        if notes is None:
            return None
        workspaces: list[Alternative] = []
        end = 0.0  # the next one: 0 if none follows
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
        """Return the events that PyTorch's allocator asked for, in its order; None: too many."""
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
        """Return how many of them a GPU may not have reached by then.

        Returns:
            also how many events of the allocator of pinned memory.
        """
        tensors, pinned = self._figures("early_answers", 2)
        return tensors, pinned

    def size_counts(self) -> SizeCounts:
        """Return how many sizes were not known in this process so far."""
        return SizeCounts(*self._figures("uncertain_sizes", 4))

    def guesses(self) -> dict[str, int]:
        """Return the number of questions for a size to each of ``estimated``, by its name.

        The answer to such a question is an estimate, or zero.
        """
        total, questions = self._guesses
        new_total = self._lib.gpumem_guessed()
        if new_total != total:
            names = [row.name for row in self.estimated]
            questions = dict(zip(names, self._figures("guesses", len(names)), strict=True))
            self._guesses = new_total, questions
        return questions

    def unsupported(self) -> dict[str, int]:
        """Return the unsupported functions that were called, with the number of calls."""
        calls = ctypes.c_uint64()
        functions = {}
        for index in range(self._lib.gpumem_unsupported_count()):
            name = self._lib.gpumem_unsupported_name(index, ctypes.byref(calls))
            functions[name.decode()] = calls.value
        return functions
