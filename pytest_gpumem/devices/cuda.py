"""A real GPU, used through torch.cuda alone: NVIDIA's, or AMD's, for which torch.cuda calls HIP."""

from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from pytest_gpumem.devices.base import Device
from pytest_gpumem.devices.benchmark_mode import TIMED_PLANS
from pytest_gpumem.devices.cuda_start import FirstUse, start_cuda
from pytest_gpumem.devices.lone_rank import joined
from pytest_gpumem.devices.memory_cap import set_memory
from pytest_gpumem.devices.xdist_order import own_instance
from pytest_gpumem.errors import DeviceError, TooSmallError
from pytest_gpumem.measurement import DeviceInfo
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.devices.memory_use import UseWatch


class CudaDevice(Device):
    """The GPUs that are visible to this process's torch."""

    def __init__(self, *, shared: bool = False, first: int = 0) -> None:
        """Use the GPUs of this machine.

        Args:
            shared: whether other processes (pytest-xdist's workers) measure on them too, one at a
                time.
            first: the first GPU to use; those before it belong to other ranks.
        """
        self._shared = shared
        self._first = first
        self._first_use: FirstUse | None = None
        self._turn = ExitStack()
        """releases this process's GPU locks when it closes"""

    def await_use(self, count: int, begin: Callable[[], None]) -> None:
        """See :meth:`pytest_gpumem.devices.base.Device.await_use`."""
        import torch

        # If possible, torch counts GPUs with NVML, which leaves CUDA usable in forks; a call of
        # CUDA's driver does not.
        self._require(count, torch.cuda.device_count())
        self._first_use = FirstUse(begin)

    def _require(self, count: int, visible: int) -> None:
        """Refuse more devices than this machine shows.

        Raises:
            DeviceError: the machine shows none, or too few.
        """
        import torch

        if not visible:
            raise DeviceError(
                "the CUDA device",
                f"torch {torch.__version__} sees no GPU here",
                "install a CUDA build of torch and a driver, or write --gpumem-device=virtual",
            )
        if self._first + count > visible:
            raise TooSmallError(
                f"LOCAL_RANK={self._first}" if self._first else f"devices={count}",
                f"this machine shows {visible} GPU{'s' * (visible != 1)}",
                "request fewer GPUs, or write --gpumem-device=virtual",
            )

    def open(self, card: Card | None, count: int) -> DeviceInfo:
        """See :meth:`pytest_gpumem.devices.base.Device.open`."""
        import torch

        if self._first_use is not None:
            self._first_use.happen()
        self._require(count, torch.cuda.device_count() if torch.cuda.is_available() else 0)
        start_cuda()
        TIMED_PLANS.begin(torch)
        torch.cuda.set_device(self._first)
        properties = torch.cuda.get_device_properties(self._first)
        if card is not None and card.usable_memory > properties.total_memory:
            raise TooSmallError(
                f"card {card.name!r}",
                f"{format_size(card.usable_memory)} of it can be used, but "
                f"{properties.name} has only {format_size(properties.total_memory)}",
                "run this test on a larger GPU, or write --gpumem-device=virtual",
            )
        numbers = range(self._first, self._first + count)
        for index in numbers:
            total = int(torch.cuda.get_device_properties(index).total_memory)
            set_memory(index, total if card is None else card.total_memory, total)
        if self._shared:
            self._take_turn(numbers)
        return DeviceInfo(
            kind="cuda",
            name=properties.name,
            total_memory=properties.total_memory,
            capability=(properties.major, properties.minor),
            sm_count=properties.multi_processor_count,
        )

    def _take_turn(self, numbers: range) -> None:
        """Lock the GPUs against other processes until ``close``, waiting for them if necessary."""
        import torch

        self.close()
        # CUDA shows a process one MIG instance, and may report the UUID of the whole GPU for it,
        # so the lock has the instance's name.
        uuids = (str(torch.cuda.get_device_properties(number).uuid) for number in numbers)
        self._turn.enter_context(locked([own_instance()] if own_instance() else uuids))

        @self._turn.callback
        def empty_cache() -> None:
            with suppress(RuntimeError):  # after a CUDA error every call fails
                VIEW.empty_cache()  # other processes cannot use cached memory

    def close(self) -> None:
        """Release the GPUs for other processes."""
        self._turn.close()

    def watch(self, devices: range) -> UseWatch:
        """See :meth:`pytest_gpumem.devices.base.Device.watch`."""
        from pytest_gpumem.devices.memory_use import watch_gpus

        return watch_gpus(devices)

    def join_alone(
        self, rank: int, size: int, *, by_program: bool = False
    ) -> AbstractContextManager[None]:
        """See :meth:`pytest_gpumem.devices.base.Device.join_alone`; collectives do nothing."""
        return joined(rank, size, by_program=by_program)


@contextmanager
def locked(gpus: Iterable[str]) -> Iterator[None]:
    """Lock some GPUs for the block, once no other process of the user has locked any of them.

    Each GPU has a lock file in the user's folder. The operating system releases the locks of a
    process that ends, however it ends.

    Args:
        gpus: UUIDs of GPUs, or names of MIG instances.
    """
    folder = lock_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as stack:
        # All processes lock in sorted order, which avoids deadlocks.
        for gpu in sorted(gpus):
            file_name = gpu.replace("/", "-")  # older drivers name "MIG-GPU-<UUID>/1/0"
            stack.enter_context(FileLock(folder / f"{file_name}.lock"))
        yield


def lock_folder() -> Path:
    """Return the folder of the user's lock files."""
    user = getattr(os, "getuid", int)()  # 0 on Windows, whose temporary folder is per user
    return Path(tempfile.gettempdir()) / f"pytest-gpumem-{user}"
