"""The virtual GPU: PyTorch's own CUDA code and caching allocator over the native library.

The library has to be loaded before torch is imported: it then implements CUDA. The device is
visible only between ``open`` and ``close``, or always after ``show_always``.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import sys
import warnings
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.autograd_threads import (
    await_autograd,
    await_idle_threads,
    has_autograd_threads,
)
from pytest_gpumem.devices.base import Alternatives, Device
from pytest_gpumem.devices.benchmark_mode import watch_benchmark_mode
from pytest_gpumem.devices.cuda_start import FirstUse, start_cuda
from pytest_gpumem.devices.memory_cap import CAPS, set_cap, set_memory
from pytest_gpumem.devices.torch_build import installed_torch, torch_is_imported
from pytest_gpumem.devices.torch_import import IMPORTS
from pytest_gpumem.devices.virtual import native, uncaptured_stderr
from pytest_gpumem.devices.virtual.account_watch import AccountWatch
from pytest_gpumem.devices.virtual.aspects import Aspects
from pytest_gpumem.devices.virtual.card_change import CardChange
from pytest_gpumem.devices.virtual.cudnn_notes import keep_no_plans
from pytest_gpumem.devices.virtual.inherited import adapted
from pytest_gpumem.devices.virtual.library import CAPACITIES, NativeLibrary
from pytest_gpumem.devices.virtual.missing_libraries import supply_missing_libraries
from pytest_gpumem.devices.virtual.visibility import DeviceVisibility, GpuLookup
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import ModuleType

    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.devices.virtual import GuessRows
    from pytest_gpumem.devices.virtual.linked_functions import LinkedFunctions
    from pytest_gpumem.devices.virtual.value_engine import VirtualValues
    from pytest_gpumem.measurement import DeviceInfo
    from pytest_gpumem.notes import Note

WHAT: Final = "the virtual GPU"
FIRST_TOTAL: Final = 1 << 40
"""total memory in bytes that every virtual GPU reports while PyTorch initializes"""
PROBE: Final = 64 << 20
"""bytes that a trial cap leaves free if PyTorch applies the cap's fraction to FIRST_TOTAL; the same
fraction of a card's memory leaves less than half of them"""

CONTAINER_PAGE: Final = (
    "https://pytest-gpumem.readthedocs.io/en/latest/how-to/light.html#on-a-mac-or-on-windows"
)


def obstacle() -> tuple[str, str] | None:
    """Return the problem and its remedy if the virtual GPU cannot work here, or None."""
    if not sys.platform.startswith("linux"):
        return (
            f"it needs Linux, and this system is {sys.platform}",
            f"run the tests in a Linux container ({CONTAINER_PAGE}), or under WSL",
        )
    problem = native.build_problem()
    if problem is not None:
        return problem.problem, problem.remedy
    build = installed_torch()
    if build is None:
        return "torch is not installed", "pip install torch"
    if build.hip is not None:
        return (
            f"torch {build.version} is built for AMD's ROCm, and {WHAT} is an NVIDIA GPU",
            "run the tests on an AMD GPU, or install a CUDA build of torch",
        )
    if build.cuda is None:
        return (
            f"torch {build.version} is built without CUDA",
            "install a CUDA build of torch (on Linux: pip install torch)",
        )
    return None


def require_possible(count: int) -> None:
    """Refuse more devices than there are, or than fit this process's address space.

    Raises:
        DeviceError: there are too many, or the process may not use as much address space.
    """
    most = CAPACITIES.devices
    if count > most:
        raise DeviceError(f"devices={count}", f"{WHAT} has {most}", "request fewer GPUs")
    import resource  # not on Windows, which imports this module too

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    needed = count * CAPACITIES.addresses
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise DeviceError(
            WHAT,
            f"it needs {format_size(needed)} of address space (not of memory), and the "
            f"limit of this process is {format_size(limit)} (ulimit -v)",
            (
                "remove this limit (ulimit -v unlimited); to limit memory itself, use a cgroup "
                "(docker run -m)"
            ),
        )


class VirtualDevice(Device):
    """A process's only virtual GPU (``VirtualDevice.load``); up to 16 devices of one card."""

    option = "virtual"
    first = 0
    """index in this process of the first device to measure on"""
    least = 1
    """minimum number of devices to show"""
    shown_always = 0
    """number of devices that code outside of marked tests sees"""
    named: Card | None = None
    """the card requested by a program or a conftest file; None without one"""
    stubs: Sequence[str] = ()
    """SONAMEs of the CUDA libraries that are not installed"""
    demanded: Card | None = None
    """the card requested by an option of the session; takes precedence over ``named``"""

    _loaded: VirtualDevice | None = None

    def __init__(self, library: NativeLibrary, card: Card) -> None:
        self.library = library
        self.card = card
        self._torch: ModuleType | None = None
        self._visibility: DeviceVisibility | None = None
        self._opened_card: Card | None = None
        self._card_change: CardChange | None = None
        self._opened_count = 0
        """number of open devices; 0: none"""
        self._first_use: FirstUse | None = None
        self._resting = 0
        """number of devices that ``close`` has left open because they are always shown"""
        self._kept_total: bool | None = None
        self._extra = [0] * CAPACITIES.devices
        self._unsupported: dict[str, int] = {}
        self._aspects = Aspects(library)
        self.values: VirtualValues = self._aspects.values
        self.gpu_choices = self._aspects.gpu_choices
        self._stack = ExitStack()
        self._adaptation = ExitStack()
        """restores the environment when it closes; each run sets the environment again, because a
        test may have changed it"""

    @classmethod
    def load(cls, card: Card, path: Path = native.LIBRARY) -> VirtualDevice:
        """Load the library at ``path``, once per process; ``card`` is the devices' default card.

        Raises:
            DeviceError: the virtual GPU cannot be loaded here, or torch is already imported.
        """
        # obstacle() looks for torch, which may make the plugin load its session's virtual GPU: so
        # _loaded is read again afterwards.
        reason = obstacle() if cls._loaded is None else None
        if cls._loaded is not None:
            cls._loaded.card = card
            return cls._loaded
        if reason is None and torch_is_imported():
            reason = (
                "torch was imported before the virtual GPU could be loaded",
                (
                    "load the virtual GPU first: pytest -p gpumem ...; in a program, call "
                    "pytest_gpumem.use_virtual_gpu() before importing torch"
                ),
            )
        if reason is not None:
            raise DeviceError(WHAT, *reason)
        try:
            library = NativeLibrary(path)
        except (OSError, AttributeError) as error:  # a library of another version lacks a function
            remedy = (
                "install pytest-gpumem again on this machine, from source; in a source tree: "
                "python setup.py build_ext --inplace"
            )
            raise DeviceError(WHAT, f"its library cannot be loaded: {error}", remedy) from error
        if not library.finds_driver():
            raise DeviceError(
                WHAT,
                "a driver's libcuda.so.1 was loaded into this process before",
                "load the virtual GPU before other libraries that use CUDA (pytest -p gpumem ...), "
                "and leave libcuda.so.1 out of LD_PRELOAD",
            )
        stubs = supply_missing_libraries()
        library.report_to(uncaptured_stderr())
        library.set_card(card)
        library.set_first_total(FIRST_TOTAL)
        library.show(0)  # a child process of a marked test has inherited it as visible
        cls._loaded = device = cls(library, card)
        device.stubs = stubs
        atexit.register(device._let_threads_end)
        IMPORTS.call_after("torch", device._imported)
        device._aspects.install()
        return device

    @classmethod
    def loaded(cls) -> VirtualDevice | None:
        """Return this process's virtual GPU; None before one is loaded."""
        return cls._loaded

    def show_always(self, count: int) -> None:
        """Show ``count`` devices also between steps, from now on, or once torch is imported.

        Args:
            count: number of devices; 0: show them only between ``open`` and ``close``.
        """
        self.shown_always = count
        if self._torch is not None:
            self.close()

    def lookup_of(self, path: Path, root: Path) -> GpuLookup | None:
        """Return the project's line that looked for GPUs while the virtual GPU was hidden, or None.

        Args:
            path: the test's file, whose own lines are preferred.
            root: the project's folder; packages installed inside it do not count.
        """
        if self._visibility is None or self.shown_always:
            return None
        return self._visibility.lookup_of(path, root)

    def _imported(self, torch: ModuleType) -> None:
        self._torch = torch
        self._visibility = DeviceVisibility(torch)
        if torch.version.cuda:
            self._aspects.read_versions(torch, self.stubs)
        # In benchmark mode a test must not get the plan that PyTorch cached for an earlier test.
        # (If a convolution has run before, the cache stays on: PyTorch reads the cache's limit at
        # the first convolution.)
        watch_benchmark_mode(torch, keep_no_plans)
        if self.shown_always:
            self.open(None, self.shown_always)

    def linked_functions(self) -> LinkedFunctions:
        """Return the CUDA functions that torch links, and which of them are not implemented."""
        return self._aspects.linked_functions(self._torch)

    def alternatives(self) -> Alternatives:
        """See :meth:`pytest_gpumem.devices.base.Device.alternatives`."""
        return self.gpu_choices.alternatives()

    def await_use(self, count: int, begin: Callable[[], None]) -> None:
        """See :meth:`pytest_gpumem.devices.base.Device.await_use`."""
        count = max(self.first + count, self.least)
        torch = self._require_torch(count)
        self.library.set_card(self.card)
        self._show(count)
        self._watch_runs()
        self._adaptation.enter_context(adapted(self.library.describe(count)))

        def begin_without_contexts() -> None:
            begin()
            self.library.forget_contexts()  # a program that uses one device has one context

        # Called only at the first use, because PyTorch lets no process forked after it use CUDA.
        prepare = functools.partial(self.library.set_kernel_architectures, torch)
        self._first_use = FirstUse(begin_without_contexts, prepare)

    def _require_torch(self, count: int) -> ModuleType:
        """Import torch; refuse a build without CUDA, or too many devices.

        Raises:
            DeviceError: torch was imported too early or is built without CUDA, or there are too
                many devices.
        """
        require_possible(count)
        import torch

        if self._visibility is None:
            raise DeviceError(WHAT, "torch was not imported as usual", "please report this")
        if not torch.version.cuda:
            raise DeviceError(
                WHAT, f"torch {torch.__version__} is built without CUDA", "install one"
            )
        return torch

    def open(self, card: Card | None, count: int) -> DeviceInfo:
        """See :meth:`pytest_gpumem.devices.base.Device.open`."""
        if self._first_use is not None:
            self._first_use.happen()
        card = card or self.card
        count = max(self.first + count, self.least, self.shown_always)
        torch = self._require_torch(count)
        if card is self._opened_card and count == self._resting:
            self._resting = 0
            torch.cuda.set_device(self.first)
            self._set_totals(count)
            self._begin(count)
            return card.info
        self._resting = 0
        self._stack.close()  # closes a device that is always shown
        self._show(count)
        is_first = not torch.cuda.is_initialized()
        try:
            if is_first:
                self.library.set_kernel_architectures(torch)
                self.library.set_card(card)
                with warnings.catch_warnings():  # PyTorch warns if it was not built for the card
                    warnings.simplefilter("ignore")
                    start_cuda()
            self.library.set_first_total(0)
            torch.cuda.set_device(self.first)
            VIEW.install()
            CAPS.install()
            if card is not self._opened_card:
                self._card_change = self._card_change or CardChange(self.library, torch)
                self._card_change.to(card)
                self._opened_card = card
            if self._kept_total is None:  # now, before a measurement: the check allocates
                with VIEW.hidden([0]):
                    self._kept_total = self._keeps_total()
            self._set_totals(count)
            if is_first:
                self.library.forget_contexts()
        except BaseException:
            self._hide()
            raise
        self._watch_runs()
        self._opened_count = count
        self._begin(count)
        return card.info

    def _watch_runs(self) -> None:
        """Let runs compute values until ``_stack`` closes, which also restores the environment."""
        self._stack.callback(self._adaptation.close)
        self._stack.enter_context(self.values.running())

    def _begin(self, count: int) -> None:
        """Start a new run: reset what is recorded about it, and what child processes inherit."""
        self._adaptation.close()
        self._adaptation.enter_context(adapted(self.library.describe(count)))
        self._unsupported = self.library.unsupported()
        self._aspects.begin()

    def close(self) -> None:
        """See :meth:`pytest_gpumem.devices.base.Device.close`."""
        shown = max(self.first + self.shown_always, self.least, self.shown_always)
        if self.shown_always and self._opened_card is self.card and self._opened_count == shown:
            # To hide the device and show it again would take a tenth of a small test's time.
            self._release()
            self._begin(shown)
            self._resting = shown
            return
        self._hide()
        if self.shown_always:
            self.open(None, self.shown_always)

    def _release(self) -> None:
        """Free the allocator's cache, and remove the room that ``make_room`` added."""
        if self._torch is not None and self._torch.cuda.is_initialized():
            self._torch.cuda.empty_cache()  # its blocks would serve requests on a hidden device
        self.make_room([0] * (CAPACITIES.devices - self.first))

    def _hide(self) -> None:
        self._resting = self._opened_count = 0
        self._stack.close()
        self._release()
        self._show(0)

    def _let_threads_end(self) -> None:
        """Make PyTorch's autograd threads drop their Python objects before the interpreter ends.

        Python ends a thread that acquires the GIL after that, and C++ then aborts the process
        ("terminate called without an active exception").
        """
        torch = self._torch
        if torch is None or not torch.cuda.is_initialized() or not has_autograd_threads():
            return
        with suppress(Exception):  # a forked child does not have its parent's threads
            self._show(CAPACITIES.devices)
            # Leak one reference, so that the threads never drop the last one.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(await_autograd()))
            await_idle_threads()

    def _show(self, count: int) -> None:
        self.library.show(count)
        if self._visibility is not None:
            self._visibility.show(count)

    def _keeps_total(self) -> bool:
        """Test, by allocating, whether PyTorch computes caps from the first total that it read."""
        import torch

        torch.cuda.empty_cache()
        room = torch.cuda.memory_reserved(0) + PROBE
        CAPS.cap(0).total = FIRST_TOTAL
        set_cap(0, room)
        try:
            torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(PROBE // 2, 0))
        except torch.OutOfMemoryError:
            return False
        finally:
            set_cap(0, None)
            torch.cuda.empty_cache()
        return True

    def make_room(self, extra: list[int]) -> None:
        """See :meth:`pytest_gpumem.devices.base.Device.make_room`."""
        first = self.first
        if extra == self._extra[first : first + len(extra)]:
            return
        for index, size in enumerate(extra, first):
            self.library.make_room(index, size)
            self._extra[index] = size
        self._set_totals(first + len(extra))

    def _set_totals(self, count: int) -> None:
        """Set the caps again, because the devices' totals may have changed."""
        torch = self._torch
        if self._kept_total is None or torch is None or not torch.cuda.is_initialized():
            return
        card = self._opened_card or self.card
        for index in range(min(count, torch.cuda.device_count())):
            # PyTorch multiplies a fraction by the total that its allocator read first; older
            # versions, by the present total.
            total = FIRST_TOTAL if self._kept_total else card.total_memory + self._extra[index]
            set_memory(index, card.total_memory, total)

    def trouble(self) -> str | None:
        """See :meth:`pytest_gpumem.devices.base.Device.trouble`."""
        functions = self.library.unsupported()
        names = [
            name for name, calls in functions.items() if calls > self._unsupported.get(name, 0)
        ]
        if not names:
            return None
        return f"{WHAT} does not support {', '.join(names)}, which the step called"

    def notes(self, root: Path) -> list[Note]:
        """See :meth:`pytest_gpumem.devices.base.Device.notes`."""
        return self._aspects.notes(root)

    def report(self) -> tuple[GuessRows, list[Note]]:
        """See :meth:`pytest_gpumem.devices.virtual.aspects.Aspects.report`."""
        return self._aspects.report()

    def watch(self, devices: range) -> AccountWatch:
        """See :meth:`pytest_gpumem.devices.base.Device.watch`."""
        # PyTorch picks the lowest address among free blocks of one size: addresses must be in the
        # same order whatever ran before.
        for index in devices:
            self.library.begin_apart(index)
        return AccountWatch(self.library, (self._opened_card or self.card).context, devices)

    def join_alone(
        self, rank: int, size: int, *, by_program: bool = False
    ) -> AbstractContextManager[None]:
        """See :meth:`pytest_gpumem.devices.base.Device.join_alone`; the group uses NCCL."""
        from pytest_gpumem.devices.virtual.ranks.lone_nccl_rank import joined_to_nccl

        return joined_to_nccl(rank, size, by_program=by_program)
