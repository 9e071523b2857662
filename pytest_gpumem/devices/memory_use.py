"""Memory in use on devices while a step runs, as nvidia-smi shows it.

PyTorch's allocator knows only its own memory. NCCL, cuDNN, other libraries and other processes use
memory of the same device; the driver counts all of it.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.devices.driver import import_nvml
from pytest_gpumem.devices.xdist_order import own_instance
from pytest_gpumem.measurement import DeviceUse
from pytest_gpumem.notes import Note, NoteKind, notes_of
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


EVERY_S: Final = 0.01
"""seconds between two NVML readings"""


class OtherProcesses(NamedTuple):
    """The other processes on a device: their number, and their memory in bytes."""

    number: int
    nbytes: int


class UseWatch:
    """Reads the memory in use on some devices: at the start, the highest since, and at the end."""

    source = ""
    every_ms = 0

    def __init__(self, devices: range) -> None:
        self.devices = devices
        self._besides = dict.fromkeys(devices, 0)
        """bytes in use at the start outside PyTorch's allocator"""
        self._peaks = dict.fromkeys(devices, 0)
        self._outside = dict.fromkeys(devices, 0)
        """most bytes outside PyTorch's allocator in any reading since the start"""
        self._others = dict.fromkeys(devices, 0)
        """bytes of other processes at the start; 0 if unknown"""

    def used(self, device: int) -> int:
        """Return the bytes in use on a device now."""
        raise NotImplementedError

    def other_processes(self, device: int, reserved: int) -> OtherProcesses:  # noqa: ARG002 - NVML's
        """Return the other processes that use memory of a device; none if that is unknown."""
        return OtherProcesses(0, 0)

    def start(self, reserved: Sequence[int]) -> None:
        """Restart the readings.

        Args:
            reserved: bytes that PyTorch's allocator has on each device.
        """
        self._peaks = {device: self.used(device) for device in self.devices}
        pairs = zip(self._peaks.items(), reserved, strict=True)
        self._besides = {device: used - own for (device, used), own in pairs}
        self._others = {
            device: self.other_processes(device, own).nbytes
            for device, own in zip(self.devices, reserved, strict=True)
        }
        self._outside = dict.fromkeys(self.devices, 0)

    def look(self, reserved: Sequence[int], peaks: Sequence[int]) -> None:  # noqa: ARG002 - the account's
        """Take a reading when a part or a step has just ended.

        Args:
            reserved: bytes that PyTorch's allocator has on each device.
            peaks: the allocator's peak on each device, since the last reading or an earlier one.
        """
        self._read()

    def _read(self) -> None:
        for device in self.devices:
            self._peaks[device] = max(self._peaks[device], self.used(device))

    def forget(self) -> None:
        """Restart the peak that ``look`` compares with the allocator's; a real GPU has none."""

    def release(self) -> None:
        """Free tensors that PyTorch keeps until the next collective; do nothing on a real GPU."""

    def result(self, reserved: Sequence[int]) -> tuple[DeviceUse, ...]:
        """Take a last reading, and return each device's readings since ``start``.

        Args:
            reserved: bytes that PyTorch's allocator has on each device.
        """
        self._read()
        figures = []
        for device, segments in zip(self.devices, reserved, strict=True):
            processes = self.other_processes(device, segments)
            growth = self.used(device) - segments - self._besides[device]
            growth -= processes.nbytes - self._others[device]  # other processes' growth
            figures.append(
                DeviceUse(
                    peak=self._peaks[device],
                    besides=self._besides[device],
                    outside=max(growth, self._outside[device]),
                    others=processes.nbytes,
                    processes=processes.number,
                    source=self.source,
                    every_ms=self.every_ms,
                )
            )
        return tuple(figures)

    def notes(self, use: Sequence[DeviceUse], name: str, peak: int) -> list[Note]:  # noqa: ARG002 - the account's
        """Return notes on the readings of a step.

        Args:
            use: the readings.
            name: the device's name.
            peak: the step's peak of allocated bytes.
        """
        return [*notes_of(NoteKind.DEVICE, shared(use, name))]

    def stop(self) -> None:
        """End the readings; a subclass stops its thread."""


class MemInfoWatch(UseWatch):
    """Reads cudaMemGetInfo when parts and steps begin and end.

    It does not poll: calls of another thread could break the capture of a CUDA graph.
    """

    source = "cudaMemGetInfo, when parts and the step began and ended"

    def used(self, device: int) -> int:
        """Return the bytes that are not free; 0 after a CUDA error."""
        import torch

        with suppress(RuntimeError):  # after a CUDA error every call fails
            free, total = torch.cuda.mem_get_info(device)
            return total - free
        return 0


class NvmlWatch(UseWatch):
    """Polls NVML every few milliseconds in a thread, and lists the other processes at the end."""

    source = "NVML"
    every_ms = round(1000 * EVERY_S)

    def __init__(self, nvml: Any, handles: dict[int, Any], devices: range) -> None:  # noqa: ANN401 - a module without types
        super().__init__(devices)
        self._nvml = nvml
        self._handles = handles
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def used(self, device: int) -> int:
        """Return the bytes that nvidia-smi shows as used; 0 if NVML fails."""
        version = getattr(self._nvml, "nvmlMemory_v2", None)  # its ``used`` omits driver memory
        with suppress(self._nvml.NVMLError, TypeError):
            if version is not None:
                return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handles[device], version).used)
        with suppress(self._nvml.NVMLError):
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handles[device]).used)
        return 0  # NVML fails, for example, if the GPU has fallen off the bus

    def other_processes(self, device: int, reserved: int) -> OtherProcesses:
        """Return the other processes; their bytes are 0 if NVML does not report them."""
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handles[device])
        except self._nvml.NVMLError:
            return OtherProcesses(0, 0)
        sizes = [process.usedGpuMemory or 0 for process in processes if process.pid != os.getpid()]
        if len(sizes) == len(processes) and sizes:
            # In a container NVML shows another pid for this process, so the list still contains it:
            # remove the entry whose size is nearest to this process's.
            sizes.remove(min(sizes, key=lambda size: abs(size - reserved)))
        return OtherProcesses(len(sizes), sum(sizes))

    def start(self, reserved: Sequence[int]) -> None:
        """See :meth:`UseWatch.start`."""
        super().start(reserved)
        if self._thread is None:

            def read_until_end() -> None:
                while not self._end.wait(EVERY_S):
                    self._read()

            self._thread = threading.Thread(target=read_until_end, name="gpumem-nvml", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """See :meth:`UseWatch.stop`."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def watch_gpus(devices: range) -> UseWatch:
    """Return a watch on real GPUs, which uses NVML if it is installed and lists them."""
    nvml = import_nvml()
    if nvml is None:
        return MemInfoWatch(devices)
    import torch

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return MemInfoWatch(devices)
    try:
        properties = {device: torch.cuda.get_device_properties(device) for device in devices}
        # A MIG instance has its own name and memory; CUDA may report the UUID of the whole GPU.
        instance = own_instance()
        handles = {
            device: nvml.nvmlDeviceGetHandleByUUID(instance or f"GPU-{gpu.uuid}")
            for device, gpu in properties.items()
        }
        return NvmlWatch(nvml, handles, devices)
    except (AttributeError, nvml.NVMLError):
        nvml.nvmlShutdown()
        return MemInfoWatch(devices)


MAX_CONTEXT: Final = 1 << 30
"""upper bound of the bytes that the CUDA context and the libraries of one process use"""


def shared(use: Sequence[DeviceUse], name: str) -> Iterator[str]:
    """Yield a sentence if other processes use, or may use, memory of a device.

    With several devices the sentence is on the one that they use most.
    """
    fullest = max(
        use, key=lambda device: (device.others, device.processes, device.besides), default=None
    )
    if fullest is None:
        return
    if fullest.processes:
        holders = "another process uses" if fullest.processes == 1 else "other processes use"
        size = format_size(fullest.others) if fullest.others else "memory"
        yield f"{name} is shared: {holders} {size} of it"
    elif not fullest.every_ms and fullest.besides > MAX_CONTEXT:
        yield (
            f"{format_size(fullest.besides)} of {name} were in use outside PyTorch's "
            "allocator when the step began; NVML (pip install 'pytest-gpumem[nvml]') "
            "shows whether other processes use this memory"
        )
