"""One rank of many, whose others are not there: what data parallel training holds, to the byte."""

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from helpers.torch_features import require_release
from helpers.virtual_gpu import MIB, settle_all, virtual_card, virtual_device

from pytest_gpumem.devices.autograd_threads import awaited_passes
from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.errors import DeviceError

N = 3 * MIB
"""elements of each parameter: 12 MiB, which no segment of 20 MiB shares with another"""
COUNT = 8
PARAMS = 4 * N * COUNT
WORLD = 8


def joined(rank, size):
    return virtual_device().join_alone(rank, size)


@pytest.fixture(params=[0, 3])
def world(request):
    import torch

    with virtual_card(), joined(request.param, WORLD):
        torch.cuda.reset_peak_memory_stats()
        yield request.param


def allocated():
    import torch

    return torch.cuda.memory_allocated()


def peak():
    import torch

    return torch.cuda.max_memory_allocated()


def model(device="cuda", *, unused=False):
    """Return eight parameters of 12 MiB, each a module, with which no matrix is multiplied."""
    import torch
    from torch import nn

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(N, device=device))

        def forward(self, loss):
            return loss + self.weight.sum()

    class Scales(nn.Sequential):
        def forward(self, loss):
            for scale in self[unused:]:
                loss = scale(loss)
            return loss

    return Scales(*(Scale() for _ in range(COUNT)))


def test_this_process_is_the_rank_it_was_asked_to_be_and_no_more_afterwards():
    from torch import distributed

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.get(name) for name in names}
    with virtual_card(), joined(5, 64):
        assert (distributed.get_rank(), distributed.get_world_size()) == (5, 64)
        assert [os.environ[name] for name in names[:3]] == ["5", "64", "0"]
        assert "nccl" in distributed.get_backend()
    assert not distributed.is_initialized()
    assert {name: os.environ.get(name) for name in names} == before


def test_a_cuda_graph_is_captured_after_a_step_of_such_a_rank(torch):
    """Torch 2.6 waits, without end, for collectives that it counts as pending."""
    from torch import distributed

    with virtual_card(), joined(0, 2):
        distributed.all_reduce(torch.ones(8, device="cuda"))
    with virtual_card():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.ones(8, device="cuda")
        del graph


def test_deepspeed_lets_go_of_its_groups_by_a_function_of_its_own(monkeypatch):
    """Or the next stage of ZeRO in a session would take groups that are no more."""
    from torch import distributed

    called = []

    def destroy_process_group():
        called.append("deepspeed")
        distributed.destroy_process_group()

    for initialized in (False, True):
        comm = SimpleNamespace(
            is_initialized=lambda value=initialized: value,
            destroy_process_group=destroy_process_group,
        )
        monkeypatch.setitem(sys.modules, "deepspeed.comm", comm)
        with virtual_card(), joined(0, 2):
            pass
        assert called == ["deepspeed"] * initialized
        assert not distributed.is_initialized()


def test_a_checkpoint_is_of_this_ranks_shards(world, tmp_path):
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.fsdp import fully_shard

    network = fully_shard(torch.nn.Linear(64, 64).cuda())
    assert network.weight.to_local().shape == (64 // WORLD, 64)
    torch.save(network.state_dict(), tmp_path / "plain.pt")
    checkpoint.save(network.state_dict(), checkpoint_id=tmp_path / "sharded")
    loaded = network.state_dict()
    checkpoint.load(loaded, checkpoint_id=tmp_path / "sharded")
    assert loaded["weight"].to_local().shape == (64 // WORLD, 64)
    with pytest.raises(checkpoint.CheckpointException, match="Missing key"):
        checkpoint.load({"more": torch.ones(1)}, checkpoint_id=tmp_path / "sharded")


def test_checkpoints_outside_of_such_a_rank_are_pytorchs_own():
    from torch.distributed.checkpoint import default_planner, utils

    names = (utils._DistWrapper.__init__, default_planner._validate_global_plan)
    with virtual_card(), joined(0, 2):
        assert utils._DistWrapper.__init__ is not names[0]
    assert (utils._DistWrapper.__init__, default_planner._validate_global_plan) == names


@pytest.mark.parametrize("rank", [0, 700, 1023])
def test_a_world_may_be_large(rank):
    """Above 128 ranks PyTorch lets several of them make ids, were it not told otherwise."""
    import torch
    from torch import distributed

    with virtual_card(), joined(rank, 1024):
        distributed.all_reduce(torch.ones(8, device="cuda"))
        assert distributed.new_group(list(range(1024))).size() == 1024


def test_a_process_group_of_somebody_else_is_not_replaced(world):
    with pytest.raises(DeviceError, match="already has a default process group"):
        joined(0, 2).__enter__()


def test_one_that_the_test_destroyed_itself_is_not_missed():
    from torch import distributed

    with virtual_card(), joined(0, 2):
        distributed.destroy_process_group()


BUCKETS = {
    "default": ({}, PARAMS, 512, 0),
    "small buckets": ({"bucket_cap_mb": 1}, PARAMS, 512, 0),
    "one bucket": ({"bucket_cap_mb": 1000}, PARAMS, 512, 0),
    "static graph": ({"static_graph": True}, PARAMS, 1024, 0),
    "views": ({"gradient_as_bucket_view": True}, 0, 512, 4 * N),
    "static views": ({"gradient_as_bucket_view": True, "static_graph": True}, 0, 1024, PARAMS),
}


@pytest.mark.parametrize("case", BUCKETS)
def test_ddp_holds_parameters_gradients_and_buckets(world, case):
    """4N each; gradients that are views of the buckets take nothing of their own.

    The loss, and the static graph's map of what was used, take 512 bytes each. A gradient is made
    before it is copied into its view; with a static graph all are, in the first step.
    """
    import torch

    options, copies, little, transient = BUCKETS[case]
    net = torch.nn.parallel.DistributedDataParallel(model(), **options)
    assert allocated() <= 2 * PARAMS + 512
    loss = torch.zeros((), device="cuda")
    for _ in range(3):
        net(loss).backward()
        assert 2 * PARAMS + copies <= allocated() <= 2 * PARAMS + copies + little
        net.zero_grad()
        assert 2 * PARAMS <= allocated() <= 2 * PARAMS + little
    top = peak() - 2 * PARAMS - copies
    assert transient <= top <= transient + 8 * 1024  # sums' scratch


def test_ddp_views_that_are_not_let_go_of_are_there_twice_when_buckets_are_built_anew(world):
    """It builds them in the order of the first backward pass, before the second forward pass."""
    import torch

    net = torch.nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True)
    loss = torch.zeros((), device="cuda")
    net(loss).backward()
    assert peak() < 2 * PARAMS + 4 * N + MIB
    net(loss).backward()
    assert 3 * PARAMS <= peak() < 3 * PARAMS + 4 * N + MIB


def test_ddp_with_unused_parameters_keeps_their_buckets(world):
    """Nobody uses it on any rank: it gets no gradient, but its bucket is there."""
    import torch

    net = torch.nn.parallel.DistributedDataParallel(model(unused=True), find_unused_parameters=True)
    loss = torch.zeros((), device="cuda")
    for _ in range(3):
        net(loss).backward()
    assert net.module[0].weight.grad is None
    held = 3 * PARAMS - 4 * N
    assert held <= allocated() <= held + 1024


def test_accumulating_without_synchronising_costs_ddp_views_their_gain(world):
    """Under no_sync() gradients are made apart, and copied into the buckets in the last step."""
    import torch

    net = torch.nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True)
    loss = torch.zeros((), device="cuda")
    held = []
    for last in (False, True):
        with nullcontext() if last else net.no_sync():
            net(loss).backward()
        held.append(allocated() - 512)
    assert held == [3 * PARAMS, 2 * PARAMS]
    assert peak() >= 3 * PARAMS


def test_ddp_over_a_part_of_the_world(world):
    """Its ranks agree on its buckets, also where this one is not the first of them."""
    import torch
    from torch import distributed

    group = distributed.new_group([world, world ^ 1])
    net = torch.nn.parallel.DistributedDataParallel(model(), process_group=group)
    for _ in range(2):
        net(torch.zeros((), device="cuda")).backward()
    assert allocated() == pytest.approx(3 * PARAMS, abs=1024)


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp_holds_its_share_and_gathers_a_layer_at_a_time(world, reshard):
    import torch
    from torch.distributed.fsdp import fully_shard

    net = model("meta")
    for part in net:
        fully_shard(part, reshard_after_forward=reshard)
    fully_shard(net)
    net.to_empty(device="cuda")
    assert allocated() == PARAMS // WORLD
    loss = net(torch.zeros((), device="cuda"))
    torch.cuda.synchronize()
    gathered = allocated() - PARAMS // WORLD
    if reshard:
        assert gathered <= 512  # the loss
        assert 4 * N <= peak() - PARAMS // WORLD <= 3 * 4 * N + MIB  # one and the next
    else:
        assert gathered == pytest.approx(PARAMS, abs=1024 * COUNT)
    loss.backward()
    for param in net.parameters():
        assert param.grad.to_local().nbytes == 4 * N // WORLD
    del loss
    assert allocated() == pytest.approx(2 * PARAMS // WORLD, abs=4 * 1024)


def test_fsdp_in_a_cuda_graph_has_one_peak_and_keeps_its_gradients(world):
    """As torchtitan captures them, after steps on a stream beside.

    PyTorch gives such a graph user objects (``cudaUserObjectCreate``).
    """
    import torch
    from torch.distributed.fsdp import fully_shard

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        pytest.skip("FSDP of older versions (2.11 is one) keeps what it gathered in a graph")
    device = virtual_device()
    device.values.compute("auto" if world else "off")
    shard = 2 * 4 * (2 * 1024 * 4096 + 2 * 1024) // WORLD

    def captured():
        net = torch.nn.Sequential(mlp(), mlp())
        for block in net:
            fully_shard(block)
        fully_shard(net)
        net.to_empty(device="cuda")
        x = torch.randn(4, 64, 1024, device="cuda")
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):
                net(x).sum().backward()
                net.zero_grad()
        torch.cuda.current_stream().wait_stream(beside)
        settle_all(1)
        torch.cuda.reset_peak_memory_stats()
        held, graph = allocated(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            net(x).sum().backward()
        top, kept = peak() - held, allocated() - held
        addresses = [param.grad.to_local().data_ptr() for param in net.parameters()]
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert allocated() - held == kept
        assert [param.grad.to_local().data_ptr() for param in net.parameters()] == addresses
        assert sum(param.grad.to_local().nbytes for param in net.parameters()) == shard
        assert shard <= kept <= shard + MIB
        return top, kept

    figures = []
    for _ in range(2):
        figures.append(captured())
        settle_all(1)
        assert allocated() == 0
    assert figures[0] == figures[1]
    assert figures[0][0] > 3 * 8 * 1024 * 4096  # a block gathered, the next, and a gradient
    assert device.trouble() is None


def test_fsdp_that_offloads_holds_nothing_between_steps(world):
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    net = model("meta")
    for part in net:
        fully_shard(part, offload_policy=CPUOffloadPolicy())
    fully_shard(net, offload_policy=CPUOffloadPolicy())
    net.to_empty(device="cpu")
    assert allocated() == 0
    net(torch.zeros((), device="cuda")).backward()
    assert all(param.grad.device.type == "cpu" for param in net.parameters())
    assert allocated() <= 4 * 1024


def test_fsdp_in_mixed_precision_gathers_half(world):
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    nets, gathered = [], []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        net = model("meta")[0]
        fully_shard(net, mp_policy=policy)
        net.to_empty(device="cuda")
        held = allocated()
        net(torch.zeros((), device="cuda"))
        gathered.append(allocated() - held)
        nets.append(net)
    assert gathered == pytest.approx([4 * N, 2 * N], abs=1024)


def mlp(device="meta"):
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(1024)
            self.up = nn.Linear(1024, 4096, bias=False)
            self.down = nn.Linear(4096, 1024, bias=False)

        def forward(self, x):
            return x + self.down(self.up(self.norm(x)).relu())

    with torch.device(device):
        return Block()


def parallel(block, mesh, *, sequence=False):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    if not sequence:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    else:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return parallelize_module(block, mesh, plan)


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_holds_its_share_of_the_weights(world, sequence):
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    block = parallel(mlp(), init_device_mesh("cuda", (WORLD,)), sequence=sequence)
    block.to_empty(device="cuda")
    weights = 2 * 4 * 1024 * 4096 // WORLD
    assert allocated() == weights + 2 * 4096  # and the norm's
    rows = 64 // WORLD if sequence else 64
    y = block(torch.randn(2, rows, 1024, device="cuda"))
    y.sum().backward()
    assert y.shape == (2, rows, 1024)
    assert block.up.weight.grad.to_local().shape == (4096 // WORLD, 1024)


def test_sharded_and_tensor_parallel_at_once(world):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tensor"))
    block = parallel(mlp(), mesh["tensor"])
    fully_shard(block, mesh=mesh["data"])
    block.to_empty(device="cuda")
    assert block.up.weight.to_local().numel() == 4096 * 1024 // 8
    block(torch.randn(2, 64, 1024, device="cuda")).sum().backward()
    assert block.up.weight.grad.to_local().numel() == 4096 * 1024 // 8


def test_a_context_parallel_rank_works_on_its_part_of_the_sequence(world):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    x = torch.randn(1, 8, 1024, 64, device="cuda", dtype=torch.bfloat16)
    mesh = init_device_mesh("cuda", (WORLD,))
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2], no_restore_buffers={x}):
        assert x.shape[2] == 1024 // WORLD
        q = torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)(x)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


def skip_where_stages_vote():
    """Skip the test with torch 2.13 and 2.14; newer and older versions have no vote."""
    from torch.distributed.pipelining import PipelineStage

    if hasattr(PipelineStage, "_warmup_forward_vote"):
        pytest.skip("this torch's stages vote on who tells them shapes: by values, which are zero")


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_a_pipeline_stage_is_told_its_shapes(world, schedule):
    """Other stages, which would tell them, are not there. 1F1B holds fewer micro-batches."""
    import torch

    skip_where_stages_vote()
    from torch.distributed import pipelining

    def sample(size, **options):
        return torch.empty(size, 16, 1024, device="cuda", **options)

    stage = pipelining.PipelineStage(
        mlp("cuda"),
        world,
        WORLD,
        torch.device("cuda"),
        input_args=(sample(1, requires_grad=world > 0),),
        output_args=(sample(1, requires_grad=True),),
    )
    run = getattr(pipelining, schedule)(
        stage, n_microbatches=16, loss_fn=torch.nn.functional.mse_loss
    )
    before = allocated()
    run.step(*([sample(16)] if world == 0 else []))
    assert peak() > before
    assert stage.submod.up.weight.grad is not None


def test_every_collective_leaves_memory_as_it_was(world):
    import torch
    from torch import distributed

    x = torch.ones(1 << 20, device="cuda")
    y = torch.empty(WORLD << 20, device="cuda")
    parts = list(y.chunk(WORLD))
    distributed.barrier()  # the group of torch 2.15 keeps the barrier's block
    before = allocated()
    distributed.all_reduce(x)
    distributed.broadcast(x, 0)
    distributed.reduce(x, 0)
    distributed.all_gather_into_tensor(y, x)
    distributed.reduce_scatter_tensor(x, y)
    distributed.all_to_all_single(y, y.clone())
    distributed.all_gather(parts, x)
    distributed.gather(x, parts if world == 0 else None)
    distributed.scatter(x, parts if world == 0 else None)
    distributed.isend(x, (world + 1) % WORLD).wait()
    distributed.irecv(x, (world - 1) % WORLD).wait()
    distributed.barrier()
    found = [None] * WORLD
    distributed.all_gather_object(found, {"rank": world})
    assert allocated() == before
    assert len(found) == WORLD


def reduced(size=4 * MIB):
    """Begin a collective of so many bytes, of which only its future is left."""
    import torch
    from torch import distributed

    tensor = torch.ones(size // 4, device="cuda")
    distributed.all_reduce(tensor, async_op=True).get_future().wait()


def passed(kernels=0):
    import torch

    x = torch.ones((), device="cuda", requires_grad=True)
    for _ in range(kernels):
        x = x * 1
    x.sum().backward()


def passed_in_checkpoints():
    """Run a backward pass that runs two more inside."""
    import torch
    from torch.utils.checkpoint import checkpoint

    x = torch.ones((), device="cuda", requires_grad=True)
    for _ in range(2):
        x = checkpoint(torch.sin, x, use_reentrant=True)
    x.backward()


def passed_with_gradients():
    """Run a pass that returns gradients, after which the meter runs one of its own."""
    import torch

    x = torch.ones((), device="cuda", requires_grad=True)
    with awaited_passes():
        torch.autograd.grad(x * 1, x)


STEPS = {
    "the host runs ahead: two steps": ([passed], [1, 2, 2]),
    "passes inside a pass": ([passed_in_checkpoints], [1, 2, 2]),
    "gradients that are returned": ([passed_with_gradients], [1, 2, 2]),
    "the host waits: one step": ([passed, "wait"], [1, 1, 1]),
    "more kernels than CUDA queues: one step": ([lambda: passed(1024)], [1, 1, 1]),
    "no backward pass: all": ([], [1, 2, 3]),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_collective_that_nothing_waits_for_keeps_its_tensors_into_the_next_step(world, name):
    """From torch 2.8 on, as PyTorch's own process group of NCCL; each one here is of 4 MiB."""
    import torch

    require_release(2, 8, "tensors of collectives that their Work keeps")
    passed()
    before, (actions, expected), held = allocated(), STEPS[name], []
    for _ in range(3):
        for action in actions:
            torch.cuda.synchronize() if action == "wait" else action()
        reduced()
        held.append((allocated() - before) // (4 * MIB))
    assert held == expected


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all"])
def test_a_collective_of_whole_tensors_keeps_them_too(world, name):
    import torch
    from torch import distributed

    require_release(2, 8, "tensors of collectives that their Work keeps")
    small, large = 4 * MIB // WORLD // 4, MIB
    sizes = (large, small) if name == "all_gather_into_tensor" else (small, large)
    sizes = (large, large) if name == "all_to_all" else sizes
    collective = getattr(distributed, name if name != "all_to_all" else "all_to_all_single")
    before = allocated()
    collective(*(torch.ones(size, device="cuda") for size in sizes), async_op=True)
    assert allocated() - before == 4 * sum(sizes)


@pytest.mark.parametrize("case", ["the host runs ahead", "the host waits", "many kernels"])
def test_a_program_without_a_backward_pass_keeps_what_the_host_is_ahead_by(world, case):
    import torch

    require_release(2, 8, "tensors of collectives that their Work keeps")
    held, number = [], torch.ones((), device="cuda")
    before = allocated()
    for _ in range(3):
        reduced()
        held.append((allocated() - before) // (4 * MIB))
        if case == "the host waits":
            torch.cuda.synchronize()
        for _ in range(1025 * (case == "many kernels")):
            number.add_(1)
    assert held == ([1, 2, 3] if case == "the host runs ahead" else [1, 1, 1])


def test_a_collective_that_is_waited_for_keeps_none_nor_does_a_graphs(world):
    import torch
    from torch import distributed

    require_release(2, 8, "tensors of collectives that their Work keeps")
    tensor = torch.ones(MIB, device="cuda")
    before = allocated()
    distributed.all_reduce(tensor.clone(), async_op=True).wait()
    distributed.all_reduce(tensor.clone())
    assert allocated() == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        distributed.all_reduce(tensor, async_op=True).get_future()
    del graph, tensor
    torch.cuda.empty_cache()
    assert allocated() == before - 4 * MIB


def test_they_are_no_leak(suite):
    session = suite.run(
        source="""
        @pytest.mark.gpu_memory(world_size=8, max_leak_mib=0)
        def test_it():
            import torch.distributed as dist
            dist.all_reduce(mib(4), async_op=True).get_future()
        """
    )
    assert session.outcomes == {"passed": 1}, session.out


STEPS_OF_A_RANK = """
@pytest.mark.gpu_memory(world_size=8, {mark})
def test_it():
    import torch.distributed as dist
    x = torch.ones((), device="cuda", requires_grad=True)
    held = mib(12)
    for _ in range(4):
        x.sin().backward()
        torch.cuda.synchronize()
        dist.all_reduce(mib({size}), async_op=True).{end}
    {last}
"""
STREAM = """
    x, stream = mib(30), torch.cuda.Stream()
    x.record_stream(stream)
    with torch.cuda.stream(stream):
        x.zero_()
    del x
    y = mib(30)
"""


def steps_of_a_rank(suite, *, mark="", size=4, end="get_future()", last="pass"):
    require_release(2, 8, "tensors of collectives that their Work keeps")
    source = STEPS_OF_A_RANK.format(mark=mark, size=size, end=end, last=last.strip())
    return suite.run("-vv", source=source)


@pytest.mark.parametrize(("size", "end"), [(4, "wait()"), (1 / 16, "get_future()")])
def test_no_note_tells_of_tensors_that_wait_frees_or_of_few_bytes(suite, size, end):
    session = steps_of_a_rank(suite, size=size, end=end)
    assert session.outcomes == {"passed": 1}, session.out
    assert "collectives" not in session.flat


@pytest.mark.parametrize("end", ["get_future()", "get_future().wait()"])
def test_a_note_tells_what_they_take_into_the_next_steps(suite, end):
    """Each step has the collectives' tensors of two; a GPU may have those of three."""
    session = steps_of_a_rank(suite, mark="max_allocated_gib=22 / 1024", end=end)
    assert session.outcomes == {"passed": 1}, session.out
    told = (
        "collectives kept tensors of 4.00 MiB until the collectives of the next step (a GPU may "
        "keep them longer if the step takes less than 0.1 s)"
    )
    assert session.flat.count(told) == 1, session.out
    assert "compared with limits" not in session.flat


@pytest.mark.parametrize(("limit", "outcome"), [(100, "passed"), (70, "failed")])
def test_limits_are_held_to_the_range_of_another_choice_beside_them(suite, limit, outcome):
    """A block of 30 MiB may be there twice."""
    session = steps_of_a_rank(suite, mark=f"max_reserved_gib={limit} / 1024", last=STREAM)
    assert session.outcomes == {outcome: 1}, session.out
    assert "collectives kept tensors" in session.flat
    assert "(record_stream)" in session.flat


def test_such_collectives_are_let_go_of_with_their_group():
    import torch
    from torch import distributed

    with virtual_card():
        wait = torch._C._distributed_c10d.Work.wait
        with joined(0, WORLD):
            distributed.all_reduce(torch.ones(MIB, device="cuda"), async_op=True).get_future()
        assert allocated() == 0
        assert torch._C._distributed_c10d.Work.wait is wait


def pipeline(rank, **metadata):
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda()
    stage = PipelineStage(network, rank, 4, torch.device("cuda"), **metadata)
    return Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)


def test_a_stage_of_a_pipeline_runs_alone_where_its_shapes_are_given():
    import torch

    skip_where_stages_vote()
    microbatch = torch.empty(8, 64, requires_grad=True, device="meta")
    with virtual_card(), joined(3, 4):
        metadata = {"input_args": (microbatch,), "output_args": (microbatch,)}
        losses = []
        pipeline(3, **metadata).step(target=torch.ones(32, 64, device="cuda"), losses=losses)
        assert len(losses) == 4


def test_a_rank_that_is_alone_receives_no_objects():
    """A stage of a pipeline without shapes asks the one before; PyTorch's error was EOFError."""
    import torch

    plain = torch.distributed.recv_object_list
    with virtual_card(), joined(1, 4):
        with pytest.raises(DeviceError, match="this rank runs alone; for a PipelineStage"):
            pipeline(1).step()
        with pytest.raises(DeviceError, match="this rank runs alone"):
            torch.distributed.distributed_c10d.recv_object_list([None], src=0)
    assert torch.distributed.recv_object_list is plain


def test_on_a_real_gpu_a_sum_over_ranks_is_the_rank_s_own_tensor():
    """DistributedDataParallel reads it from the future, which PyTorch's fake group leaves empty."""
    import torch
    from torch import distributed

    with virtual_card(), CudaDevice().join_alone(0, 2):
        tensor = torch.ones(8, device="cuda")
        future = distributed.all_reduce(tensor, async_op=True).get_future()
        (result,) = future.value()
        assert result.data_ptr() == tensor.data_ptr()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, device="cuda"))
        for _ in range(2):
            model(torch.ones(8, 64, device="cuda")).sum().backward()
        assert model.module.weight.grad is not None
        del tensor, future, result, model
