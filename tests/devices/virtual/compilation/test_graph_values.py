"""Values of compiled code: its graph is computed on the host."""

import json

import pytest
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
        figures["notes"] = [note.text for note in values.notes(Path.cwd())]


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
    folder = tmp_path_factory.mktemp("inductor")
    code = """
    expected = train("cpu", False)
    answers = []
    for scope in ("off", "auto", "full"):
        torch.compiler.reset()
        run(scope, train, "cuda", True)
        answers.append(run(scope, train, "cuda", True))
    tell([expected, answers])
    """
    return folder, json.loads(child(HEAD + TRAINING + dedent(code), **folders(folder)))


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
        child(HEAD + TRAINING + dedent(code), **folders(folder))
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
    code = """
    import torch._dynamo.config

    answers = [route("cpu", False), list(sizes)]
    eager = run("auto", route, "cuda", False)
    answers += [eager["peak"]]
    for captures in (False, True):
        torch._dynamo.config.capture_dynamic_output_shape_ops = captures
        torch.compiler.reset()
        run("auto", route, "cuda", True)
        answers += [run("auto", route, "cuda", True), list(sizes)]
    tell(answers)
    """
    expected, chosen, peak, broken, broken_sizes, whole, _ = json.loads(
        child(HEAD + ROUTER + dedent(code), **folders(tmp_path))
    )
    assert len(set(chosen)) > 1  # routing is uneven
    assert broken_sizes == chosen
    assert broken["result"] == close_to(expected)
    assert broken["peak"] == peak
    assert whole["result"] == close_to(expected)
    assert broken["notes"] == whole["notes"] == []
