"""One rank of a distributed run without the other ranks: this process is rank r of N.

On the virtual GPU the process group is PyTorch's own of NCCL, so that it takes the same buffers;
the native library stands in for NCCL. On a real GPU, where NCCL would wait for the other ranks,
it is the fake one of PyTorch's own tests: collectives do nothing, and take no memory either.
"""

from __future__ import annotations

import importlib
import os
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.object_messages import refuse_objects
from pytest_gpumem.devices.quirks import deepspeed
from pytest_gpumem.devices.unwaited_collectives import unwaited_collectives_kept
from pytest_gpumem.devices.virtual.environment import set_variable
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpumem.measurement import DeviceKind

FAKE: Final = "gpumem"
"""PyTorch's name for the backend that does nothing"""
NCCL: Final = Patch(
    "torch.distributed.distributed_c10d",
    *("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"),
    reason="a rank that runs alone finds NCCL's id, which the first rank would store",
)
DEVICE_OF_GROUP: Final = Patch(
    "torch.distributed",
    "ProcessGroup.bound_device_id",
    reason="a group with a device is split for subgroups, whose sizes the absent ranks would tell",
)
CHECKPOINTS: Final = Patch(
    "torch.distributed.checkpoint.utils",
    "_DistWrapper.__init__",
    reason="a rank that runs alone writes and reads its own shards of a checkpoint",
)
PLANS: Final = Patch(
    "torch.distributed.checkpoint.default_planner",
    "_validate_global_plan",
    reason="the plan of a checkpoint is refused if it lacks the shards of absent ranks",
)
_UNIQUE_ID: Final = "\0" * 128
"""an ncclUniqueId, as the native library makes it: zeros"""


@contextmanager
def joined(rank: int, size: int, kind: DeviceKind) -> Iterator[None]:
    """Be rank ``rank`` of ``size``, as after ``init_process_group``, until the end of the block.

    The environment is what torchrun would set, on a node with this one rank.

    Args:
        rank: this process's rank.
        size: number of ranks.
        kind: the device's kind.

    Raises:
        DeviceError: this process has a default process group, or PyTorch none of NCCL.
    """
    import torch

    from pytest_gpumem.devices.virtual.values.torch_release import TORCH

    distributed: Any = torch.distributed
    real = kind != "virtual"
    if distributed.is_available() and distributed.is_initialized():
        raise DeviceError(
            f"world_size={size}",
            "this process already has a default process group",
            "call torch.distributed.destroy_process_group() when the group is no longer needed",
        )
    if not distributed.is_available() or not (real or distributed.is_nccl_available()):
        raise DeviceError(
            f"world_size={size}",
            "this build of torch has no NCCL",
            "install a CUDA build of torch for Linux, for example from PyPI",
        )
    _register_fake_backend(distributed)
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(size),
        "TORCH_NCCL_RANKS_PER_ROOT": str(size),  # one id, which one rank makes, is enough here
        "GPUMEM_LONE_RANK": "1",  # NCCL's ids of the virtual GPU are zeros: no other rank comes
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29500"),
    }
    if TORCH >= (2, 8):
        # From then on a thread frees the collectives' buffers every 100 ms, in which many steps
        # are over here. With blocking waits the collectives alone have them, which
        # unwaited_collectives keeps. (With such waits torch 2.6 counts each collective as pending,
        # and waits forever before it captures a CUDA graph.)
        environment["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    with ExitStack() as stack:
        for name, value in environment.items():
            set_variable(stack, name, value)
        if real:
            stack.enter_context(_reduced_to_themselves())
        else:
            stack.enter_context(_seeded(distributed.distributed_c10d))
        if not real and TORCH >= (2, 8):
            stack.enter_context(unwaited_collectives_kept())
        distributed.init_process_group(
            f"cpu:{FAKE},cuda:{FAKE if real else 'nccl'}",
            store=distributed.HashStore(),
            rank=rank,
            world_size=size,
        )

        @stack.callback
        def destroy_groups() -> None:
            if distributed.is_initialized():  # the test may have done so itself
                deepspeed.destroy_process_group(distributed)

        # A group that is bound to a device is split for its subgroups, and ncclCommSplit does not
        # get the parts' sizes, which the other ranks would tell.
        group = distributed.distributed_c10d._get_default_group()
        DEVICE_OF_GROUP.on(group, "bound_device_id", None)
        checkpoint_alone(stack)
        refuse_objects(stack, distributed)
        yield


def checkpoint_alone(stack: ExitStack) -> None:
    """Let torch.distributed.checkpoint write and read this rank's shards alone.

    Its first rank gathers the plans of all ranks, and refuses them where parts of a tensor are in
    none of them, as those of absent ranks are.
    """

    def beginning_alone(begin: Callable[..., None]) -> Callable[..., None]:
        def begin_alone(
            self: object,
            group: object,
            use_dist: bool,  # noqa: FBT001 - PyTorch's names
            coordinator_rank: int,
        ) -> None:
            del use_dist
            begin(self, group, False, coordinator_rank)  # noqa: FBT003

        return begin_alone

    def finding_valid(validate: Callable[..., object]) -> Callable[..., object]:
        # Newer versions of PyTorch return the list of all that is wrong.
        valid: object = True if validate.__annotations__["return"] in (bool, "bool") else []
        return lambda *_arguments: valid

    CHECKPOINTS.wrap(importlib.import_module(CHECKPOINTS.module), beginning_alone, stack)
    PLANS.wrap(importlib.import_module(PLANS.module), finding_valid, stack)


def _register_fake_backend(distributed: Any) -> None:  # noqa: ANN401 - a module
    """Register the backend whose collectives do nothing, once a process."""
    if FAKE in distributed.Backend.backend_list:
        return
    import torch.testing._internal.distributed.fake_pg

    kind: Any = torch.testing._internal.distributed.fake_pg.FakeProcessGroup

    def create(common: Any, _options: object) -> Any:  # noqa: ANN401 - PyTorch's
        make = getattr(kind, "_create_internal", kind)
        options_type: Any = getattr(kind, "Options", None)
        if not hasattr(options_type, "simulate_uniform_ranks"):  # an older PyTorch
            return make(common.group_rank, common.group_size)
        options = options_type()
        options.simulate_uniform_ranks = True  # a gather repeats this rank's own values
        return make(common.group_rank, common.group_size, options)

    distributed.Backend.register_backend(FAKE, create, extended_api=True, devices=["cpu", "cuda"])


@contextmanager
def _reduced_to_themselves() -> Iterator[None]:
    """Let the sum of tensors over all ranks be the tensors themselves, for all of this process.

    DistributedDataParallel takes the result from the future of a collective's work. PyTorch's fake
    group of torch 2.11 and older leaves None there.
    """
    import torch

    def reduce(tensors: list[torch.Tensor], *_arguments: object) -> tuple[list[torch.Tensor], Any]:
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        future: Any = torch.futures.Future(devices=list(devices))
        future.set_result(list(tensors))
        work: Any = torch._C._distributed_c10d._create_work_from_future(future)
        return tensors, work.boxed()

    library = torch.library.Library("c10d", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it stands in for PyTorch's own kernel
            library.impl("allreduce_", reduce, "CUDA")
        yield
    finally:
        library._destroy()


@contextmanager
def _seeded(c10d: Any) -> Iterator[None]:  # noqa: ANN401 - a module
    """Let every process group of NCCL find the id that another rank would have stored.

    Ranks meet by an id that the first one makes and leaves in a store, under a key that PyTorch
    chooses.
    """

    def with_ids(group_class: Any) -> Any:  # noqa: ANN401 - classes of PyTorch's extension module
        class Seeded(group_class):  # type: ignore[misc] # a base class without types
            """A process group of NCCL without its other ranks."""

            def __init__(
                self,
                store: Any,  # noqa: ANN401
                rank: int,
                size: int,
                options: Any,  # noqa: ANN401
                *arguments: Any,  # noqa: ANN401
            ) -> None:
                # ProcessGroupNCCL.cpp's keys of the whole group: the communicators' counter, with
                # newer versions in words and behind the group's name ...
                group = getattr(options, "group_name", "")
                keys = ["0", "nccl_storekey_0", f"{group}/nccl_storekey_0"]
                # ... and of each pair that this rank is in: both ranks, the lower one first.
                keys += [f"{min(rank, peer)}:{max(rank, peer)}" for peer in range(size)]
                for key in keys:
                    store.set(key, _UNIQUE_ID)
                super().__init__(store, rank, size, options, *arguments)

        Seeded.__name__ = group_class.__name__
        return Seeded

    with ExitStack() as stack:
        NCCL.wrap(c10d, with_ids, stack)
        yield
