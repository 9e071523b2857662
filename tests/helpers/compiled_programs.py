"""Small programs with torch.compile, and a record of what Dynamo compiles for each."""

import re
import sys
import traceback
from dataclasses import dataclass, field

import torch
import torch._dynamo
from torch import nn

WIDTH = 16


@dataclass
class Compiled:
    """What Dynamo compiled for a program: its backend records each graph, and runs it eagerly."""

    lowers: bool = False
    """whether graphs are lowered to ATen operators, as for Inductor: this is slow"""
    graphs: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    """keys of the lowered graphs in Inductor's cache"""
    guards: list[list[str]] = field(default_factory=list)
    error: str = ""

    def backend(self, graph, inputs):
        from torch._dynamo.backends.common import aot_autograd

        self.graphs.append(str(graph.graph))
        return aot_autograd(fw_compiler=self.note_key)(graph, inputs) if self.lowers else graph

    def note_key(self, graph, inputs):
        """Record a graph's key in Inductor's cache, and return the graph to run it eagerly."""
        from functorch.compile import make_boxed_func
        from torch._inductor.codecache import compiled_fx_graph_hash

        self.keys.append(compiled_fx_graph_hash(graph, inputs, {}, [])[0])
        return make_boxed_func(graph.forward)

    def note_guards(self, guards):
        """Record guards without object ids, which differ between processes."""
        names = (f"{guard.name} {getattr(guard, 'create_fn_name', str)()}" for guard in guards)
        self.guards.append(sorted(re.sub(r"___?\d+|\d{9,}\w*|_c\d+", "", name) for name in names))

    def compile(self, function):
        return torch._dynamo.optimize(self.backend, guard_export_fn=self.note_guards)(function)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.layers(x))


def communicate(tensor):
    """Run operators outside of compiled code, as a collective does."""
    sys.stderr.flush()
    tensor.mul_(1.0)
    tensor.sum().item()
    torch.empty_like(tensor).copy_(tensor)


def module(compiled, device):
    net = Net().to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    forward = compiled.compile(net)
    for rows in (4, 4, 8):
        forward(torch.randn(rows, WIDTH, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def module_with_hooks(compiled, device):
    net = Net().to(device)
    net.norm.register_forward_hook(lambda _module, _args, output: output * 2)
    net.layers.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    compiled.compile(net)(torch.randn(4, WIDTH, device=device)).sum().backward()


def module_compiled_in_place(compiled, device):
    net = Net().to(device)
    net._compiled_call_impl = compiled.compile(net._call_impl)
    for _ in range(2):
        net(torch.randn(4, WIDTH, device=device)).sum().backward()


def modules_inside_of_a_function(compiled, device):
    net = Net().to(device)

    @compiled.compile
    def step(x):
        y = net(x)
        sys.stderr.flush()  # a graph break: what follows runs eagerly
        y = y.relu() + torch.ones_like(y)
        if y.sum().item() > 1e9:
            return y
        return net(y) * float(y.detach().mean())

    step(torch.randn(4, WIDTH, device=device))
    step(torch.randn(6, WIDTH, device=device))


def whole_step(compiled, device):
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    @compiled.compile
    def step(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for rows in (4, 4, 6):
        float(step(torch.randn(rows, WIDTH, device=device)))


def optimizer_of_several_shapes(compiled, device):
    """A step that communicates, as nanochat's DistAdamW."""
    parameters = [nn.Parameter(torch.randn(n, WIDTH, device=device)) for n in (4, 8, 12, 4, 20)]

    @compiled.compile
    def step(parameter, state):
        half = parameter.grad.chunk(2)[0].contiguous()
        state.lerp_(half, 0.1)
        communicate(half)
        out = torch.empty_like(half)
        torch._foreach_add_([out], [half])
        sys.stderr.flush()
        parameter.data.chunk(2)[0].add_(state, alpha=-0.1)

    for parameter in parameters * 2:
        parameter.grad = torch.randn_like(parameter)
        step(parameter, torch.zeros_like(parameter.chunk(2)[0]))


def gradients_inside(compiled, device):
    weight = torch.randn(WIDTH, WIDTH, device=device, requires_grad=True)

    @compiled.compile
    def step(x):
        y = (x @ weight).tanh().sum()
        sys.stderr.flush()
        (gradient,) = torch.autograd.grad(y, [weight], retain_graph=True)
        with torch.no_grad():
            weight.sub_(gradient)
        torch.autograd.backward((x @ weight).sum())
        return gradient.mean()

    for _ in range(2):
        step(torch.randn(4, WIDTH, device=device))


def module_that_changes(compiled, device):
    class Late(nn.Module):
        def forward(self, x):
            if not hasattr(self, "late"):
                self.register_buffer("late", torch.ones(WIDTH, device=x.device))
                self.weight = nn.Parameter(torch.ones(WIDTH, device=x.device))
            return x * self.late + self.weight

    late, net = compiled.compile(Late()), Net().to(device)
    for _ in range(2):
        late(torch.randn(4, WIDTH, device=device))

    @compiled.compile
    def step(x):
        net.zero_grad()
        net.double().float()
        return net(x)

    step(torch.randn(4, WIDTH, device=device))


PROGRAMS = (
    *(module, module_with_hooks, module_compiled_in_place, modules_inside_of_a_function),
    *(whole_step, optimizer_of_several_shapes, gradients_inside, module_that_changes),
)


def compiled_frames():
    """The functions that Dynamo has compiled in this process, each with its file."""
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER

    return {(code.co_filename, code.co_name) for code in list(FRAME_COMPILE_COUNTER)}


def compiled_of(program, device, *, lowers=False):
    """Run a program; return what Dynamo compiled for it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = Compiled(lowers)
    try:
        program(compiled, device)
    except Exception:  # noqa: BLE001 - recorded
        compiled.error = traceback.format_exc()
    torch._dynamo.reset()
    return compiled
