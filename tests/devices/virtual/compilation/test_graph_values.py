"""Values of compiled code: its graph is computed on the host."""

import json

import pytest
from helpers.left_out import need_triton
from helpers.virtual_gpu import child

HEAD = """
import json, os, sys, warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from pytest_gpumem.devices.virtual.device import VirtualDevice

warnings.simplefilter("ignore")


@contextmanager
def computing(scope, figures):
    values = VirtualDevice.loaded().values
    with values.running():
        values.compute(scope)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        figures["peak"] = torch.cuda.max_memory_allocated() - before
        figures["notes"] = values.notes(Path.cwd())


def run(scope, function, *args):
    figures = {}
    with computing(scope, figures):
        figures["result"] = function(*args)
    return figures


def tell(value):
    os.write(1, json.dumps(value).encode())
"""

TRAINING = """
def train(device, compiles):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    batch = torch.linspace(-1, 1, 12 * 16).reshape(12, 16).to(device)
    labels = torch.arange(12, device=device) % 8
    compiled = torch.compile(net) if compiles else net
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(compiled(batch), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, *[parameter.flatten()[:4].tolist() for parameter in net.parameters()]]
"""


def folders(path):
    """Caches of Inductor's in a folder."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def close_to(expected):
    """Nested lists of numbers, approximately."""
    return [pytest.approx(row, rel=1e-4, abs=1e-6) for row in expected]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder with what an earlier process has compiled of TRAINING, and that process's answers.

    It compiled with no values first.
    """
    need_triton()
    folder = tmp_path_factory.mktemp("inductor")
    code = """
    import torch._functorch.config

    torch._functorch.config.enable_autograd_cache = True  # PyTorch 2.6 has it disabled
    expected = train("cpu", False)
    answers = []
    for scope in ("off", "auto", "full"):
        torch.compiler.reset()
        run(scope, train, "cuda", True)
        answers.append(run(scope, train, "cuda", True))
    tell([expected, answers])
    """
    return folder, json.loads(child(HEAD + TRAINING + dedent(code), warm=True, **folders(folder)))


def dedent(code):
    import textwrap

    return textwrap.dedent(code)


def test_losses_and_weights_are_the_hosts(cache):
    _, (expected, (_, auto, full)) = cache
    for answer in (auto, full):
        assert answer["result"] == close_to(expected)
        assert answer["notes"] == []


def test_the_peak_is_the_same_with_values_and_without(cache):
    _, (_, answers) = cache
    assert len({answer["peak"] for answer in answers}) == 1


def test_code_from_either_of_inductors_caches_is_computed(cache):
    folder, (expected, _) = cache
    code = """
    from torch._dynamo.utils import counters
    import torch._functorch.config

    answers = []
    for whole in (True, False):
        torch.compiler.reset()
        counters.clear()
        torch._functorch.config.enable_autograd_cache = whole
        answers.append(run("auto", train, "cuda", True)["result"])
        answers.append([counters["aot_autograd"]["autograd_cache_hit"],
                        counters["inductor"]["fxgraph_cache_hit"]])
    tell(answers)
    """
    first, hits, second, other_hits = json.loads(
        child(HEAD + TRAINING + dedent(code), warm=True, **folders(folder))
    )
    assert hits[0] > 0  # of the whole function: Inductor is given no graph
    assert other_hits[0] == 0
    assert other_hits[1] > 0
    assert first == close_to(expected)
    assert second == close_to(expected)


ROUTER = """
sizes = []


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, tokens):
        weights, chosen = self.gate(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            if not torch.compiler.is_compiling():
                sizes.append(token.shape[0])
            part = expert(tokens[token]) * weights[token, place, None]
            out = out.index_add(0, token, part)
        return out


def route(device, compiles):
    sizes.clear()
    torch.manual_seed(0)
    net = Router().to(device)
    tokens = torch.linspace(-2, 2, 64 * 8).sin().mul(3).reshape(64, 8).to(device)
    step = torch.compile(net) if compiles else net
    loss = step(tokens).pow(2).mean()
    loss.backward()
    gradients = [parameter.grad.flatten()[:3].tolist() for parameter in net.parameters()]
    return [[loss.item()], *gradients]
"""


def test_a_compiled_router_routes_as_an_eager_one(tmp_path):
    """Its graph breaks where sizes depend on values, or the code reads these sizes itself."""
    need_triton()
    code = """
    import torch._dynamo.config

    answers = [route("cpu", False), list(sizes)]
    run("auto", route, "cuda", False)  # PyTorch before 2.15 keeps cuBLAS' workspaces
    eager = run("auto", route, "cuda", False)
    answers += [eager["peak"]]
    # Inductor of 2.6 compiles no such graph right: on the CPU the kernels read out of bounds.
    for captures in (False, torch.__version__ >= "2.7"):
        torch._dynamo.config.capture_dynamic_output_shape_ops = captures
        torch.compiler.reset()
        run("auto", route, "cuda", True)
        answers += [run("auto", route, "cuda", True), list(sizes)]
    tell(answers)
    """
    expected, chosen, peak, broken, broken_sizes, whole, _ = json.loads(
        child(HEAD + ROUTER + dedent(code), warm=True, **folders(tmp_path))
    )
    assert len(set(chosen)) > 1  # routing is uneven
    assert broken_sizes == chosen
    assert broken["result"] == close_to(expected)
    assert broken["peak"] == peak
    assert whole["result"] == close_to(expected)
    assert broken["notes"] == whole["notes"] == []


READS = """
import torch._dynamo.config

torch._dynamo.config.capture_scalar_outputs = True


def sized(x):
    total, greatest = x.sum().item(), x.max().item()
    torch._check(total >= 0)
    torch._check(greatest >= 0)
    ones = torch.ones(1, device="cuda")
    return torch.zeros(total, device="cuda") + ones, torch.zeros(greatest, device="cuda") + ones


def reads():
    first, second = torch.compile(sized)(torch.arange(5, device="cuda"))
    return [first.shape[0], second.shape[0], first.sum().item(), second.sum().item()]


def sums():
    function = torch.compile(lambda x: (x * x).sum(), dynamic=True)
    return [function(torch.arange(float(n), device="cuda")).item() for n in (3, 5)]


def changes():
    total = torch.zeros(3, device="cuda")
    add = torch.compile(lambda x: total.add_(x).sum())
    one = torch.ones(3, device="cuda")
    return [add(one).item(), add(one).item(), *total.tolist()]


def copies():
    host, total = torch.compile(lambda x: ((x + 1).cpu(), x.sum()))(torch.arange(3, device="cuda"))
    return [*host.tolist(), total.item()]


def drops():
    torch.manual_seed(0)
    ones = torch.ones(64, 64, device="cuda", requires_grad=True)
    dropped = torch.compile(lambda x: nn.functional.dropout(x, 0.5))(ones)
    dropped.sum().backward()
    return [dropped.mean().item(), (ones.grad == dropped).all().item()]


def graphs():
    total = torch.compile(lambda x: (x * 2).sum(), mode="reduce-overhead")
    x = torch.arange(4.0, device="cuda")
    return [total(x).item() for _ in range(4)]
"""


def test_tensors_that_code_makes_of_numbers_are_known(tmp_path):
    """Its cache keeps them; code that was compiled without values gets them as it is loaded."""
    need_triton()
    code = """
    import torch._functorch.config

    torch._functorch.config.enable_autograd_cache = False


    def lengths(x):
        return torch.tensor([3, 5], device="cuda"), x + 1


    def step():
        torch.compiler.reset()
        starts, rest = torch.compile(lengths)(torch.ones(8, device="cuda"))
        return starts.tolist()


    tell([run(scope, step)["result"] for scope in ("off", "auto", "auto")])
    """
    answers = json.loads(child(HEAD + dedent(code), warm=True, **folders(tmp_path)))
    assert answers == [[0, 0], [3, 5], [3, 5]]
    code = code.replace('("off", "auto", "auto")', '("auto",)')
    assert json.loads(child(HEAD + dedent(code), warm=True, **folders(tmp_path))) == [[3, 5]]


def test_code_that_reads_numbers_back_changes_its_inputs_or_draws_random_numbers(tmp_path):
    need_triton()
    code = "tell([run('auto', f) for f in (reads, sums, changes, copies, drops, graphs)])"
    answers = json.loads(child(HEAD + READS + code, warm=True, **folders(tmp_path)))
    assert [answer["notes"] for answer in answers] == [[]] * len(answers)
    reads, sums, changes, copies, (mean, is_mask), graphs = (answer["result"] for answer in answers)
    assert reads == [10, 4, 10.0, 4.0]
    assert sums == [5.0, 30.0]
    assert changes == [3.0, 6.0, 2.0, 2.0, 2.0]
    assert copies == [1, 2, 3, 3]
    assert 0.9 < mean < 1.1
    assert is_mask  # the backward pass has the forward pass's
    assert graphs == [12.0] * 4


DESCENT = """
def losses_of(net, function, batch):
    losses = []
    for _ in range(2):
        loss = function(batch)
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= parameter.grad
        losses.append(loss.item())
    return losses
"""

ATTENTION = """
def attended(x):
    query = x.view(2, -1, 4, 16).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)


def train(device, dynamic=None):
    torch.manual_seed(0)
    layer = nn.Linear(64, 64).to(device)
    batch = torch.linspace(-1, 1, 2 * 8 * 64).reshape(2, 8, 64).to(device)

    def step(batch):  # the heads are joined: attention's results lie as the query does
        return layer(attended(layer(batch)).transpose(1, 2).view(2, 8, 64)).square().mean()

    function = step if device == "cpu" else torch.compile(step, dynamic=dynamic)
    return losses_of(layer, function, batch)


def by_strides(dynamic):
    def function(x):
        return attended(x).as_strided((6,), (64,)).sum()

    x = torch.linspace(-1, 1, 2 * 8 * 64, device="cuda").reshape(2, 8, 64)
    return [torch.compile(function, dynamic=dynamic)(x).item(), function(x).item()]
"""


def test_what_attention_returns_lies_as_on_a_gpu(tmp_path):
    need_triton()
    code = """
    losses = [run("full", train, "cuda", dynamic) for dynamic in (False, True)]
    torch.compiler.reset()
    by_strides = [run("full", by_strides, dynamic) for dynamic in (False, True)]
    tell([train("cpu"), losses, by_strides])
    """
    program = HEAD + DESCENT + ATTENTION + dedent(code)
    answers = json.loads(child(program, warm=True, **folders(tmp_path)))
    expected, losses, (by_strides, by_unknown_strides) = answers
    for answer in (*losses, by_strides):
        assert answer["notes"] == []
    assert [answer["result"] for answer in losses] == [pytest.approx(expected, rel=1e-3)] * 2
    compiled, eager = by_strides["result"]
    assert compiled == pytest.approx(eager, rel=1e-4)
    assert by_unknown_strides["notes"][-1].endswith(": as_strided")


CONVOLUTIONS = """
def train(device):
    torch.manual_seed(0)
    layers = [nn.Conv2d(128, 128, 3) for _ in range(2)]
    net = nn.Sequential(layers[0], nn.ReLU(), layers[1]).to(device)
    batch = torch.linspace(-1, 1, 2 * 128 * 8 * 8).reshape(2, 128, 8, 8).to(device)
    function = net if device == "cpu" else torch.compile(net)
    return losses_of(net, lambda batch: function(batch).square().mean(), batch)
"""


def test_weights_that_inductor_lays_out_anew_are_known_in_the_backward_pass(tmp_path):
    need_triton()
    code = 'tell([train("cpu"), run("full", train, "cuda")])'
    program = HEAD + DESCENT + CONVOLUTIONS + code
    expected, answer = json.loads(child(program, warm=True, **folders(tmp_path)))
    assert answer["notes"] == []
    assert answer["result"] == pytest.approx(expected, rel=1e-4)


def test_what_the_host_has_no_room_to_compute_is_not_tried(tmp_path):
    need_triton()
    code = """
    from pytest_gpumem.devices.virtual.values import budget

    budget.available_memory = lambda: 300 << 20

    def function(x):
        return torch.mm(x, x.mT).mean()  # 256 MiB, and a copy of them

    tell(run("full", lambda: torch.compile(function)(torch.ones(8192, 1, device="cuda")).item()))
    """
    answer = json.loads(child(HEAD + dedent(code), warm=True, **folders(tmp_path)))
    assert "256.00 MiB of values did not fit into the host's free memory" in str(answer["notes"])


UNKNOWN = """
import triton
import triton.language as tl


@triton.jit
def add_one(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


def launched(x):
    y = torch.empty_like(x)
    add_one[(1,)](x, y, 8, BLOCK=8)
    return y


def branched(x):
    return torch.cond(x.sum() > 1, lambda x: x * 2, lambda x: x - 1, (x,))


def attention(x):
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(*[x.repeat(2).expand(1, 1, 128, 16).contiguous()] * 3)


def decides(function, compiles=True):
    x, other = torch.arange(8.0, device="cuda"), torch.ones(3, device="cuda")
    result = (torch.compile(function) if compiles else function)(x)
    bool(result.sum() > 3)
    return other.sum().item()


def launches():
    return decides(launched, compiles=False)
"""


def test_what_cannot_be_computed_is_named_and_leaves_other_values_known(tmp_path):
    need_triton()
    code = """
    answers = [run("auto", decides, each) for each in (branched, launched, attention)]
    tell([*answers, run("auto", launches)])
    """
    path = tmp_path / "program.py"  # Triton reads a kernel's source
    path.write_text(HEAD + UNKNOWN + dedent(code))
    answers = json.loads(
        child(
            f"import runpy; runpy.run_path({str(path)!r})", warm=True, **folders(tmp_path / "cache")
        )
    )
    assert [answer["result"] for answer in answers] == [3.0] * 4
    assert [answer["notes"][0].partition(" (")[0] for answer in answers] == [
        "1 value was assumed"
    ] * 4
    named = [answer["notes"][1].rpartition(": ")[2] for answer in answers]
    assert named == ["cond", "the Triton kernel add_one", "flex_attention", "add_one"]
    assert answers[3]["notes"][1].startswith("the virtual GPU does not run kernels of Triton")


def test_a_kernel_that_an_operator_launches_writes_what_the_operator_writes(tmp_path):
    """What it reads stays known. So PyTorch's own bmm of columns and rows (torch._native)."""
    need_triton()
    code = """
    @torch.library.custom_op("gpumem_test::plus_one", mutates_args=())
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        return launched(x)


    def step():
        x = torch.arange(8.0, device="cuda")
        result = plus_one(x)
        products = torch.bmm(x.view(2, 4, 1), x.view(2, 1, 4))
        bool(result.sum() > 3)
        return x.sum().item(), products.sum().item()


    tell(run("auto", step))
    """
    path = tmp_path / "program.py"  # Triton reads a kernel's source
    path.write_text(HEAD + UNKNOWN + dedent(code))
    answer = json.loads(
        child(
            f"import runpy; runpy.run_path({str(path)!r})", warm=True, **folders(tmp_path / "cache")
        )
    )
    assert answer["result"] == [28.0, 6.0**2 + 22.0**2]
    assert answer["notes"][0].startswith("1 value was assumed")


def test_a_large_step_is_not_computed(tmp_path):
    """By its cost: none of its matrices is kept, and after so many none is."""
    need_triton()
    code = """
    from pytest_gpumem.devices.virtual.compilation import graph_values

    computed = []

    def counting(self, node, traits, args, kwargs, _own=graph_values._Computation._computed):
        computed.append(traits.name)
        return _own(self, node, traits, args, kwargs)

    graph_values._Computation._computed = counting

    def step():
        net = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(3)]).cuda()
        compiled = torch.compile(net)
        batch = torch.ones(4096, 4096, device="cuda")
        for _ in range(3):
            compiled(batch).sum().backward()
        del computed[:-1]
        compiled(batch)
        return len(computed)

    tell(run("auto", step))
    """
    answer = json.loads(child(HEAD + dedent(code), warm=True, **folders(tmp_path)))
    assert answer["result"] <= 1
