"""Runs one rank alone in PyTorch's own NCCL process group, with the buffers of a real group.

The native library stands in for NCCL.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_gpumem.devices.lone_rank import joined
from pytest_gpumem.devices.virtual.ranks.unwaited_collectives import unwaited_collectives_kept
from pytest_gpumem.devices.virtual.values.operator_table import TORCH
from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

NCCL: Final = Patch(
    "torch.distributed",
    *("ProcessGroupNCCL", "distributed_c10d.ProcessGroupNCCL"),
    *("distributed_c10d.ProcessGroupNCCL2", "distributed_c10d.ProcessGroupNCCLLazy"),
    reason="a rank that runs alone finds NCCL's id, which the first rank would store",
)
BARRIER: Final = Patch(
    "torch._C._distributed_c10d",
    "ProcessGroup.barrier",
    reason="at a barrier NCCL uses the device with the rank's number; a lone rank has one device",
)
_UNIQUE_ID: Final = "\0" * 128
"""an ncclUniqueId of the native library: zeros"""


def joined_to_nccl(rank: int, size: int, *, by_program: bool) -> AbstractContextManager[None]:
    """See :func:`pytest_gpumem.devices.lone_rank.joined`."""
    variables = {
        "TORCH_NCCL_RANKS_PER_ROOT": str(size),  # makes one rank create the only id
        "GPUMEM_LONE_RANK": "1",  # makes the native library's NCCL id zeros: no other rank joins
    }
    if TORCH >= (2, 8):
        # From torch 2.8 on, a thread frees the collectives' buffers only every 100 ms, and many
        # steps on the virtual GPU are shorter. With blocking waits only the Works own the buffers,
        # and unwaited_collectives keeps the Works. (With blocking waits torch 2.6 counts each
        # collective as pending, and waits forever before it captures a CUDA graph.)
        variables["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    return joined(rank, size, _alone, variables, nccl=True, by_program=by_program)


@contextmanager
def _alone() -> Iterator[None]:
    """Let the block create NCCL process groups, and pass their barriers, without other ranks.

    Ranks join a group with an id that its first rank creates and puts in a store, under a key that
    PyTorch chooses. Here an id is stored under every possible key before the group is created.
    """

    def with_ids(group_class: Any) -> Any:
        class Seeded(group_class):  # type: ignore[misc] # a base class without types
            """An NCCL process group without its other ranks."""

            def __init__(self, *arguments: Any) -> None:
                store, rank, size, options, *_ = arguments
                # Keys in ProcessGroupNCCL.cpp: for the whole group, the communicator's number,
                # which newer versions prefix with "nccl_storekey_" and the group's name ...
                group = getattr(options, "group_name", "")
                keys = ["0", "nccl_storekey_0", f"{group}/nccl_storekey_0"]
                # ... and for each pair that includes this rank, both ranks, the lower one first.
                keys += [f"{min(rank, peer)}:{max(rank, peer)}" for peer in range(size)]
                for key in keys:
                    store.set(key, _UNIQUE_ID)
                super().__init__(*arguments)

        Seeded.__name__ = group_class.__name__
        return Seeded

    bindings = importlib.import_module(BARRIER.module)

    @wrapped_by
    def on_own_device(
        barrier: Callable[..., object], group: object, opts: Any = None, timeout: object = None
    ) -> object:
        del timeout  # no other rank is waited for
        if not isinstance(opts, bindings.BarrierOptions):  # None, or a timeout
            opts = bindings.BarrierOptions()
        opts.device_ids = opts.device_ids or [0]
        return barrier(group, opts)

    with ExitStack() as stack:
        NCCL.wrap(torch.distributed, with_ids, stack)
        BARRIER.wrap(bindings, on_own_device, stack)
        if TORCH >= (2, 8):
            stack.enter_context(unwaited_collectives_kept())
        yield
