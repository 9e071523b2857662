"""Keeps the tensors of NCCL collectives for which the program does not wait, as PyTorch does.

From torch 2.8 on, the process group of NCCL keeps the tensors of an asynchronous collective until
``Work.wait()``. If a program waits for ``Work.get_future()`` instead, or not at all, a thread
checks every 100 ms whether the collective is done, and the next collective then releases its
tensors. A training step takes longer than that, and its collectives come at its end. So the
gradients and buffers of one step stay in memory until the collectives of the next step, or of the
one after that, if the host runs ahead of the device.

On the virtual GPU no figure depends on the clock. A collective counts as done in two cases: a
backward pass has begun since, and the host has waited for the device or launched more kernels than
CUDA queues; or two passes have begun. Before the first pass, and in a program without one, only the
host's waits and launches count. By these rules nanochat's d20 (torch 2.8, each step waits) takes
5,640 MiB more, and modded-nanogpt's medium track (torch 2.8, no step waits) 2,046 MiB, as on H100s.
A step of that project's short track takes 99 ms. There the thread may check too late: twenty runs
took more than these rules predict, and less than if the tensors stayed one step longer. The report
has a note if such tensors matter.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.devices.autograd_threads import ENGINE, is_outermost_pass
from pytest_gpumem.devices.virtual.native import LIBRARY
from pytest_gpumem.patches import Patch, wrapped_by
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COLLECTIVES: Final = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "scatter", "gather"),
    *("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "allgather_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "alltoall_base", "send", "recv", "recv_anysource", "_end_coalescing"),
    # Torch 2.14 and newer:
    *("all_gather_single", "all_gather_single_coalesced", "gather_single"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "all_to_all_single"),
)
"""methods of torch.distributed.ProcessGroup that return a Work"""
WORKS: Final = Patch(
    "torch._C._distributed_c10d",
    *(f"ProcessGroup.{name}" for name in COLLECTIVES),
    reason="asynchronous collectives keep their tensors until the program has waited for them",
    versions="torch 2.8 and newer",
)
WAITS: Final = Patch(
    "torch._C._distributed_c10d",
    *("Work.wait", "Work.synchronize"),
    reason="a collective that the program waits for lets go of its tensors",
    versions="torch 2.8 and newer",
)
PASSES: Final = Patch(
    "torch.autograd",
    *(ENGINE, f"graph.{ENGINE}"),
    reason="backward passes are counted: they tell which collectives are done",
    versions="torch 2.8 and newer",
)
MAX_AHEAD: Final = 1024
"""maximum number of kernels that the host launches before the device runs the first of them"""
MAX_KEPT: Final = 10_000
"""maximum number of collectives kept at a time; beyond it, the oldest are released"""
MIN_PERCENT: Final = 1
"""percent of a peak that the tensors must take for a note"""


class Progress(NamedTuple):
    """How far a program has run."""

    passes: int
    """number of backward passes that have begun"""
    launches: int
    """number of kernels launched so far"""
    waits: int
    """number of times that the host has waited for the device"""

    def is_done_by(self, progress: Progress) -> bool:
        """Return whether a collective that began at this progress is done at a later one."""
        caught_up = progress.waits > self.waits or progress.launches - self.launches > MAX_AHEAD
        if progress.passes == 0:  # a program without training
            return caught_up
        return progress.passes - self.passes >= (1 if caught_up else 2)


class UnwaitedCollectives:
    """Keeps asynchronous collectives until the program waits for them or they count as done."""

    def __init__(self) -> None:
        self.device: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """returns how many kernels were launched, and how often the host waited for the device"""
        self._works: dict[int, tuple[Any, Progress]] = {}
        """each Work, and the program's progress when it began, by the Work's id"""
        self._passes = 0
        self._most = 0
        """largest number of bytes freed at once when a collective began"""

    def begun(self, work: Any) -> None:
        """Keep the tensors of a new collective, and release those of collectives that are done.

        Args:
            work: the collective's Work; None: the call returned none.
        """
        import torch

        progress = Progress(self._passes, *self.device())
        excess = len(self._works) - MAX_KEPT
        done = [
            key
            for index, (key, (_, then)) in enumerate(self._works.items())
            if index <= excess or then.is_done_by(progress)
        ]
        if done:
            old_bytes = torch.cuda.memory_allocated()
            for key in done:
                del self._works[key]
            self._most = max(self._most, old_bytes - torch.cuda.memory_allocated())
        if work is not None and not torch.cuda.is_current_stream_capturing():
            self._works[id(work)] = work, progress

    def clear(self) -> None:
        """Release all collectives, and reset what was recorded about the program."""
        self._works.clear()
        self._passes = self._most = 0

    def notes(self, peak: int) -> list[str]:
        """Return sentences on the bytes that the program could save by waiting.

        Args:
            peak: peak of allocated bytes.
        """
        if self._most * 100 < peak * MIN_PERCENT or not self._most:
            return []
        size = format_size(self._most)
        sentence = (
            f"collectives kept tensors of {size} until the collectives of the next step (a GPU may "
            "keep them longer if the step takes less than 0.1 s): Work.wait() frees these tensors, "
            "and a wait for its future does not"
        )
        return [sentence]

    # Wrappers of PyTorch's functions:

    def keep(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of a process group, and keep the Work that it returns."""
        work = collective(*args, **kwargs)
        self.begun(work)
        return work

    def wait(self, wait: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a Work, and release the Work."""
        try:
            return wait(work, *args, **kwargs)
        finally:
            self._works.pop(id(work), None)

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function to count backward passes; Dynamo can trace the wrapper."""

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self._passes += is_outermost_pass()
            return function(*args, **kwargs)

        return run_backward


UNWAITED: Final = UnwaitedCollectives()
"""the unwaited collectives of this process's group: there is one such group at a time"""


@contextmanager
def unwaited_collectives_kept() -> Iterator[None]:
    """Keep the tensors of unwaited collectives in the block, as NCCL's process group does.

    With ``TORCH_NCCL_BLOCKING_WAIT`` only the Works refer to the tensors; PyTorch's thread does
    not.
    """
    import torch

    bindings: Any = torch._C._distributed_c10d
    native = ctypes.CDLL(str(LIBRARY))
    native.gpumem_launches.restype = native.gpumem_waits.restype = ctypes.c_uint64
    UNWAITED.device = lambda: (native.gpumem_launches(), native.gpumem_waits())
    with ExitStack() as stack:
        stack.callback(UNWAITED.clear)
        WORKS.wrap(bindings, wrapped_by(UNWAITED.keep), stack)
        WAITS.wrap(bindings, wrapped_by(UNWAITED.wait), stack)
        PASSES.wrap(torch.autograd, UNWAITED.counting, stack)
        yield
