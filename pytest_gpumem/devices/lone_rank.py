"""Runs one rank of a distributed run without the other ranks: this process is rank r of N.

On a real GPU NCCL would wait for the other ranks, so its groups are simulated like all others:
collectives do nothing, and take no memory. On the virtual GPU, NCCL groups are PyTorch's
``ProcessGroupNCCL``.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.absent_ranks import lone_store, simulate_absent_ranks
from pytest_gpumem.devices.uniform_ranks import reduced_to_themselves
from pytest_gpumem.devices.variables import set_variable
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

DEVICE_OF_GROUP: Final = Patch(
    "torch.distributed",
    "ProcessGroup.bound_device_id",
    reason="splitting a group bound to a device into subgroups takes sizes from absent ranks",
)
BARRIERS: Final = Patch(
    "torch.distributed",
    *("barrier", "distributed_c10d.barrier"),
    reason="a barrier allocates its tensor on the device that the group would be bound to",
)
BEGUN_BY_PROGRAM: Final = Patch(
    "torch.distributed",
    *(f"{module}init_process_group" for module in ("", "distributed_c10d.", "device_mesh.")),
    reason="a program that runs as one rank alone creates its process group with this call",
)
BOTH: Final = "cpu:gloo,cuda:nccl"
"""backends of the default group, unless the program asks for NCCL alone"""
_PROGRAMS_RANK: Final[set[tuple[int, int]]] = set()
"""rank and number of ranks of this process's program, if it runs as one rank alone"""


@contextmanager
def joined(  # noqa: PLR0913 - a rank, and the group that it joins
    rank: int,
    size: int,
    adapted: Callable[[], AbstractContextManager[None]] = reduced_to_themselves,
    variables: Mapping[str, str] = MappingProxyType({}),
    *,
    nccl: bool = False,
    by_program: bool = False,
) -> Iterator[None]:
    """Make this process rank ``rank`` of ``size`` in the block, as ``init_process_group`` would.

    The environment variables are those that torchrun would set on a node with this one rank. If
    the process's program already runs as this rank, nothing is done.

    Args:
        rank: this process's rank.
        size: number of ranks.
        adapted: returns a context in which groups for the GPU can be created and used.
        variables: further environment variables.
        nccl: whether NCCL groups are PyTorch's ``ProcessGroupNCCL``; else they are simulated.
        by_program: whether to create the process group only when the block calls
            ``init_process_group``.

    Raises:
        DeviceError: this process has a default process group, or PyTorch has no NCCL.
    """
    import torch

    distributed: Any = torch.distributed
    if (rank, size) in _PROGRAMS_RANK:
        yield
        return
    if distributed.is_available() and distributed.is_initialized():
        raise DeviceError(
            f"world_size={size}",
            "this process already has a default process group",
            "call torch.distributed.destroy_process_group() when the group is no longer needed",
        )
    if not distributed.is_available() or (nccl and not distributed.is_nccl_available()):
        raise DeviceError(
            f"world_size={size}",
            "this build of torch has no NCCL",
            "install a CUDA build of torch for Linux, for example from PyPI",
        )
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29500"),
        **variables,
    }
    with ExitStack() as stack:
        for name, value in environment.items():
            set_variable(stack, name, value)
        simulate_absent_ranks(distributed, stack, nccl=not nccl)
        stack.enter_context(adapted())
        initialise = distributed.init_process_group
        barriers = stack.enter_context(ExitStack())

        def begin(
            backend: str | None = None,
            *_arguments: object,
            device_id: object = None,
            **_options: object,
        ) -> None:
            # A simulated group needs a backend for the CPU: without one it would send objects as
            # CUDA tensors, whose values it does not move.
            initialise(
                _default_backend(backend, device_id) if nccl else BOTH,
                store=lone_store(distributed),
                rank=rank,
                world_size=size,
                device_id=device_id if nccl else None,
            )
            # Unbind the group: a bound one creates subgroups with ncclCommSplit, which does not
            # get their sizes as arguments, but from the other ranks.
            group = distributed.distributed_c10d._get_default_group()
            device = group.bound_device_id
            DEVICE_OF_GROUP.on(group, "bound_device_id", None)
            barriers.close()
            if device is not None and _is_bound(backend, device_id):
                BARRIERS.wrap(distributed, _bound_to(device), barriers)

        @stack.callback
        def destroy_groups() -> None:
            if distributed.is_initialized():  # the test may have destroyed the group itself
                # DeepSpeed has groups that only its own function destroys.
                comm: Any = sys.modules.get("deepspeed.comm", distributed)
                (comm if comm.is_initialized() else distributed).destroy_process_group()

        if by_program:
            BEGUN_BY_PROGRAM.put(distributed, dict.fromkeys(BEGUN_BY_PROGRAM.names, begin), stack)
            _PROGRAMS_RANK.add((rank, size))
            stack.callback(_PROGRAMS_RANK.clear)
        else:
            begin()
        yield


def _default_backend(asked: str | None, device_id: object) -> str:
    """Return the backend of the default group, from arguments of ``init_process_group``."""
    if asked is None and device_id is not None:
        asked = "nccl"  # PyTorch takes the backend of the device
    return asked if asked is not None and asked.lower() in ("nccl", "cuda:nccl") else BOTH


def _is_bound(asked: str | None, device_id: object) -> bool:
    """Return whether the default group that the program requests might be bound to a device.

    From torch 2.15 on, each NCCL group is, so the group created here may be bound to one even if
    the program requests only Gloo.
    """
    return device_id is not None or asked is None or "nccl" in asked.lower()


def _bound_to(device: object) -> Callable[[Any], Any]:
    """Return a ``make`` to wrap ``barrier``: its group is bound to a device during each call."""

    @wrapped_by
    def wait(
        barrier: Callable[..., object],
        group: Any = None,  # noqa: ANN401 - a group, or an object for ranks outside of it
        *arguments: object,
        **options: object,
    ) -> object:
        import torch

        group = group or torch.distributed.group.WORLD
        if getattr(group, "bound_device_id", device) is not None:
            return barrier(group, *arguments, **options)
        with ExitStack() as call:
            call.callback(setattr, group, "bound_device_id", None)
            DEVICE_OF_GROUP.on(group, "bound_device_id", device)
            return barrier(group, *arguments, **options)

    return wait
