"""Measures accelerators other than CUDA (XPU, MPS, those of packages) through torch.accelerator.

torch.accelerator names one accelerator per process, and has its memory statistics since torch 2.9.
Run as a program, this file imports torch and prints an :class:`Accelerator` as JSON. The session
runs it as a child process, because it must not import torch before it has chosen its device.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.backend import CUDA, Backend, Bindings
from pytest_gpumem.devices.base import Device
from pytest_gpumem.devices.cuda import locked
from pytest_gpumem.devices.driver import SLOW_S
from pytest_gpumem.devices.memory_use import UseWatch
from pytest_gpumem.devices.torch_build import installed_torch
from pytest_gpumem.errors import DeviceError, TooSmallError
from pytest_gpumem.measurement import DeviceInfo
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.measurement import DeviceUse

OPTION: Final = "accelerator"
"""the value of ``--gpumem-device`` that chooses torch's accelerator"""
PROBE: Final = MIB
"""bytes to allocate to find out what the allocator counts"""
DRI: Final = Path("/dev/dri")
"""Linux's folder of GPU device files, including those of Intel's GPUs"""
OTHERS: Final = ("cuda", "xpu", "mps")
"""types of accelerators that torch itself supports: a process may have one of these in addition to
the accelerator that a package registers"""
AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""environment variable; if it is 0, torch does not import the installed backends by itself"""


class Accelerator(NamedTuple):
    """The accelerator of a process, and its limitations."""

    device_type: str
    name: str
    lacks: Sequence[str]
    """sentences on what the accelerator cannot do"""


class AcceleratorBackend(Backend):
    """Calls the functions of torch.accelerator."""

    bindings = Bindings(
        "_accelerator_getDeviceStats", "_accelerator_resetPeakStats", "_accelerator_emptyCache"
    )
    lists_blocks = False
    caps = False

    def __init__(self, device_type: str = "") -> None:
        """Use the accelerator of this type; "" if the type is not known yet."""
        self.title = self.device_type = device_type
        self.devices = range(0)
        """the devices that tests use"""
        self._uncounted: list[str] = []
        """names of statistics that the accelerator's allocator leaves at zero"""

    def complete(self, stats: dict[str, Any]) -> dict[str, Any]:
        """Return statistics; allocated bytes replace those that the allocator leaves at zero."""
        return stats | dict.fromkeys(self._uncounted, stats["allocated_bytes"])

    def allocator(self) -> str:
        """Return "native", because :meth:`prove` has checked that the allocator counts."""
        return "native"

    def is_initialized(self) -> bool:
        """Return whether tests have used the accelerator."""
        return bool(self.devices)

    def current_device(self) -> int:
        """See :meth:`Backend.current_device`."""
        import torch

        return torch.accelerator.current_device_index()

    def used_devices(self) -> list[int]:
        """See :meth:`Backend.used_devices`."""
        return [*self.devices]

    def synchronize(self, device: int | None = None) -> None:
        """See :meth:`Backend.synchronize`."""
        import torch

        torch.accelerator.synchronize(device)

    def is_capturing(self) -> bool:
        """Return False, because torch.accelerator does not report captures."""
        return False

    def clear_workspaces(self) -> None:
        """Do nothing, because torch.accelerator has no such function."""

    def memory_info(self, device: int) -> tuple[int, int]:
        """See :meth:`Backend.memory_info`."""
        import torch

        try:
            free, total = torch.accelerator.get_memory_info(device)
        except (AttributeError, RuntimeError):  # torch 2.9, or the backend, lacks it
            problem = f"{self.title} does not report how much memory it has: declare max_gib"
            raise RuntimeError(problem) from None
        return free, total

    @property
    def _memory(self) -> Any:  # noqa: ANN401 - a backend's module
        """The backend's module of memory functions, such as torch.xpu.memory; None without one."""
        import torch

        return getattr(torch.get_device_module(self.device_type), "memory", None)

    @property
    def records(self) -> bool:
        """Whether the backend's module can record the allocator's history, as torch.xpu's can."""
        names = ("_record_memory_history", "_snapshot")
        return all(hasattr(self._memory, name) for name in names)

    def record_history(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - as PyTorch's
        """See :meth:`Backend.record_history`."""
        self._memory._record_memory_history(*arguments, **options)

    def snapshot(self) -> dict[str, Any]:
        """See :meth:`Backend.snapshot`."""
        snapshot: dict[str, Any] = self._memory._snapshot()
        return snapshot

    def capability(self) -> tuple[int, int]:
        """Return (0, 0), because a compute capability is CUDA's."""
        return 0, 0

    def observe_refusals(self, observe: Callable[[int, int, int, int], None]) -> bool:
        """Return False, because torch.accelerator reports no refused requests."""
        del observe
        return False

    def is_out_of_memory(self, error: BaseException | None) -> bool:
        """Return whether an error is an OutOfMemoryError, or says that this device lacks memory.

        MPS raises a RuntimeError "MPS backend out of memory", torch_openreg (PyTorch's reference
        for backends outside of it) "Failed to allocate 4 bytes on openreg device".
        """
        if super().is_out_of_memory(error):
            return True
        name = re.escape(self.device_type)
        text = rf"\b{name}( backend)? out of memory|failed to allocate \d+ bytes on {name} device"
        return isinstance(error, RuntimeError) and bool(re.search(text, str(error), re.IGNORECASE))

    def prove(self, device: int) -> list[str]:
        """Allocate a block to check what the allocator counts; return sentences on what it lacks.

        Raises:
            DeviceError: the allocator does not count what a measurement needs.
        """
        import torch

        given = f"the {self.title} device"
        if not hasattr(torch._C, self.bindings.stats):
            problem = f"torch {torch.__version__} has no statistics of accelerators"
            raise DeviceError(given, problem, "install torch 2.9 or newer")
        place = torch.device(self.device_type, device)
        torch.empty(0, device=place)  # the allocator has statistics once it is initialized
        try:
            VIEW.reset_peaks(device)
            before = VIEW.stats(device)
        except RuntimeError as error:
            raise DeviceError(
                given,
                f"its allocator has no statistics ({str(error).splitlines()[0]})",
                "install torch 2.13 or newer, the first with those of MPS"
                if self.title == "mps"
                else "install a release of the backend whose allocator is a c10::DeviceAllocator",
            ) from error
        block = torch.empty(PROBE, dtype=torch.uint8, device=place)
        held = VIEW.stats(device)
        del block
        after = VIEW.stats(device)
        VIEW.reset_peaks(device)
        reset = VIEW.stats(device)
        VIEW.empty_cache()

        def nbytes(stats: dict[str, Any], name: str, figure: str = "current") -> int:
            return int(stats[name]["all"][figure])

        most = nbytes(held, "allocated_bytes")
        if most - nbytes(before, "allocated_bytes") < PROBE:
            missing = "no allocated memory"
        elif nbytes(after, "allocated_bytes", "peak") < most:
            missing = "no peak"
        elif nbytes(reset, "allocated_bytes", "peak") >= most:
            missing = "no peak that can be reset"
        else:
            names = "reserved_bytes", "active_bytes", "requested_bytes"
            self._uncounted = [name for name in names if nbytes(held, name) < PROBE]
            return self._lacks(device)
        release = "newer torch" if self.title in OTHERS else "release of the backend"
        remedy = f"install a {release} that does, or write --gpumem-device=none"
        raise DeviceError(given, f"its allocator counts {missing}", remedy)

    def _lacks(self, device: int) -> list[str]:
        """Return sentences on what the accelerator cannot do."""
        sentences = [f"{self.title} is not limited: max_gib is compared after the test"]
        if not self.records:
            sentences.insert(0, f"{self.title} records no history: a failure names no lines")
        if "reserved_bytes" in self._uncounted:
            sentences.append(
                f"{self.title} counts no reserved memory: allocated memory stands for it"
            )
        with suppress(RuntimeError):
            self.memory_info(device)
            return sentences
        return [*sentences, f"{self.title} does not report how much memory it has"]


class AcceleratorDevice(Device):
    """The devices of the accelerator that torch.accelerator names."""

    option = OPTION

    def __init__(
        self, found: Accelerator | str | None = None, *, shared: bool = False, first: int = 0
    ) -> None:
        """Use the accelerator of this machine.

        Args:
            found: the result of :func:`query_accelerator`; None if it was not called.
            shared: whether other processes (pytest-xdist's workers) measure on it too, one at a
                time.
            first: the first device to use; those before it belong to other ranks.
        """
        self.backend: AcceleratorBackend = AcceleratorBackend()
        self._found = found
        self._shared = shared
        self._first = first
        self._turn = ExitStack()

    def explains(self) -> bool:
        """See :meth:`pytest_gpumem.devices.base.Device.explains`."""
        try:
            return AcceleratorBackend(accelerator_type()).records
        except DeviceError:  # each test reports the error
            return False

    def describe(self) -> list[str]:
        """Return the accelerator's name and limitations, as queried in another process."""
        found = self._found = self._found or query_accelerator()
        if isinstance(found, str):
            return ["accelerator device: the one that the tests' own imports register"]
        name = "" if found.name == found.device_type else f" {found.name}"
        return [f"{found.device_type} device{name}", *found.lacks]

    def await_use(self, count: int, begin: Callable[[], None]) -> None:
        """Call the function now, because torch.accelerator does not report a first use."""
        del count
        begin()

    def open(self, card: Card | None, count: int) -> DeviceInfo:
        """See :meth:`pytest_gpumem.devices.base.Device.open`."""
        import torch

        device_type = accelerator_type()
        if card is not None:
            raise DeviceError(
                f"card={card.name!r}",
                f"this is a CUDA GPU, and the test runs on {device_type}",
                "leave card out and write max_gib, or write --gpumem-device=virtual",
            )
        visible = torch.accelerator.device_count()
        if self._first + count > visible:
            raise TooSmallError(
                f"LOCAL_RANK={self._first}" if self._first else f"devices={count}",
                f"this machine shows {visible} {device_type} device{'s' * (visible != 1)}",
                "request fewer devices, or write --gpumem-device=virtual",
            )
        numbers = range(self._first, self._first + count)
        if self._shared:
            self.close()
            self._turn.enter_context(locked(f"{device_type}-{number}" for number in numbers))
        if self.backend.device_type != device_type:
            self.backend = AcceleratorBackend(device_type)
        VIEW.backend = backend = self.backend
        torch.accelerator.set_device_index(self._first)
        if not set(numbers) <= set(backend.devices):
            self._found = tried(backend, numbers)
            backend.devices = numbers
        total = 0
        with suppress(RuntimeError):
            total = backend.memory_info(self._first)[1]
        name = device_name(device_type, self._first)
        return DeviceInfo(device_type, name, total, (0, 0), sm_count=0)

    def close(self) -> None:
        """Restore CUDA as the measured backend, and let other processes use the device."""
        if VIEW.backend is self.backend and self._shared:
            with suppress(RuntimeError):
                VIEW.empty_cache()
        VIEW.backend = CUDA
        self._turn.close()

    def watch(self, devices: range) -> UseWatch:
        """See :meth:`pytest_gpumem.devices.base.Device.watch`."""
        return AcceleratorUse(devices, self.backend)

    def join_alone(
        self, rank: int, size: int, *, by_program: bool = False
    ) -> AbstractContextManager[None]:
        """Raise, because one rank alone needs NCCL, which only CUDA has.

        Raises:
            DeviceError: always.
        """
        del rank, by_program
        raise DeviceError(
            f"world_size={size}",
            f"one rank alone needs NCCL, and the test runs on {self.backend.title}",
            "start all ranks with torchrun, or write --gpumem-device=virtual",
        )


class AcceleratorUse(UseWatch):
    """Reads a device's memory in use when the step or a part begins or ends."""

    source = "torch.accelerator.get_memory_info, when parts and the step began and ended"

    def __init__(self, devices: range, backend: Backend) -> None:
        super().__init__(devices)
        self._backend = backend

    def used(self, device: int) -> int:
        """Return the bytes that are not free; 0 if unknown."""
        with suppress(RuntimeError):
            free, total = self._backend.memory_info(device)
            return total - free
        return 0

    def result(self, reserved: Sequence[int]) -> tuple[DeviceUse, ...]:
        """Return each device's readings; none if the backend does not report the memory in use."""
        readings = super().result(reserved)
        return readings if any(use.peak for use in readings) else ()


def accelerator_type() -> str:
    """Return the type of the accelerator that torch names and that has a device.

    Raises:
        DeviceError: torch has no accelerator, the accelerator has no device, or it is CUDA.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator()
    given = f"--gpumem-device={OPTION}"
    if accelerator is None:
        raise DeviceError(
            given,
            f"torch {torch.__version__} has no accelerator here",
            "install a build of torch with one, or import its package in conftest.py",
        )
    if accelerator.type == "cuda":
        raise DeviceError(
            given, "the accelerator of this torch is CUDA", "write --gpumem-device=cuda"
        )
    if not torch.accelerator.is_available():
        raise DeviceError(
            given,
            f"{accelerator.type} is registered and shows no device",
            "look whether its driver works here",
        )
    return str(accelerator.type)


def device_name(device_type: str, device: int) -> str:
    """Return a device's name, or its type if the backend's module has no names."""
    import torch

    try:
        return str(torch.get_device_module(device_type).get_device_name(device))
    except (AttributeError, RuntimeError):
        return device_type


def accelerator_expected() -> bool:
    """Return whether torch may have an accelerator other than CUDA, without importing torch."""
    if os.environ.get(AUTOLOAD, "1") != "0" and entry_points(group="torch.backends"):
        return True
    if sys.platform == "darwin":
        return True
    if sys.platform != "win32" and not DRI.exists():
        return False
    # The search for torch may load the virtual GPU, so it runs only if there may be an Intel GPU.
    build = installed_torch()
    return build is not None and build.xpu is not None


def query_accelerator() -> Accelerator | str:
    """Query torch's accelerator in another process; return the result, or why none can be used."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest_gpumem.devices.accelerator"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SLOW_S,
            check=False,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, LookupError, ValueError):
        return "torch cannot be imported"
    return answer if isinstance(answer, str) else Accelerator(*answer)


def tried(backend: AcceleratorBackend, devices: range) -> Accelerator:
    """Test some devices of this process's accelerator; return its type, name and limitations.

    Raises:
        DeviceError: the devices' allocator does not count what a measurement needs.
    """
    import torch

    device_type = backend.device_type
    others = [
        f"memory on {other}, which this torch has too, is not counted"
        for other in OTHERS
        if other != device_type and torch.get_device_module(other).is_available()
    ]
    lacks = dict.fromkeys(lack for device in devices for lack in backend.prove(device))
    return Accelerator(device_type, device_name(device_type, devices[0]), [*lacks, *others])


if __name__ == "__main__":
    try:
        VIEW.backend = AcceleratorBackend(accelerator_type())
        sys.stdout.write(json.dumps(tried(VIEW.backend, range(1))))
    except DeviceError as reason:
        sys.stdout.write(json.dumps(str(reason)))
