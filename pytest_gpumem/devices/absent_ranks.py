"""Simulates the other ranks of a process that is one rank of many and runs alone.

Nothing may wait for an absent rank:

- Process groups of any backend use PyTorch's fake backend, which assumes that the other ranks have
  this rank's values. On the virtual GPU, NCCL groups are PyTorch's ``ProcessGroupNCCL`` (see
  ``lone_nccl_rank``).
- Stores that several processes would share are local to this process.
- A call that needs data of an absent rank raises an error that names the call.
"""

from __future__ import annotations

import importlib.util
import inspect
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pytest_gpumem.devices.uniform_ranks import simulate_uniform_ranks
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable

FAKE: Final = "gpumem"
"""name under which PyTorch's fake backend is registered"""
GROUPS: Final = Patch(
    "torch.distributed.distributed_c10d",
    "_new_process_group_helper",
    reason="a rank that runs alone makes groups of any backend, and their other ranks never come",
)
DEBUG_GROUPS: Final = Patch(
    "torch.distributed",
    "distributed_c10d._create_process_group_wrapper",
    reason="TORCH_DISTRIBUTED_DEBUG=DETAIL compares collectives with those of absent ranks",
)
BARRIERS: Final = Patch(
    "torch.distributed",
    *("monitored_barrier", "distributed_c10d.monitored_barrier"),
    *("distributed_c10d._store_based_barrier", "Store.barrier"),
    reason="a rank that runs alone waits for no other rank",
)
STORES: Final = (
    Patch(
        "torch.distributed",
        *("TCPStore", "FileStore"),
        reason="a rank that runs alone makes stores in its own process: the others never join",
    ),
    Patch(
        "torch.distributed.rendezvous",
        *("TCPStore", "FileStore"),
        reason="a rank that runs alone makes stores in its own process: the others never join",
    ),
)
STORE_READS: Final = Patch(
    "torch.distributed",
    *("Store.get", "Store.wait", "Store.multi_get", "Store.queue_pop"),
    reason="a key that this rank has not stored is an error: no other rank will store it",
)
OBJECT_LISTS: Final = Patch(
    "torch.distributed",
    *("broadcast_object_list", "distributed_c10d.broadcast_object_list"),
    *("scatter_object_list", "distributed_c10d.scatter_object_list"),
    *("gather_object", "distributed_c10d.gather_object"),
    reason="a rank that runs alone gathers its own objects, and receives none of another rank",
)
OBJECTS: Final = Patch(
    "torch.distributed",
    *("all_gather_object", "distributed_c10d.all_gather_object"),
    reason="a rank that runs alone gathers its own object, of any size",
)
OBJECT_READ: Final = Patch(
    "torch.distributed.distributed_c10d",
    "_tensor_to_object",
    reason="the bytes of a large object in a CUDA tensor are unknown",
)
RECEIVED: Final = Patch(
    "torch._C._distributed_c10d",
    *("ProcessGroup.recv", "ProcessGroup.recv_anysource", "ProcessGroup.scatter"),
    reason="a rank that runs alone receives no values of CPU tensors, and an error says so",
)
REFUSED: Final = Patch(
    "torch.distributed",
    *("recv_object_list", "distributed_c10d.recv_object_list", "rpc.init_rpc"),
    reason="a rank that runs alone receives no objects, and an error says so",
)
SYMMETRIC_MEMORY: Final = Patch(
    "torch._C._distributed_c10d",
    "_SymmetricMemory.rendezvous",
    reason="a rank that runs alone maps no other rank's memory, and an error says so",
)
CHECKPOINTS: Final = Patch(
    "torch.distributed.checkpoint.utils",
    "_DistWrapper.__init__",
    reason="a rank that runs alone writes and reads its own shards of a checkpoint",
)
PLANS: Final = Patch(
    "torch.distributed.checkpoint.default_planner",
    "_validate_global_plan",
    reason="PyTorch refuses a checkpoint's plan that lacks the shards of absent ranks",
)
CHECKPOINT_PROCESSES: Final = Patch(
    "torch.distributed.checkpoint._async_process_executor",
    "_ProcessBasedAsyncCheckpointExecutor.execute_save",
    reason="a process that saves checkpoints joins those of the other ranks, and an error says so",
    versions="torch 2.7 and newer",
)
REMEDY: Final = "run all ranks as processes: gpumem run torchrun ..."


def simulate_absent_ranks(distributed: Any, stack: ExitStack, *, nccl: bool) -> None:
    """Simulate the other ranks until the stack is closed.

    Args:
        distributed: ``torch.distributed``.
        stack: removes all patches when it closes.
        nccl: whether to simulate NCCL groups, too.
    """
    c10d = importlib.import_module(GROUPS.module)
    known: Any = distributed.Backend
    _register_fake_backend(known)

    @wrapped_by
    def make_group(
        make: Callable[..., Any],
        size: int,
        rank: int,
        ranks: object,
        backend: str,
        *arguments: object,
        **options: object,
    ) -> object:
        pairs = [
            (device, name if name not in known.backend_list or is_made(name) else FAKE)
            for device, name in c10d.BackendConfig(backend).get_device_backend_map().items()
        ]
        made = ",".join(f"{device}:{name}" for device, name in pairs)
        group, store = make(size, rank, ranks, made, *arguments, **options)
        if store is not None:  # this rank is in the group
            c10d._world.pg_map[group] = backend, store  # get_backend() returns the name
        return group, store

    def is_made(name: str) -> bool:
        return name.startswith("nccl") and not nccl

    GROUPS.wrap(c10d, make_group, stack)
    DEBUG_GROUPS.wrap(distributed, lambda _: lambda wrapped_pg, **_options: wrapped_pg, stack)
    BARRIERS.wrap(distributed, lambda _: _do_nothing, stack)
    simulate_uniform_ranks(stack)
    _keep_stores_in_process(distributed, stack)
    bindings = importlib.import_module(RECEIVED.module)
    _refuse_calls(distributed, bindings, stack)
    _refuse_data_of_others(distributed, bindings, stack)
    _checkpoint_alone(stack)


def _register_fake_backend(backend: Any) -> None:
    """Register PyTorch's fake process group as a backend, once per process."""
    if FAKE in backend.backend_list:
        return
    kind: Any = importlib.import_module(RECEIVED.module).FakeProcessGroup

    def create(common: Any, _options: object) -> object:
        make = getattr(kind, "_create_internal", kind)
        options_type: Any = getattr(kind, "Options", None)
        if not hasattr(options_type, "simulate_uniform_ranks"):  # torch 2.14 and older
            return make(common.group_rank, common.group_size)
        options = options_type()
        options.simulate_uniform_ranks = True
        return make(common.group_rank, common.group_size, options)

    backend.register_backend(FAKE, create, extended_api=True, devices=["cpu", "cuda"])


def lone_store(distributed: Any) -> Any:
    """Return a store whose reads do not wait until another rank sets a key."""
    store = distributed.HashStore()
    store.set_timeout(timedelta(milliseconds=1))  # how long a read waits; 0 would mean no limit
    return store


def _do_nothing(*_arguments: object, **_options: object) -> None:
    pass


def _replaced(kind: Any, make: Callable[..., object], made: Any) -> Any:
    """Return a subclass of ``kind`` whose constructor calls ``make``.

    Instances of ``kind`` and of ``made`` are its instances too.

    A function is not enough: PyTorch and programs read the class's attributes, and test instances
    with ``isinstance``.
    """

    class Replaced(type(kind)):  # type: ignore[misc] # a base class without types
        def __call__(cls, *arguments: object, **options: object) -> object:
            return make(*arguments, **options)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (kind, made))

    return Replaced(kind.__name__, (kind,), {})


def _keep_stores_in_process(distributed: Any, stack: ExitStack) -> None:
    """Replace stores that ranks share by stores of this process, with its keys only."""
    plain: Any = distributed.HashStore

    def kept(kind: Any) -> Any:
        def make_tcp(
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,  # noqa: FBT001, FBT002 - PyTorch's
            *arguments: object,
            **options: object,
        ) -> object:
            if is_master and (world_size or 1) <= 1:
                return kind(host_name, port, world_size, is_master, *arguments, **options)
            return lone_store(distributed)

        def make_file(file_name: str, world_size: int = -1) -> object:
            return kind(file_name, world_size) if world_size <= 1 else lone_store(distributed)

        return _replaced(kind, make_tcp if kind.__name__ == "TCPStore" else make_file, plain)

    for stores in STORES:
        stores.wrap(importlib.import_module(stores.module), kept, stack)

    def read(function: Any, store: Any, keys: Any, *arguments: Any, **options: Any) -> Any:
        base = store
        while isinstance(base, distributed.PrefixStore):
            base = base.underlying_store
        if isinstance(base, plain):
            named = [keys] if isinstance(keys, str) else list(keys)
            is_queue = function.__name__ == "queue_pop"
            if not (store.queue_len(keys) if is_queue else store.check(named)):
                raise DeviceError(
                    f"torch.distributed.Store.{function.__name__}({keys!r})",
                    "this call waits for another rank to store the key, but this rank runs alone",
                    REMEDY,
                )
        return function(store, keys, *arguments, **options)

    STORE_READS.wrap(distributed, wrapped_by(read), stack)


def _refuse(call: str, what: str, remedy: str = REMEDY) -> NoReturn:
    raise DeviceError(
        f"torch.distributed.{call}", f"this call {what}, but this rank runs alone", remedy
    )


def _refuse_calls(distributed: Any, bindings: Any, stack: ExitStack) -> None:
    """Refuse calls that need the other ranks' processes; the error names the call."""

    def receive_objects(*_arguments: object, **_options: object) -> NoReturn:
        _refuse(
            "recv_object_list",
            "receives objects from another rank",
            "for a PipelineStage, write input_args= and output_args=, which give it its "
            "shapes (not with torch 2.13 and 2.14, whose stages vote on their shapes); or "
            f"{REMEDY}",
        )

    def connect(*_arguments: object, **_options: object) -> NoReturn:
        _refuse("rpc.init_rpc", "connects to all other ranks")

    def save_in_process(*_arguments: object, **_options: object) -> NoReturn:
        _refuse(
            "checkpoint.async_save",
            "starts a process that joins those of the other ranks",
            "save in a thread: async_checkpointer_type=AsyncCheckpointerType.THREAD",
        )

    def map_memory(*_arguments: object, **_options: object) -> NoReturn:
        _refuse("_symmetric_memory.rendezvous", "maps the memory of all other ranks")

    refused = dict.fromkeys(REFUSED.names, receive_objects) | {"rpc.init_rpc": connect}
    REFUSED.put(distributed, refused, stack)
    SYMMETRIC_MEMORY.wrap(bindings, lambda _: map_memory, stack)
    if importlib.util.find_spec(CHECKPOINT_PROCESSES.module):
        executor = importlib.import_module(CHECKPOINT_PROCESSES.module)
        CHECKPOINT_PROCESSES.wrap(executor, lambda _: save_in_process, stack)


def _refuse_data_of_others(distributed: Any, bindings: Any, stack: ExitStack) -> None:
    """Refuse calls that return data which only an absent rank has; the error names the call."""

    def move_objects(move: Any, *arguments: Any, **options: Any) -> None:
        named = inspect.signature(move).bind(*arguments, **options).arguments
        group = named.get("group") or distributed.group.WORLD
        here = distributed.get_rank(group)
        is_gather = move.__name__ == "gather_object"
        end = "dst" if is_gather else "src"
        root = named.get(f"group_{end}")
        if root is None and here >= 0:  # -1: this rank is not in the group
            root = distributed.get_group_rank(group, named.get(end) or 0)
        if is_gather and here == root:  # gather() uses NCCL's receive, which delivers no values
            distributed.all_gather_object(named["object_gather_list"], named["obj"], group)
        elif is_gather or here in (root, -1):
            move(*arguments, **options)
        elif move.__name__ == "scatter_object_list" or None in named["object_list"]:
            _refuse(move.__name__, "receives objects from another rank")

    def gather_objects(gather: Any, object_list: Any, obj: Any, group: Any = None) -> None:
        module = importlib.import_module(OBJECT_READ.module)
        read = module._tensor_to_object
        pickled, size = module._object_to_tensor(obj, "cpu", group)
        own = {"_tensor_to_object": lambda *_: read(pickled, size, group)}
        with ExitStack() as call:
            OBJECT_READ.put(module, own, call)
            gather(object_list, obj, group)

    def move_values(move: Any, group: Any, tensors: Any, *arguments: Any) -> Any:
        is_scatter = move.__name__ == "scatter"
        has_values = is_scatter and group.rank() == arguments[-1].rootRank
        if not has_values and any(tensor.device.type == "cpu" for tensor in tensors):
            call = "scatter" if is_scatter else "recv (or irecv)"
            _refuse(f"{call} of a CPU tensor", "receives values from another rank")
        return move(group, tensors, *arguments)

    OBJECT_LISTS.wrap(distributed, wrapped_by(move_objects), stack)
    OBJECTS.wrap(distributed, wrapped_by(gather_objects), stack)
    RECEIVED.wrap(bindings, wrapped_by(move_values), stack)


def _checkpoint_alone(stack: ExitStack) -> None:
    """Make torch.distributed.checkpoint write and read only this rank's shards.

    PyTorch's first rank gathers the plans of all ranks, and rejects them if some part of a tensor
    is in no plan. Here the shards of absent ranks are in none, so every plan is accepted.
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
        # Newer versions of PyTorch return a list of problems instead of a bool.
        valid: object = True if validate.__annotations__["return"] in (bool, "bool") else []
        return lambda *_arguments: valid

    CHECKPOINTS.wrap(importlib.import_module(CHECKPOINTS.module), begin_alone, stack)
    PLANS.wrap(importlib.import_module(PLANS.module), finding_valid, stack)
