"""Random programs whose memory grows from step to step, each with one planted holder and line.

A program also has memory that does not grow: parameters, new views of them, buffers and caches that
are full, garbage in cycles, batches of any length. It is known what a report must name: the holder,
and the line that ends with the comment PLANTED; growth, lines and holders have the same bytes.
"""

from __future__ import annotations

import random
from typing import NamedTuple

HEAD = """\
import collections, contextvars, functools, threading, types, weakref
import pytest, torch
from torch import nn

HISTORY, CACHE = [], {}

def mib(n):
    return torch.empty(int(n * 2**20), dtype=torch.uint8, device="cuda")

class Trainer:
    seen = []
    def __init__(self):
        self.history, self.extra = [], {}
    def log(self, value):
        self.history.append(value)

class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, total, big):
        ctx.big = big
        return total + 1
    @staticmethod
    def backward(ctx, gradient):
        return gradient, None

LOCAL, VARIABLE = threading.local(), contextvars.ContextVar("VARIABLE")

class Node:
    __slots__ = ("data", "me", "before")
    def __init__(self, data, before=None):
        self.data, self.me, self.before = data, self, before

class Cycle:
    def __init__(self, data):
        self.data = data
        self.hook = lambda: self.data

def closure(big):
    return lambda: big

def batches(big):
    yield big
    yield big.nbytes

def fails(big):
    raise ValueError

@pytest.fixture(scope="module")
def wide():
    return Trainer()

@pytest.fixture
def box():
    return {"tensors": []}
"""
REMAINDERS = 3 << 20
PLANTED = "  # planted"
PLANTS = {
    "a local list": ("kept = []", "kept.append(BIG)", "local variable kept of"),
    "a local dict": ("kept = {}", "kept[step] = BIG", "local variable kept of"),
    "a nested list": (
        "kept = {'a': [[]]}",
        "kept['a'][0].append((step, BIG))",
        "local variable kept",
    ),
    "a deque": ("kept = collections.deque(maxlen=500)", "kept.append(BIG)", "local variable kept"),
    "a namespace": (
        "kept = types.SimpleNamespace()",
        "setattr(kept, f'a{step}', BIG)",
        "local variable kept",
    ),
    "a global list": ("", "HISTORY.append(BIG)", "global variable HISTORY of"),
    "a global dict": ("", "CACHE[len(CACHE)] = BIG", "global variable CACHE of"),
    "an attribute": ("trainer = Trainer()", "trainer.log(BIG)", "local variable trainer of"),
    "an attribute's dict": (
        "trainer = Trainer()",
        "trainer.extra[step] = BIG",
        "local variable trainer of",
    ),
    "a class attribute": ("", "Trainer.seen.append(BIG)", "class attribute seen of Trainer"),
    "a function's attribute": (
        "fails.seen = []",
        "fails.seen.append(BIG)",
        "global variable fails of",
    ),
    "a mutable default": (
        "def log(value, seen=[]): seen.append(value)",
        "log(BIG)",
        "local variable log of",
    ),
    "closures": ("hooks = []", "hooks.append(closure(BIG))", "local variable hooks of"),
    "default arguments": (
        "hooks = []",
        "hooks.append(lambda big=BIG: big)",
        "local variable hooks of",
    ),
    "partials": (
        "hooks = []",
        "hooks.append(functools.partial(print, BIG))",
        "local variable hooks",
    ),
    "bound methods": ("hooks = []", "hooks.append(BIG.sum)", "local variable hooks"),
    "generators": (
        "running = []",
        "running.append(batches(BIG)); next(running[-1])",
        "local variable running of",
    ),
    "exceptions": (
        "errors = []",
        "try: fails(BIG)\nexcept ValueError as error: errors.append(error)",
        "local variable errors of",
    ),
    "a cache of a function": (
        "table = functools.lru_cache(None)(lambda step: BIG)",
        "table(step)",
        "local variable table of",
    ),
    "cycles in a list": ("nodes = []", "nodes.append(Cycle(BIG))", "local variable nodes of"),
    "slots in cycles": ("nodes = []", "nodes.append(Node(BIG))", "local variable nodes of"),
    "a linked list": ("node = None", "node = Node(BIG, node)", "local variable node of"),
    "views": ("rows = []", "rows.append(BIG[:1])", "local variable rows of"),
    "views of views": (
        "rows = []",
        "rows.append(BIG.view(2, -1).t()[3:5].detach())",
        "local variable rows",
    ),
    "a tensor that grows": (
        "buffer = mib(1)",
        "buffer = torch.cat([buffer, BIG])",
        "local variable buffer of",
    ),
    "modules": (
        "stack = nn.ModuleList()",
        "stack.append(nn.Linear(512, 512 * SIZE, bias=False, device='cuda'))",
        "local variable stack of",
    ),
    "buffers of a module": (
        "net = nn.Module()",
        "net.register_buffer(f'b{step}', BIG)",
        "local variable net of",
    ),
    "parameters of an optimizer": (
        "opt = torch.optim.SGD([torch.zeros(1, device='cuda')])",
        "opt.add_param_group({'params': [BIG.float()[::4]]})",
        "local variable opt of",
    ),
    "a forward hook": (
        "net, store = nn.Identity(), []\nnet.register_forward_hook(lambda *_: store.append(BIG))",
        "net(fixed)",
        "local variable store of",
    ),
    "hooks of tensors": (
        "w = torch.zeros(8, device='cuda', requires_grad=True)",
        "w.register_hook(lambda grad, big=BIG: None)",
        "local variable w of",
    ),
    "a graph of a sum": (
        "w = torch.zeros(1 << 18, device='cuda', requires_grad=True)\ntotal = 0",
        "total = total + w.repeat(SIZE).exp().sum()",
        "local variable total of",
    ),
    "a graph of losses": (
        "w = torch.zeros(1 << 18, device='cuda', requires_grad=True)\nlosses = []",
        "losses.append((w * 2).repeat(SIZE).exp().sum())",
        "local variable losses of",
    ),
    "a hidden state": (
        "cell = nn.GRUCell(512, 512, device='cuda')\nh = torch.zeros(512, 512, device='cuda')",
        "h = cell(torch.empty(512, 512, device='cuda'), h)  # GROWS",
        "local variable h of",
    ),
    "retained gradients": (
        "w = torch.zeros(1 << 18, device='cuda', requires_grad=True)\nouts = []",
        "outs.append(w.repeat(SIZE)); outs[-1].retain_grad(); outs[-1].sum().backward()",
        "local variable outs of",
    ),
    "an object of autograd": (
        "total = torch.zeros(4, device='cuda', requires_grad=True)",
        "total = Keeps.apply(total, BIG)",
        "local variable total of",
    ),
    "a local of the thread": (
        "LOCAL.seen = []",
        "LOCAL.seen.append(BIG)",
        "global variable LOCAL of",
    ),
    "a variable of the context": (
        "VARIABLE.set([])",
        "VARIABLE.get().append(BIG)",
        "context variable VARIABLE",
    ),
    "finalizers": (
        "kept = []",
        "kept.append(Trainer()); weakref.finalize(kept[-1], print, BIG)",
        "class attribute _registry of finalize",
    ),
    "both a list and closures": (
        "kept, hooks = [], []",
        "kept.append(BIG); hooks.append(closure(kept[-1]))",
        "",
    ),
    "a wider fixture": ("", "wide.log(BIG)", "local variable wide of"),
    "a fixture": ("", "box['tensors'].append(BIG)", "local variable box of"),
}
"""by name: lines before the loop, lines of a step, and a prefix of the holder's name"""
BESIDES = (
    ("net0 = nn.Linear(1024, 1024, device='cuda')", "net0(torch.empty(64, 1024, device='cuda'))"),
    (
        "net1, rows1 = nn.Linear(512, 2048, device='cuda'), []",
        "rows1.append(net1.weight.detach()[0])",
    ),
    ("ring = []", "ring.append(mib(2)); del ring[:-2]"),
    ("few = {}", "few[step % 2] = few[step % 2] if step % 2 in few else mib(3)"),
    ("last = None", "before, last = last, mib(2)"),
    ("", "batch = mib(5); labels = mib(0.01)"),
    ("", "Cycle(mib(2))"),
    ("", "cycle = Node(mib(1)); del cycle"),
    ("once = []", "step == 1 and once.append(mib(6))"),
    ("big = mib(20)\nseen = []", "seen.append(big[step:])"),
    (
        "train = nn.Linear(256, 256, device='cuda')\nadam = torch.optim.Adam(train.parameters())",
        "train(torch.ones(8, 256, device='cuda')).sum().backward(); adam.step(); adam.zero_grad()",
    ),
)
"""memory that does not grow: lines before the loop, and lines of a step"""


class Program(NamedTuple):
    """A program, and what a report must name; a steady program has no plant."""

    source: str
    plant: str
    holder: str
    lines: tuple[int, ...]


def random_program(seed, *, steady=False):
    """Return the program with a seed."""
    chance = random.Random(seed)
    plant = "" if steady else [*PLANTS][seed % len(PLANTS)]
    *code, holder = PLANTS[plant] if plant else ("", "", "")
    size = chance.choice((1, 2, 3))
    big = f"torch.empty({size} << 20, dtype=torch.uint8, device='cuda')"
    words = {"BIG": chance.choice((big, f"{big}.clone()")), "SIZE": str(size)}
    blocks = [
        [_written(text, words) for text in code],
        *chance.sample(BESIDES, chance.randrange(4)),
    ]
    chance.shuffle(blocks)
    loop = [line for _, each in blocks for line in each.splitlines()]
    loop.insert(chance.choice((0, len(loop), len(loop))), "gpu_memory.step()")
    lines = [
        *(line for before, _ in blocks for line in before.splitlines()),
        f"for step in range({chance.choice((4, 5, 8, 9, 12, 20, 33))}):",
        *(f"    {line}" for line in loop),
    ]
    if chance.random() < 0.3:  # the loop is in a helper function
        lines = ["def train():", *(f"    {line}" for line in lines), "train()"]
    source = "\n".join(
        [
            HEAD,
            "@pytest.mark.gpu_memory(steady=True, baseline=False)",
            "def test_it(gpu_memory, wide, box):",
            "    fixed = torch.zeros(4, device='cuda')",
            *(f"    {line}" for line in lines),
        ]
    )
    planted = [at for at, line in enumerate(source.splitlines(), 1) if line.endswith(PLANTED)]
    return Program(source, plant, holder, tuple(planted))


MOVES = (
    (
        "for p in model.parameters():\n    adam.state[p].update(step=torch.zeros(()), **{"
        "name: torch.zeros_like(p) for name in ('exp_avg', 'exp_avg_sq')})"
    ),
    "for p in model.parameters():\n    p.data = p.detach().clone()",
    "for p in model.parameters():\n    p.grad = torch.zeros_like(p)",
)
"""edits by which another line allocates memory: as much as before, of the same category"""
WIDER = """\
@pytest.fixture(scope="session")
def table():
    return mib(TABLE)

@pytest.fixture(scope="{}")
def store(tmp_path_factory):
    return {}
"""
TRAINS = (
    "model(torch.ones(64, 1024, device='cuda')).square().mean().backward()\n"
    "adam.step(); adam.zero_grad()"
)


def edited_program(seed):
    """Return a program with two versions: with the variable NEW it has the planted growth.

    Fixtures of wider scope are set up before and during the test. Besides the growth there are
    tensors that one function (``mib``) makes for several callers, and memory that another line
    allocates in the new version.
    """
    chance = random.Random(seed)
    plant = [*PLANTS][seed % len(PLANTS)]
    before, step, holder = PLANTS[plant]
    size = chance.randrange(2, 30)
    helper = chance.random() < 0.5
    big = (
        f"mib({size})" if helper else f"torch.empty({size} << 20, dtype=torch.uint8, device='cuda')"
    )
    words = {"BIG": big, "SIZE": str(size)}
    passing = f"passing = mib({chance.randrange(1, 30)})"
    moves = chance.random() < 0.5
    trains = moves or chance.random() < 0.5
    midst = ["wider = request.getfixturevalue('table')"] * (chance.random() < 0.3)
    planted = ["if NEW:", *(f"    {line}" for line in _written(step, words).splitlines())]
    work = TRAINS.splitlines() if trains else ["model(torch.ones(64, 1024, device='cuda'))"]
    besides = [step for before, step in chance.sample(BESIDES[:6], 2) if not before]
    parts = [planted, work, midst + [passing] * (chance.random() < 0.6), besides]
    chance.shuffle(parts)
    lines = [
        "model = nn.Sequential(*(nn.Linear(1024, 1024, device='cuda') for _ in range(4)))",
        "adam = torch.optim.AdamW(model.parameters())",
        *_written(before, words).splitlines(),
    ]
    if moves:
        lines += ["if NEW:", *(f"    {line}" for line in chance.choice(MOVES).splitlines())]
    lines += [
        f"for step in range({chance.randrange(2, 7)}):",
        *(f"    {line}" for part in parts for line in part),
    ]
    if chance.random() < 0.7:
        lines += ["model(torch.ones(8, 1024, device='cuda'))"]
    scope = chance.choice(("session", "package", "module", "class", "function"))
    table, held = str(chance.randrange(1, 30)), chance.choice(("[]", f"[mib({size + 1})]"))
    source = "\n".join(
        [
            "import os",
            HEAD,
            'NEW = os.environ.get("NEW") == "1"',
            WIDER.format(scope, held).replace("TABLE", table),
            "@pytest.mark.gpu_memory",
            "def test_it(wide, box, store, request):",
            "    HISTORY.clear(), CACHE.clear(), Trainer.seen.clear()",
            "    fixed = torch.zeros(4, device='cuda')",
            *(f"    {line}" for line in lines),
        ]
    )
    ending = "def mib(" if helper and "mib" in _written(step + before, words) else PLANTED
    rows = source.splitlines()
    at = {number for number, line in enumerate(rows, 1) if line.endswith(PLANTED)}
    at |= {number + 1 for number, line in enumerate(rows, 1) if line.startswith(ending)}
    return Program(source, plant, holder, tuple(sorted(at)))


def wrong_cause(program, result):
    """Return what a result gets wrong about the growth and its keeper; "" if nothing."""
    verdict = result and result["verdict"]
    if not verdict or verdict["kind"] != "regressed" or not verdict["causes"]:
        return f"not seen: {verdict and verdict['headline']}"
    first = verdict["causes"][0]
    if not first["site"] or first["site"]["line"] not in program.lines:
        return f"wrong line: {verdict['headline']}"
    names = [keeper["text"] for keeper in first["keepers"]]
    if not names:
        return f"no keeper: {verdict['headline']}"
    if not all(program.holder in name for name in names):
        return f"{'second' if program.holder in names[0] else 'wrong'} keeper: {names}"
    return ""


def _written(text, words):
    """Replace the words in code, and append PLANTED to the line that allocates the growth."""
    lines = []
    for line in text.splitlines():
        code = line
        for word, meaning in words.items():
            code = code.replace(word, meaning)
        lines.append(f"{code}{PLANTED * (code != line or 'GROWS' in line)}")
    return "\n".join(lines)


def mistake(program, result):
    """Return what a result of the JSON report gets wrong; "" if nothing."""
    verdict, measurement = result["verdict"]["kind"], result["measurement"]
    stayed = measurement and measurement["stayed"]
    if not program.plant:
        return "" if verdict == "within" else f"{verdict}: {stayed}"
    if verdict != "leaked" or not stayed:
        return f"the verdict is {verdict}"
    holders, sites = stayed["holders"], stayed["sites"]
    told = [holder["text"] for holder in holders]
    if not told or not told[0].startswith(program.holder):
        return f"held by {told or 'nobody'}"
    if not sites or sites[0]["line"] not in program.lines:
        return f"line {sites[0]['line'] if sites else 'unknown'}"
    held = sum(holder["bytes"] for holder in holders)
    allocated = sum(site["bytes"] for site in sites)
    # A block may be larger than its request, by bytes that the allocator did not split off.
    if held != allocated or abs(held - stayed["bytes"]) > REMAINDERS:
        return f"{held} held, {allocated} allocated by lines, of {stayed['bytes']}"
    return ""
