"""The other ranks of a rank that is alone: groups of any backend, stores, and what is refused."""

import importlib
import sys
from datetime import timedelta

import pytest
from helpers.torch_features import RELEASE, require_release
from helpers.virtual_gpu import virtual_card, virtual_device

from pytest_gpumem.devices import absent_ranks, uniform_ranks
from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.patches import Patch

WORLD = 4
LIMIT = timedelta(seconds=5)
"""of a wait that is a fault"""
ALONE = "this rank runs alone; run all ranks as processes: gpumem run torchrun ..."


@pytest.fixture(params=["virtual", "real"])
def kind(request):
    return request.param


@pytest.fixture(params=[0, 2])
def rank(request, kind):
    device = virtual_device() if kind == "virtual" else CudaDevice()
    with virtual_card(), device.join_alone(request.param, WORLD):
        yield request.param


def gloo():
    from torch import distributed

    return distributed.new_group(list(range(WORLD)), backend="gloo", timeout=LIMIT)


@pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl", "mpi", "ucc", None])
def test_a_group_of_any_backend_waits_for_no_other_rank(rank, backend):
    import torch
    from torch import distributed

    group = distributed.new_group(list(range(WORLD)), backend=backend, timeout=LIMIT)
    assert distributed.get_backend(group) == (backend or "cpu:gloo,cuda:nccl")
    assert (distributed.get_rank(group), distributed.get_world_size(group)) == (rank, WORLD)
    distributed.all_reduce(torch.ones(8, device="cuda"), group=group)
    if backend != "nccl":  # with torch 2.6 a thread keeps the barrier's tensor for a while
        distributed.barrier(group)
    distributed.destroy_process_group(group)


@pytest.mark.parametrize(
    ("backend", "device", "name"),
    [
        (None, None, "cpu:gloo,cuda:nccl"),
        (None, 0, "nccl"),
        ("NCCL", None, "nccl"),
        ("cuda:nccl", None, "cuda:nccl"),
        ("gloo", None, "cpu:gloo,cuda:nccl"),
        ("cuda:nccl,cpu:gloo", 0, "cpu:gloo,cuda:nccl"),
    ],
)
def test_a_group_of_nccl_alone_has_no_backend_for_the_cpu(kind, backend, device, name):
    """On a real GPU it has one: objects are not moved in CUDA tensors there."""
    import torch
    from torch import distributed

    gpu = virtual_device() if kind == "virtual" else CudaDevice()
    options = {} if device is None else {"device_id": torch.device("cuda", device)}
    with virtual_card(), gpu.join_alone(2, WORLD, by_program=True):
        distributed.init_process_group(backend, **options)
        alone = kind == "virtual" and "nccl" in name and "gloo" not in name
        assert distributed.get_backend() == (name if alone else "cpu:gloo,cuda:nccl")
        group = distributed.distributed_c10d._get_default_group()
        types = {place.type for place in group._device_types}
        assert types == ({"cuda"} if alone else {"cuda", "cpu"})
        found = [None] * WORLD
        loss = torch.ones(1, requires_grad=True) * 2  # not a leaf: it has no copy.deepcopy
        distributed.all_gather_object(found, {"rank": 2, "loss": loss})
        assert found == [{"rank": 2, "loss": 2.0}] * WORLD


def test_an_object_that_nccl_gathers_may_be_large():
    """The virtual GPU stores no piece of more than 16 MiB."""
    from torch import distributed

    text = "x" * (17 << 20)
    with virtual_card(), virtual_device().join_alone(2, WORLD):
        group = distributed.new_group(list(range(WORLD)), backend="nccl", timeout=LIMIT)
        found, gathered = [None] * WORLD, [None] * WORLD
        distributed.all_gather_object(found, text, group=group)
        distributed.gather_object(text, gathered, 2, group=group)
    assert found == gathered == [text] * WORLD


def test_a_barrier_of_gloo_takes_no_memory_of_the_gpu():
    import torch
    from torch import distributed

    with virtual_card(), virtual_device().join_alone(2, WORLD, by_program=True):
        distributed.init_process_group("gloo")
        torch.cuda.init()
        distributed.barrier()
        assert torch.cuda.memory_allocated() == 0


@pytest.mark.parametrize("arguments", [(), (LIMIT,)])
def test_barriers_of_a_group_itself_are_on_this_ranks_device(arguments):
    """NCCL would take the device with this rank's number."""
    from torch import distributed

    with virtual_card(), virtual_device().join_alone(2, WORLD):
        group = distributed.new_group(list(range(WORLD)), backend="nccl", timeout=LIMIT)
        if not arguments or RELEASE >= (2, 9):
            group.barrier(*arguments).wait()
        distributed.barrier(gloo())  # torch 2.14 and older keep the tensor of the last one


def test_groups_that_functions_of_pytorch_make_wait_for_none(rank):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    pair = sorted([rank, (rank + 1) % WORLD])
    options = {"backend": "gloo", "timeout": LIMIT}
    assert distributed.new_group(pair, use_local_synchronization=True, **options).size() == 2
    others = [(rank + 1) % WORLD, (rank + 2) % WORLD]
    assert distributed.new_group(others, **options) == distributed.GroupMember.NON_GROUP_MEMBER
    assert distributed.new_subgroups(2, **options)[0].size() == 2
    assert init_device_mesh("cpu", (2, 2)).shape == (2, 2)


def test_a_backend_that_pytorch_does_not_know_is_not_simulated(rank):
    from torch import distributed

    with pytest.raises((AssertionError, ValueError), match=r"(?i)unknown"):
        distributed.new_group([rank], backend="cpu:their_own", timeout=LIMIT)


@pytest.mark.parametrize("how", ["debug", "barrier"])
def test_settings_that_compare_ranks_at_each_group_compare_none(monkeypatch, how):
    from torch import distributed

    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", str(int(how == "barrier")))
    level = distributed.get_debug_level()
    if how == "debug":
        distributed.set_debug_level(distributed.DebugLevel.DETAIL)
    try:
        with virtual_card(), virtual_device().join_alone(1, WORLD):
            distributed.barrier(gloo())
    finally:
        distributed.set_debug_level(level)


def given():
    import torch

    return torch.arange(1.0, 5.0)


def collectives(rank):  # noqa: C901 - one function a collective
    """Return of each collective of CPU tensors: how it is called, and the result."""
    import torch
    from torch import distributed

    operations, x = distributed.ReduceOp, given()

    def reduced(group, operation=operations.SUM):
        y = given()
        distributed.all_reduce(y, operation, group=group)
        return y

    def awaited(group):
        (y,) = distributed.all_reduce(given(), group=group, async_op=True).get_future().value()
        return y

    def to_root(group):
        y = given()
        distributed.reduce(y, 2, group=group)
        return y

    def broadcast(group):
        y = given()
        distributed.broadcast(y, 0, group=group)
        return y

    def gathered(group):
        parts = [torch.zeros(4) for _ in range(WORLD)]
        distributed.all_gather(parts, x, group=group)
        return torch.stack(parts)

    def gathered_to_root(group):
        parts = [torch.zeros(4) for _ in range(WORLD)] if rank == 2 else None
        distributed.gather(x, parts, 2, group=group)
        return torch.stack(parts) if parts else torch.zeros(0)

    def scattered(group):
        y = torch.zeros(4)
        distributed.scatter(y, [x + i for i in range(WORLD)], rank, group=group)
        return y

    def scattered_sum(group):
        y = torch.zeros(4)
        distributed.reduce_scatter(y, [x + i for i in range(WORLD)], group=group)
        return y

    def scattered_base(group):
        y = torch.zeros(1)
        distributed.reduce_scatter_tensor(y, x, group=group)
        return y

    def exchanged(group):
        parts = [torch.zeros(2) for _ in range(WORLD)]
        distributed.all_to_all(
            parts, [torch.full((2,), float(i)) for i in range(WORLD)], group=group
        )
        return torch.stack(parts)

    def exchanged_base(group):
        y = torch.zeros(4)
        distributed.all_to_all_single(y, x, group=group)
        return y

    return {
        "sum": (reduced, 4 * x),
        "max": (lambda group: reduced(group, operations.MAX), x),
        "product": (lambda group: reduced(group, operations.PRODUCT), x**4),
        "future": (awaited, 4 * x),
        "reduce": (to_root, 4 * x if rank == 2 else x),
        "broadcast": (broadcast, x),
        "all_gather": (gathered, x.repeat(WORLD, 1)),
        "gather": (gathered_to_root, x.repeat(WORLD, 1) if rank == 2 else torch.zeros(0)),
        "scatter": (scattered, x + rank),
        "reduce_scatter": (scattered_sum, 4 * (x + rank)),
        "reduce_scatter_tensor": (scattered_base, 4 * x[rank : rank + 1]),
        "all_to_all": (exchanged, torch.full((WORLD, 2), float(rank))),
        "all_to_all_single": (exchanged_base, x[rank].repeat(4)),
    }


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("own_group", [False, True])
def test_collectives_of_cpu_tensors_have_the_results_of_equal_ranks(rank, own_group):
    group = gloo() if own_group else None
    for name, (call, expected) in collectives(rank).items():
        result = call(group)
        assert result.tolist() == expected.tolist(), name


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_ddp_over_a_group_of_gloo(rank, kind, place):
    import torch

    if place == "cuda" and kind == "virtual":
        require_release(2, 15, "a future of the fake group's collectives on a GPU")
    net = torch.nn.Linear(4, 4, device=place)
    net = torch.nn.parallel.DistributedDataParallel(net, process_group=gloo())
    for _ in range(2):
        net(torch.ones(2, 4, device=place)).sum().backward()
    assert net.module.weight.grad is not None


def test_barriers_with_a_time_limit_end_at_once(rank):
    from torch import distributed

    for group in (gloo(), None):
        distributed.monitored_barrier(group, timeout=LIMIT, wait_all_ranks=True)


@pytest.mark.parametrize("backend", ["gloo", None])
def test_objects_of_this_rank_are_those_of_all(rank, backend):
    from torch import distributed

    group = distributed.new_group(list(range(WORLD)), backend=backend, timeout=LIMIT)
    gathered, scattered, objects = [None] * WORLD, [None], [{"rank": rank}]
    distributed.all_gather_object(gathered, {"rank": rank}, group=group)
    assert gathered == [{"rank": rank}] * WORLD
    mine = [None] * WORLD if rank == 0 else None
    distributed.gather_object({"rank": rank}, mine, 0, group=group)
    assert mine == ([{"rank": 0}] * WORLD if rank == 0 else None)
    distributed.broadcast_object_list(objects, rank, group=group)
    distributed.broadcast_object_list(objects, (rank + 1) % WORLD, group=group)
    assert objects == [{"rank": rank}]
    distributed.scatter_object_list(scattered, list("abcd"), rank, group=group)
    assert scattered == ["abcd"[rank]]
    distributed.send_object_list([1], (rank + 1) % WORLD, group=group)
    others = distributed.new_group([(rank + 1) % WORLD], backend=backend, timeout=LIMIT)
    with pytest.warns(UserWarning, match="does not belong to"):
        distributed.broadcast_object_list([None], (rank + 1) % WORLD, group=others)


def refused(distributed, other, group):
    """Return calls that need an absent rank, by the name that the error tells."""
    x, many = given(), distributed.batch_isend_irecv
    receive = r"recv \(or irecv\) of a CPU tensor: this call receives values from another rank"
    saver = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
    kinds = getattr(saver, "AsyncCheckpointerType", None)
    calls = [
        ("scatter of a CPU tensor", lambda: distributed.scatter(x, None, other, group=group)),
        (receive, lambda: distributed.recv(x, other, group=group)),
        (receive, lambda: distributed.recv(x, group=group)),
        (receive, lambda: distributed.irecv(x, other, group=group)),
        (
            receive,
            lambda: many([distributed.P2POp(distributed.irecv, x, other, group=group)]),
        ),
        (
            "broadcast_object_list",
            lambda: distributed.broadcast_object_list([None], other, group=group),
        ),
        (
            "scatter_object_list",
            lambda: distributed.scatter_object_list([None], None, other, group=group),
        ),
        ("rpc.init_rpc", lambda: distributed.rpc.init_rpc("one", rank=0, world_size=WORLD)),
    ]
    if kinds is not None:
        options = {"async_checkpointer_type": kinds.PROCESS}
        calls.append(
            ("checkpoint.async_save", lambda: saver.async_save({"x": x}, **options).result())
        )
    return calls


@pytest.mark.parametrize("own_group", [False, True])
def test_what_only_an_absent_rank_has_is_an_error_with_the_name_of_the_call(
    rank, own_group, tmp_path, monkeypatch
):
    from torch import distributed

    monkeypatch.chdir(tmp_path)
    for name, call in refused(distributed, (rank + 1) % WORLD, gloo() if own_group else None):
        with pytest.raises(DeviceError, match=rf"torch\.distributed\.{name}.*this rank runs alone"):
            call()


def test_memory_of_other_ranks_is_not_mapped():
    from torch import distributed

    with virtual_card(), virtual_device().join_alone(0, WORLD):
        memory = importlib.import_module("torch.distributed._symmetric_memory")
        with pytest.raises(DeviceError, match=r"this rank runs alone"):
            memory.rendezvous(memory.empty(16, device="cuda"), distributed.group.WORLD)


def stores(distributed, rank, folder):
    return {
        "the group's": distributed.distributed_c10d._get_default_store,
        "tcp": lambda: distributed.TCPStore("127.0.0.1", 29501, WORLD, rank == 0, timeout=LIMIT),
        "a client": lambda: distributed.TCPStore("127.0.0.1", 29501, timeout=LIMIT),
        "file": lambda: distributed.FileStore(str(folder / "store"), WORLD),
        "prefix": lambda: distributed.PrefixStore("one", distributed.HashStore()),
        "rendezvous": lambda: next(distributed.rendezvous("env://", timeout=LIMIT))[0],
    }


def test_a_store_has_the_keys_of_this_rank_and_an_error_for_others(rank, tmp_path):
    from torch import distributed

    for name, make in stores(distributed, rank, tmp_path).items():
        store = make()
        store.set("mine", "1")
        store.wait(["mine"], LIMIT)
        assert store.get("mine") == b"1", name
        calls = [
            (r"get\('theirs'\)", lambda store=store: store.get("theirs")),
            (r"wait\(\['theirs'\]\)", lambda store=store: store.wait(["theirs"])),
            (r"wait\(\['theirs'\]\)", lambda store=store: store.wait(["theirs"], LIMIT)),
            (
                r"multi_get\(\['mine', 'theirs'\]\)",
                lambda store=store: store.multi_get(["mine", "theirs"]),
            ),
        ]
        for call, read in calls:
            with pytest.raises(DeviceError, match=rf"torch\.distributed\.Store\.{call}: .*{ALONE}"):
                read()


def test_queues_and_barriers_of_a_store_wait_for_none(rank):
    from torch import distributed

    store = distributed.distributed_c10d._get_default_store()
    if hasattr(store, "queue_pop"):
        store.queue_push("mine", "1")
        assert store.queue_pop("mine") == b"1"
        with pytest.raises(DeviceError, match=r"Store\.queue_pop\('theirs'\)"):
            store.queue_pop("theirs")
    if hasattr(store, "barrier"):
        store.barrier("all", WORLD, LIMIT)


def test_a_wait_of_pytorchs_own_for_a_key_ends_at_once():
    from torch import distributed

    with pytest.raises(RuntimeError, match="(?i)wait timeout"):
        absent_ranks.lone_store(distributed).get("theirs")


def test_a_store_for_this_process_alone_is_pytorchs_own(rank, tmp_path):
    from torch import distributed

    assert type(distributed.TCPStore("127.0.0.1", 0, 1, True)).__name__ == "TCPStore"
    assert isinstance(distributed.TCPStore("127.0.0.1", 0, 1, True), distributed.TCPStore)
    assert type(distributed.FileStore(str(tmp_path / "one"), 1)).__name__ == "FileStore"


def test_a_checkpoint_over_a_group_of_gloo(rank, tmp_path):
    import torch
    from torch.distributed import checkpoint

    state = {"x": torch.ones(4)}
    checkpoint.save(state, checkpoint_id=tmp_path / "one", process_group=gloo())
    checkpoint.async_save(state, checkpoint_id=tmp_path / "two", process_group=gloo()).result()
    checkpoint.load(state, checkpoint_id=tmp_path / "two", process_group=gloo())


def test_outside_all_is_pytorchs_own():
    declared = [
        patch
        for value in (*vars(absent_ranks).values(), uniform_ranks.METHODS)
        for patch in (value if isinstance(value, tuple) else [value])
        if isinstance(patch, Patch)
    ]

    def values():
        return [patch.values(sys.modules.get(patch.module)) for patch in declared]

    with virtual_card(), virtual_device().join_alone(0, WORLD):
        pass  # imports the modules
    before = values()
    with virtual_card(), virtual_device().join_alone(0, WORLD):
        assert values() != before
    assert values() == before


TEST = """
@pytest.mark.gpu_memory(world_size=8, rank={rank})
def test_it():
    import torch.distributed as dist
    for backend in ("gloo", "nccl"):
        group = dist.new_group(backend=backend)
        objects = [None] * 8
        dist.all_gather_object(objects, dist.get_rank(), group=group)
        assert objects == [{rank}] * 8
        dist.gather_object(dist.get_rank(), objects, {rank}, group=group)
        assert objects == [{rank}] * 8
    with pytest.raises(RuntimeError, match="this rank runs alone"):
        dist.recv(torch.ones(1), 0)
"""


@pytest.mark.parametrize("rank", [0, 3])
def test_a_marked_test_with_groups_of_several_backends(suite, rank):
    session = suite.run(source=TEST.format(rank=rank))
    assert session.outcomes == {"passed": 1}, session.out
