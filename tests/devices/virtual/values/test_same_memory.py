"""Steps of every kind take the same memory with and without values, and their values are right."""

import os
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.virtual_gpu import settle_all, virtual_card, virtual_device
from torch import nn
from torch.utils import checkpoint

from pytest_gpumem.devices.autograd_threads import await_autograd
from pytest_gpumem.devices.virtual.values.mode import ValueMode

WIDTH = 256
ROWS = 512
"""rows of WIDTH numbers: too many for "auto" to compute them, which computes what is small"""


def filled(*shape, seed=0):
    """Numbers of the host, which are copied to the device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def waited(result):
    """A result, once autograd's threads have let go of what led to it: peaks depend on when."""
    await_autograd()
    return result


def backward(loss):
    waited(loss.backward())


def network(device):
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    with torch.no_grad():
        for seed, parameter in enumerate(net.parameters()):
            parameter.copy_(filled(*parameter.shape, seed=seed))
    return net.to(device)


def trained(net, x, read=nn.Module.parameters):
    """The losses of two steps, and the sum of the first weight's gradient."""
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    results = []
    for _ in range(2):
        loss = net(x).square().mean()
        backward(loss)
        optimizer.step()
        results.append(loss.item())
        gradient = next(iter(read(net))).grad
        results.append(getattr(gradient, "_local_tensor", gradient).sum().item())
        optimizer.zero_grad()
    return results


def plain(device):
    return trained(network(device), filled(ROWS, WIDTH).to(device))


def cuda_graph(device):
    weight, x = filled(WIDTH, WIDTH).to(device), filled(ROWS, WIDTH, seed=1).to(device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        (x @ weight).tanh().sum()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # PyTorch takes streams of a pool of 32 in turn: another one may be the first one, or may not.
    with torch.cuda.graph(graph, stream=stream):
        result = (x @ weight).tanh().sum()
    results = []
    for _ in range(2):
        graph.replay()
        results.append(result.item())
        x.mul_(2)
    return results


class Quantised(torch.Tensor):
    """Codes of one byte and a scale for each row, as torchao's tensors are made."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device
        )

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def quantise(cls, x):
        scale = x.abs().amax(1, keepdim=True) / 127
        return cls((x / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        plain = [x.codes * x.scale if isinstance(x, cls) else x for x in args]
        return func(*plain, **(kwargs or {}))


def quantised(device):
    weight = Quantised.quantise(filled(WIDTH, WIDTH).to(device))
    x = filled(ROWS, WIDTH, seed=1).to(device).requires_grad_()
    loss = torch.mm(x, weight).square().mean()
    backward(loss)
    return [loss.item(), x.grad.abs().sum().item(), weight.codes[0, :8].sum().item()]


def distributed_tensors(device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    x = distribute_tensor(filled(ROWS, WIDTH).to(device), mesh, [Shard(0)])
    weight = distribute_tensor(filled(WIDTH, WIDTH, seed=1).to(device), mesh, [Replicate()])
    weight.requires_grad_()
    loss = (x @ weight).tanh().square().mean()
    backward(loss)
    return [loss.full_tensor().item(), weight.grad.full_tensor().abs().sum().item()]


def distributed_data_parallel(device):
    net = nn.parallel.DistributedDataParallel(network(device))
    return trained(net, filled(ROWS, WIDTH).to(device))


def fully_sharded(device):
    from torch.distributed.fsdp import fully_shard

    net = network(device)
    fully_shard(net[0])
    fully_shard(net)
    return trained(net, filled(ROWS, WIDTH).to(device))


def fully_sharded_from_meta(device):
    """Parameters that are made on the meta device, and drawn once they are sharded."""
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    net.to_empty(device=device)
    for layer in net:
        layer.reset_parameters()
    weight = net[0].weight
    alike = [torch.rand_like(weight), torch.zeros_like(weight), weight.detach().clone()]
    trained(net, filled(ROWS, WIDTH).to(device))
    return [bool((alike[0].to_local() < 1).all()), alike[1].to_local()[0].sum().item()]


def checkpointed(device, *, use_reentrant):
    net = network(device)
    x = filled(ROWS, WIDTH).to(device).requires_grad_()
    for _ in range(2):
        loss = checkpoint.checkpoint(net, x, use_reentrant=use_reentrant).square().mean()
        backward(loss)
    return [loss.item(), x.grad.abs().sum().item(), net[0].weight.grad.abs().sum().item()]


def functional_gradients(device):
    net = network(device)
    x = filled(ROWS, WIDTH).to(device)

    def loss(parameters, x):
        return torch.func.functional_call(net, parameters, (x,)).square().mean()

    parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}
    gradients = waited(torch.func.grad(loss)(parameters, x))
    value, tangent = torch.func.jvp(lambda x: loss(parameters, x), (x,), (torch.ones_like(x),))
    rows = waited(torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x[:8]))
    return [
        value.item(),
        tangent.item(),
        *(gradient.abs().sum().item() for gradient in gradients.values()),
        *(gradient.abs().sum().item() for gradient in rows.values()),
    ]


def with_anomalies_detected(device):
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        return plain(device)


def stopped_early(device):
    """Small enough for "auto" to compute it; the rate is such that the loss rises after a while."""
    weight = torch.nn.Parameter(filled(8, 8).to(device))
    x = filled(16, 8, seed=1).to(device)
    optimizer = torch.optim.SGD([weight], lr=0.005, momentum=0.9)
    best, results = float("inf"), []
    for _ in range(60):
        loss = (x @ weight - 1).square().sum()
        if loss.item() > best:
            break
        best = loss.item()
        results.append(best)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
    return [len(results), *results]


def distributed_tensors_on_host(device):
    """The same with plain tensors."""
    x, weight = filled(ROWS, WIDTH).to(device), filled(WIDTH, WIDTH, seed=1).to(device)
    loss = (x @ weight.requires_grad_()).tanh().square().mean()
    backward(loss)
    return [loss.item(), weight.grad.abs().sum().item()]


STEPS = {
    "plain": plain,
    "graph": cuda_graph,
    "quantised": quantised,
    "DTensor": distributed_tensors,
    "DDP": distributed_data_parallel,
    "FSDP2": fully_sharded,
    "FSDP2 of meta": fully_sharded_from_meta,
    "checkpoint": partial(checkpointed, use_reentrant=False),
    "reentrant checkpoint": partial(checkpointed, use_reentrant=True),
    "torch.func": functional_gradients,
    "anomaly": with_anomalies_detected,
    "early stop": stopped_early,
}
ON_HOST = {"DTensor": distributed_tensors_on_host, "DDP": plain, "FSDP2": plain}
ON_HOST["FSDP2 of meta"] = lambda _device: [True, 0]
"""The steps that need a group of ranks, and what they compute where there is one rank"""


@contextmanager
def group(name, size):
    with virtual_device().join_alone(0, size) if name in ON_HOST else nullcontext():
        yield


def measured(step):
    """Return peaks, and what the step returned."""
    settle_all(1)
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    results = step("cuda")
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return [stats[f"{name}.all.peak"] for name in PEAKS], results


PEAKS = ("allocated_bytes", "reserved_bytes", "segment", "allocation", "active_bytes")


@pytest.fixture(scope="module")
def device():
    with virtual_card() as device:
        yield device


@pytest.mark.parametrize("name", STEPS)
def test_memory_is_the_same_with_values_and_they_are_the_cpus(device, name):
    step = STEPS[name]
    peaks, notes = {}, {}
    with group(name, 4):
        step("cuda")  # torch.func.jvp's first call keeps a tensor for longer, on Python 3.13
        peaks["off"], _ = measured(step)
        for scope in ("auto", "full"):
            with ValueMode(device.library, scope) as mode:
                peaks[scope], results = measured(step)
            notes[scope] = mode.notes()
    assert peaks["auto"] == peaks["full"] == peaks["off"]
    if name == "graph":
        assert "its replays compute no values" in notes["full"][0]
        return
    if name in ON_HOST:  # ranks that are not there have no values
        with group(name, 1), ValueMode(device.library, "full") as mode:
            results = step("cuda")
        notes["full"] = mode.notes()
    assert notes == {"auto": [], "full": []}
    assert results == pytest.approx(ON_HOST.get(name, step)("cpu"), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("test", ["first", "second"])
def test_triton_finds_the_driver_in_each_test_of_a_file(device, test):
    """torch 2.14 multiplies by a kernel of Triton's where it can (``torch._native``)."""
    assert (Path(os.environ["TRITON_LIBCUDA_PATH"]) / "libcuda.so.1").exists(), test


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX", "AVG"])
def test_what_the_only_rank_gives_is_every_reductions_result(device, op):
    from torch import distributed

    operation = getattr(distributed.ReduceOp, op)
    with group("DDP", 1), ValueMode(device.library, "full"):
        x, y = torch.arange(4.0).cuda() / 3, torch.zeros(4, device="cuda")
        expected = x.tolist()
        distributed.reduce_scatter_tensor(y, x, op=operation)
        distributed.all_reduce(x, op=operation)
        assert [x.tolist(), y.tolist()] == [expected, expected]


def test_the_allocators_history_is_the_same_line_by_line(device):
    events = {}
    for scope in (None, "auto", "full"):
        settle_all(1)
        with ValueMode(device.library, scope) if scope else nullcontext():
            torch.cuda.memory._record_memory_history(stacks="python")
            try:
                plain("cuda")
                trace = torch.cuda.memory._snapshot()["device_traces"][0]
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)
        events[scope] = [
            (event["action"], event["size"], lines_of_this_file(event)) for event in trace
        ]
    assert len(events[None]) > 50
    assert any(lines for _, _, lines in events[None])
    assert events["auto"] == events["full"] == events[None]


def lines_of_this_file(event):
    frames = event.get("frames", ())
    return [frame["line"] for frame in frames if frame["filename"] == __file__]


def test_a_loop_that_stops_early_is_computed_by_auto(device):
    with ValueMode(device.library, "auto"):
        results = stopped_early("cuda")
    assert results == pytest.approx(stopped_early("cpu"), rel=1e-4)
    assert 2 < results[0] < 60


@pytest.mark.parametrize("scope", ["auto", "full"])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors_have_their_size_and_no_values_of_earlier_tensors(device, scope):
    places, numbers = torch.tensor([[0, 1, 1, 3], [2, 0, 0, 1]]), torch.ones(4, 300)
    with ValueMode(device.library, scope) as mode:
        for indices, size in ((places, (4, 3)), (places[:1], (4,)), (places[:, :1], (4, 3))):
            count = indices.shape[1]
            earlier = [torch.full((count, 300), 77.0, device="cuda") for _ in range(4)]
            del earlier
            sparse = torch.sparse_coo_tensor(indices.cuda(), numbers[:count].cuda(), (*size, 300))
            assert sparse._indices().tolist() == indices.tolist()
            coalesced = sparse.coalesce()
            assert coalesced._nnz() == min(count, 3)
            assert coalesced.values().shape == (min(count, 3), 300)
            assert (coalesced.values() != 77).all()
            assert sparse.to_dense().shape == (*size, 300)
            assert sparse.cpu()._nnz() == count
        assert mode.host.unknown.failures == {}


@pytest.mark.parametrize("scope", ["auto", "full"])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_tensor_that_is_changed_in_place_has_not_its_old_values(device, scope):
    with ValueMode(device.library, scope):
        indices, numbers = torch.tensor([[0, 1, 2]]).cuda(), torch.tensor([71.0, 72.0, 73.0]).cuda()
        sparse = torch.sparse_coo_tensor(indices, numbers, (4,))
        assert sparse._values().tolist() == [71.0, 72.0, 73.0]
        sparse.mul_(2)
        assert not set(sparse._values().tolist()) & {71.0, 72.0, 73.0}
