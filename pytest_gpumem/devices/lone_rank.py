"""One rank of a distributed run without the other ranks: this process is rank r of N.

On a real GPU, where NCCL would wait for the other ranks, the process group is the fake one of
PyTorch's own tests: collectives do nothing, and take no memory either. The virtual GPU gives this
module PyTorch's group of NCCL instead.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pytest_gpumem.devices.variables import set_variable
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

FAKE: Final = "gpumem"
"""PyTorch's name for the backend that does nothing"""
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
BEGUN_BY_PROGRAM: Final = Patch(
    "torch.distributed",
    *(f"{module}init_process_group" for module in ("", "distributed_c10d.", "device_mesh.")),
    reason="a program that runs as one rank alone begins its process group by this call",
)
REFUSED: Final = Patch(
    "torch.distributed",
    *("recv_object_list", "distributed_c10d.recv_object_list"),
    reason="a rank that runs alone receives no objects, and an error says so",
)
_PROGRAMS_RANK: Final[set[tuple[int, int]]] = set()
"""the rank that this process's program is, with the number of ranks"""


@contextmanager
def reduced_to_themselves() -> Iterator[None]:
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
def joined(  # noqa: PLR0913 - a rank, and the group that it joins
    rank: int,
    size: int,
    backend: str = FAKE,
    adapted: Callable[[], AbstractContextManager[None]] = reduced_to_themselves,
    variables: Mapping[str, str] = MappingProxyType({}),
    *,
    by_program: bool = False,
) -> Iterator[None]:
    """Be rank ``rank`` of ``size``, as after ``init_process_group``, until the end of the block.

    The environment is what torchrun would set, on a node with this one rank. Where the process's
    program is such a rank, nothing is left to do.

    Args:
        rank: this process's rank.
        size: number of ranks.
        backend: PyTorch's name for the group's backend on a GPU.
        adapted: returns a context in which a group of that backend is made and works.
        variables: further variables of the environment.
        by_program: the process group is made when the block calls ``init_process_group``.

    Raises:
        DeviceError: this process has a default process group, or PyTorch none of this backend.
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
    if not distributed.is_available() or not (backend == FAKE or distributed.is_nccl_available()):
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
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29500"),
        **variables,
    }
    with ExitStack() as stack:
        for name, value in environment.items():
            set_variable(stack, name, value)
        stack.enter_context(adapted())
        initialise = distributed.init_process_group

        def begin(*_arguments: object, **_options: object) -> None:
            initialise(
                f"cpu:{FAKE},cuda:{backend}",
                store=distributed.HashStore(),
                rank=rank,
                world_size=size,
            )
            # A group that is bound to a device is split for its subgroups, and ncclCommSplit does
            # not get the parts' sizes, which the other ranks would tell.
            group = distributed.distributed_c10d._get_default_group()
            DEVICE_OF_GROUP.on(group, "bound_device_id", None)

        @stack.callback
        def destroy_groups() -> None:
            if distributed.is_initialized():  # the test may have done so itself
                # DeepSpeed keeps groups of its own, which only its own function lets go of.
                comm: Any = sys.modules.get("deepspeed.comm", distributed)
                (comm if comm.is_initialized() else distributed).destroy_process_group()

        if by_program:
            BEGUN_BY_PROGRAM.put(distributed, dict.fromkeys(BEGUN_BY_PROGRAM.names, begin), stack)
            _PROGRAMS_RANK.add((rank, size))
            stack.callback(_PROGRAMS_RANK.clear)
        else:
            begin()
        checkpoint_alone(stack)
        REFUSED.put(distributed, dict.fromkeys(REFUSED.names, _refuse_objects), stack)
        yield


def _refuse_objects(*_args: object, **_kwargs: object) -> NoReturn:
    raise DeviceError(
        "torch.distributed.recv_object_list",
        "this call receives objects from another rank, but this rank runs alone",
        "for a PipelineStage, write input_args= and output_args=, which give it its "
        "shapes (not with torch 2.13 and 2.14, whose stages vote on their shapes); or "
        "run all ranks as processes: gpumem run torchrun ...",
    )


def checkpoint_alone(stack: ExitStack) -> None:
    """Let torch.distributed.checkpoint write and read this rank's shards alone.

    Its first rank gathers the plans of all ranks, and refuses them where parts of a tensor are in
    none of them, as those of absent ranks are.
    """

    @wrapped_by
    def begin_alone(
        begin: Callable[..., None],
        self: object,
        group: object,
        use_dist: bool,  # noqa: FBT001 - PyTorch's names
        coordinator_rank: int,
    ) -> None:
        del use_dist
        begin(self, group, False, coordinator_rank)  # noqa: FBT003

    def finding_valid(validate: Callable[..., object]) -> Callable[..., object]:
        # Newer versions of PyTorch return the list of all that is wrong.
        valid: object = True if validate.__annotations__["return"] in (bool, "bool") else []
        return lambda *_arguments: valid

    CHECKPOINTS.wrap(importlib.import_module(CHECKPOINTS.module), begin_alone, stack)
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
