"""How full devices are while a step runs, by whomever: what nvidia-smi shows.

PyTorch's allocator knows of its own memory only. NCCL, cuDNN, other libraries and other processes
take of the same device; its driver sees them all.
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from pytest_gpumem.measurement import DeviceUse
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


EVERY_S: Final = 0.01
"""seconds between two looks by NVML"""


class UseWatch(Protocol):
    """Sees how full each of some devices is."""

    def start(self, reserved: Sequence[int]) -> None:
        """Begin anew; ``reserved`` is what PyTorch's allocator holds of each device, in bytes."""

    def look(self) -> None:
        """Look now: something has just ended."""

    def result(self, reserved: Sequence[int]) -> tuple[DeviceUse, ...]:
        """Return what was seen since ``start``, for each device; ``reserved`` as there."""

    def stop(self) -> None:
        """Look no more."""


class Others(NamedTuple):
    """Other processes on a device."""

    number: int
    nbytes: int


class Watch:
    """What all watches have in common: a beginning, and what PyTorch had then."""

    source = ""
    every_ms = 0

    def __init__(self, devices: range) -> None:
        self.devices = devices
        self._before = dict.fromkeys(devices, 0)
        """bytes in use besides PyTorch's, when it began"""
        self._peaks = dict.fromkeys(devices, 0)

    def used(self, device: int) -> int:
        """Return the bytes that are in use on a device now."""
        raise NotImplementedError

    def others(self, device: int, reserved: int) -> Others:  # noqa: ARG002 - some cannot tell
        """Return the other processes that hold memory on a device, as far as that is told."""
        return Others(0, 0)

    def start(self, reserved: Sequence[int]) -> None:
        """See :meth:`UseWatch.start`."""
        self._peaks = {device: self.used(device) for device in self.devices}
        pairs = zip(self._peaks.items(), reserved, strict=True)
        self._before = {device: used - own for (device, used), own in pairs}

    def look(self) -> None:
        """See :meth:`UseWatch.look`."""
        for device in self.devices:
            self._peaks[device] = max(self._peaks[device], self.used(device))

    def result(self, reserved: Sequence[int]) -> tuple[DeviceUse, ...]:
        """See :meth:`UseWatch.result`."""
        self.look()
        return tuple(map(self._use, self.devices, reserved))

    def _use(self, device: int, reserved: int) -> DeviceUse:
        others = self.others(device, reserved)
        more = self.used(device) - reserved - self._before[device]
        return DeviceUse(
            peak=self._peaks[device],
            besides=self._before[device],
            outside=max(0, more),
            others=others.nbytes,
            processes=others.number,
            source=self.source,
            every_ms=self.every_ms,
        )

    def stop(self) -> None:
        """See :meth:`UseWatch.stop`."""


class MemInfoWatch(Watch):
    """CUDA's own figure, read when something ends: a thread might meet the capture of a graph."""

    source = "cudaMemGetInfo, when parts and the step began and ended"

    def used(self, device: int) -> int:
        """Return what is not free."""
        import torch

        with suppress(RuntimeError):  # after an error of CUDA's it answers nothing any more
            free, total = torch.cuda.mem_get_info(device)
            return total - free
        return 0


class NvmlWatch(Watch):
    """NVML, asked every few milliseconds by a thread, and at the end who else is there."""

    source = "NVML"
    every_ms = round(1000 * EVERY_S)

    def __init__(self, nvml: Any, handles: dict[int, Any], devices: range) -> None:  # noqa: ANN401 - a module without types
        super().__init__(devices)
        self._nvml = nvml
        self._handles = handles
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def used(self, device: int) -> int:
        """Return what nvidia-smi shows as used."""
        version = getattr(self._nvml, "nvmlMemory_v2", None)  # without what the driver keeps back
        with suppress(self._nvml.NVMLError, TypeError):
            if version is not None:
                return _used(self._nvml.nvmlDeviceGetMemoryInfo(self._handles[device], version))
        with suppress(self._nvml.NVMLError):
            return _used(self._nvml.nvmlDeviceGetMemoryInfo(self._handles[device]))
        return 0  # the GPU fell off its bus, say

    def others(self, device: int, reserved: int) -> Others:
        """Return the other processes; their bytes are 0 where NVML does not tell them."""
        try:
            found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handles[device])
        except self._nvml.NVMLError:
            return Others(0, 0)
        sizes = [it.usedGpuMemory or 0 for it in found if it.pid != os.getpid()]
        if len(sizes) == len(found) and sizes:  # in a container it has another number there
            sizes.remove(min(sizes, key=lambda it: abs(it - reserved)))
        return Others(len(sizes), sum(sizes))

    def start(self, reserved: Sequence[int]) -> None:
        """See :meth:`UseWatch.start`."""
        super().start(reserved)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpumem-nvml", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(EVERY_S):
            self.look()

    def stop(self) -> None:
        """See :meth:`UseWatch.stop`."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def _used(info: Any) -> int:  # noqa: ANN401 - NVML's
    return int(info.used)


def watch_gpus(devices: range) -> UseWatch:
    """Return a watch on real GPUs: by NVML where it is installed and knows them."""
    nvml = _nvml()
    if nvml is None:
        return MemInfoWatch(devices)
    import torch

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return MemInfoWatch(devices)
    try:
        found = {it: f"GPU-{torch.cuda.get_device_properties(it).uuid}" for it in devices}
        handles = {it: nvml.nvmlDeviceGetHandleByUUID(uuid) for it, uuid in found.items()}
        return NvmlWatch(nvml, handles, devices)
    except (AttributeError, nvml.NVMLError):  # a part of a GPU has another name
        nvml.nvmlShutdown()
        return MemInfoWatch(devices)


def _nvml() -> Any:  # noqa: ANN401 - a module without types
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an older package of the same name warns of itself
        try:
            return importlib.import_module("pynvml")
        except ImportError:
            return None


LARGEST_CONTEXT: Final = 1 << 30
"""bytes that a CUDA context and the libraries of one process do not take alone"""


def shared(use: Sequence[DeviceUse], name: str) -> Iterator[str]:
    """Say that others are on the device: on the fullest where there are several."""
    most = max(use, key=lambda it: (it.others, it.processes, it.besides), default=None)
    if most is None:
        return
    if most.processes:
        who = "another process holds" if most.processes == 1 else "other processes hold"
        size = format_size(most.others) if most.others else "memory"
        yield f"{name} is shared: {who} {size} of it"
    elif not most.every_ms and most.besides > LARGEST_CONTEXT:
        yield (
            f"{format_size(most.besides)} of {name} were in use besides PyTorch's memory when the "
            "step began; NVML (pip install 'pytest-gpumem[nvml]') would tell whether others hold it"
        )
