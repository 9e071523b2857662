"""Programs with one planted leak or growth each, whose holder is known by construction.

The shapes come from public bug reports, and reports of this package once named their holders wrong:
objects of fixtures, modules in modules, two keepers of the same memory, containers in containers,
cycles, checkpoints beside the model that loaded them, an edit of a line that does not allocate. A
program leaks (``max_leak_mib``), grows from step to step (``steady``), has a higher peak than its
baseline, grows only by garbage, which is no failure, or was edited since its baseline.
"""

from __future__ import annotations

import random
import re
from typing import NamedTuple

HEAD = """\
import collections, io, os, types
import pytest, torch
from torch import nn

NEW = os.environ.get("NEW") == "1"
STORE = []

def mib(n):
    return torch.empty(int(n * 2**20), dtype=torch.uint8, device="cuda")

class Net(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.a, self.inner, self.outs = nn.Linear(8, 8), nn.ModuleList(inner), []
    def forward(self, x):
        return self.a(x)

class Trainer:
    def __init__(self, model=None):
        self.model, self.log, self.extra = model, [], {}

class Registry:
    def __init__(self):
        self.models, self.optimizers, self.names = [], [], []

class Wrapped:
    def __init__(self, optimizer):
        self.optimizer, self.calls = optimizer, 0

class Cycle:
    def __init__(self, data, parent=None):
        self.data, self.me, self.parent = data, self, parent
        self.hook = lambda: self.data

@pytest.fixture(scope="SCOPE")
def made():
    RETURNS FIXTURE
"""
LEAK, GROWTH, PEAK, GARBAGE, EDIT = "leak", "growth", "peak", "garbage", "edit"
TRAINS = "net(torch.ones(8, 1024, device='cuda')).sum().backward(); opt.step(); opt.zero_grad()"
SHAPES = {
    "attribute of a fixture's module": (
        "nn.Sequential(nn.Linear(8, 8), Net()).cuda()",
        "",
        ("made[0].saved = [*getattr(made[0], 'saved', ()), BIG]",),
        r"(fixture|local variable) made\b.*attribute saved of Linear",
        (LEAK, GROWTH),
    ),
    "attribute of a module in a fixture's": (
        "Net(Net(), Net(Net())).cuda()",
        "",
        ("made.inner[1].outs.append(BIG)",),
        r"(fixture|local variable) made\b.*attribute outs of Net",
        (LEAK, GROWTH),
    ),
    "a fixture's trainer": (
        "Trainer(Net())",
        "",
        (
            "made.log.append(BIG)",
            "made.extra[step] = {'loss': [BIG]}",
            "made.model.outs.append(BIG)",
        ),
        r"(fixture|local variable) made\b",
        (LEAK, GROWTH, PEAK),
    ),
    "a fixture's list": (
        "[]",
        "",
        ("made.append(BIG)", "made.append([BIG])", "made.append({step: (BIG, 1)})"),
        r"(fixture|local variable) made\b",
        (LEAK, GROWTH, PEAK),
    ),
    "a fixture's module in a trainer": (
        "Net(Net())",
        "trainer = Trainer(made)",
        ("trainer.model.inner[0].outs.append(BIG)",),
        r"(fixture|local variable) (made|trainer)\b.*attribute outs of Net",
        (LEAK, GROWTH, PEAK),
    ),
    "a module in modules": (
        "None",
        "model = nn.Sequential(Net(), nn.Sequential(Net(Net()), nn.ReLU())).cuda()",
        ("model[1][0].outs.append(BIG)", "model[1][0].inner[0].outs.append(BIG)"),
        r"local variable model\b.*attribute outs of Net",
        (GROWTH, PEAK),
    ),
    "buffers of a module in modules": (
        "None",
        "model = nn.Sequential(Net(), nn.ModuleDict({'a': Net(Net())}))",
        ("model[1]['a'].inner[0].register_buffer(f'b{step}', BIG)",),
        r"local variable model\b",
        (GROWTH, PEAK),
    ),
    "a registry of models and optimizers with states": (
        "None",
        "registry = REGISTRY",
        (
            """model = nn.Linear(512, 512 * SIZE, device='cuda')
opt = torch.optim.Adam(model.parameters())
registry.models.append(model); registry.optimizers.append(OPT); registry.names.append(step)
model(torch.ones(8, 512, device='cuda')).sum().backward(); opt.step(); opt.zero_grad()""",
        ),
        r"local variable registry\b.*attribute optimizers of Registry",
        (GROWTH,),
    ),
    "a registry of models and optimizers without states": (
        "None",
        "registry = REGISTRY",
        (
            """model = nn.Linear(512, 512 * SIZE, device='cuda')
opt = torch.optim.SGD(model.parameters())
registry.models.append(model); registry.optimizers.append(OPT)""",
        ),
        r"local variable registry\b.*attribute models of Registry.* and .*attribute optimizers of",
        (GROWTH,),
    ),
    "two lists of the same tensors": (
        "None",
        "first, second = [], []",
        (
            "first.append(BIG); second.append(first[-1])",
            "second.append({'x': BIG}); first.append(second[-1]['x'])",
        ),
        r"local variable (first|second)\b.* and .*local variable (first|second)\b",
        (GROWTH,),
    ),
    "a list, and a list of parts of it": (
        "None",
        "everything, some = [], []",
        ("everything.append([BIG, BIG]); some.append(everything[-1][0])",),
        r"local variable everything\b",
        (GROWTH, PEAK),
    ),
    "an attribute and a variable of the same list": (
        "None",
        "trainer = Trainer(); log = trainer.log",
        ("log.append(BIG)", "trainer.log.append((BIG, step))"),
        r"local variable (trainer\b.*attribute log of Trainer|log\b)",
        (GROWTH, PEAK),
    ),
    "fast weights": (
        "None",
        "w = torch.zeros(SIZE << 18, device='cuda', requires_grad=True); fast = w",
        (
            """(grads,) = torch.autograd.grad(fast.exp().sum(), [fast], create_graph=True)
fast = fast - 0.1 * grads""",
        ),
        r"local variable fast\b",
        (GROWTH,),
    ),
    "losses and outputs": (
        "None",
        "w = torch.zeros(1 << 18, device='cuda', requires_grad=True); losses, outs = [], []",
        ("outs.append((w * 2).repeat(SIZE).exp()); losses.append((outs[-1] * 2).sin().sum())",),
        r"local variable losses\b",
        (GROWTH,),
    ),
    "losses on the CPU": (
        "None",
        "w = torch.zeros(1 << 18, device='cuda', requires_grad=True); losses = []; total = 0",
        (
            "losses.append((w * 2).repeat(SIZE).exp().sum().cpu())",
            "total = total + (w * 2).repeat(SIZE).exp().sum().cpu(); losses = [total]",
        ),
        r"local variable (losses|total)\b",
        (GROWTH,),
    ),
    "gradients of plain leaves": (
        "None",
        "leaves = []",
        ("leaves.append(BIG.float()[::4].requires_grad_()); (leaves[-1] * 2).sum().backward()",),
        r"local variable leaves\b",
        (GROWTH, PEAK),
    ),
    "containers in containers": (
        "None",
        "memory = OUTER",
        ("for _ in range(NUMBER): ADD(INNER)",),
        r"local variable memory\b",
        (GROWTH, PEAK),
    ),
    "containers in a global variable": (
        "None",
        "memory = STORE",
        ("for _ in range(NUMBER): STORE.append(INNER)",),
        r"(global variable STORE|local variable memory)\b",
        (LEAK, GROWTH, PEAK),
    ),
    "an object of a deque": (
        "None",
        "agent = types.SimpleNamespace(memory=collections.deque(maxlen=10_000))",
        ("for _ in range(NUMBER): agent.memory.append(INNER)",),
        r"local variable agent\b",
        (GROWTH, PEAK),
    ),
    "cycles in use": (
        "None",
        "nodes, node = [], None",
        (
            "nodes.append(Cycle(BIG))",
            "node = Cycle(BIG, node)",
            "nodes.append(Cycle(BIG, nodes))",
        ),
        r"local variable nodes?\b",
        (GROWTH, PEAK),
    ),
    "a checkpoint beside the model that loaded it": (
        "None",
        (
            "net = nn.Linear(1024, 256 * SIZE, device='cuda')\n"
            "opt = torch.optim.AdamW(net.parameters()); file = io.BytesIO()\n" + TRAINS + "\n"
            "torch.save({'model': net.state_dict(), 'optimizer': opt.state_dict()}, file)"
        ),
        (
            """if step == 0:
    ckpt = torch.load(file.seek(0) or file, map_location="cuda")
    net.load_state_dict(ckpt['model']); opt.load_state_dict(ckpt['optimizer'])""",
            """if step == 0:
    file.seek(0); ckpt = torch.load(file, map_location="cuda")['model']
    net.load_state_dict(ckpt)""",
            """if step == 0:
    ckpt = {'net': {key: value.clone() for key, value in net.state_dict().items()}, 'step': 0}
    net.load_state_dict(ckpt['net'])""",
        ),
        r"local variable ckpt\b",
        (PEAK,),
    ),
    "garbage in cycles": (
        "None",
        "",
        ("Cycle(BIG)", "Cycle([BIG], Cycle(BIG))", "Cycle({'a': (BIG, step)})"),
        r"reference cycles that .*\b(Cycle|me|data|parent)\b",
        (PEAK, GARBAGE),
    ),
}
"""by name: the fixture's value; lines before the loop; ways to write a step; a pattern for the
right holder; and the kinds of programs that find it"""
BESIDES = (
    ("", "last = mib(3)"),
    ("ring = []", "ring.append(mib(2)); del ring[:-2]"),
    ("", "Cycle(mib(2))"),
    ("few = {}", "few[step % 2] = few[step % 2] if step % 2 in few else mib(3)"),
    (
        "side = nn.Linear(256, 256, device='cuda'); adam = torch.optim.Adam(side.parameters())",
        "side(torch.ones(8, 256, device='cuda')).sum().backward(); adam.step(); adam.zero_grad()",
    ),
)
"""memory that does not grow: lines before the loop, and lines of a step"""
CONTAINERS = {"[]": "memory.append", "collections.deque()": "memory.append"}
INNERS = (
    "[BIG, BIG]",
    "(BIG, step)",
    "{'a': BIG, 'b': [BIG]}",
    "[[BIG], (BIG,)]",
    "Trainer([BIG])",
)


EDITED = """\
import pytest, torch
from torch import nn

ROWS = 1024
RATE = 0.1

def grow(x, times=2):
    return [x * at for at in range(times)]

def unused(a):
    return a + 1

class Net(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, width), nn.ReLU(), nn.Linear(width, 512))
    def forward(self, x):
        return self.layers(x)

@pytest.mark.gpu_memory
def test_it():
    x = torch.ones(ROWS, 512, device="cuda")
    net = Net().cuda()
    sgd = torch.optim.SGD(net.parameters(), lr=RATE)
    losses = []
    for _ in range(5):
        loss = net(x).sum()
        loss.backward(); sgd.step()
        sgd.zero_grad()
        losses.append(loss.detach())
    big = grow(x, 20)
    del big
    with torch.no_grad():
        more = net(x).repeat(4, 1)
        for _ in range(20):
            more = more + net(x).repeat(4, 1)
    last = grow(x, times=4)
"""
EDITS = {
    "an edit above the line that allocates": (
        ("ROWS = 1024", "ROWS = 4096"),
        ("width=512", "width=8192"),
        ("grow(x, times=4)", "grow(x, times=30)"),
        ("net = Net()", "net = Net(8192)"),
    ),
    "a line that is gone": (
        ("    with torch.no_grad():", "    if True:"),
        ("    del big\n", ""),
        ("loss.detach()", "net(x)"),
        ("        sgd.zero_grad()\n        losses", "        losses"),
    ),
}
"""by shape: the old and the new text of each edit; another line allocates the growth"""
ASIDE = (
    ("return a + 1", "return a + 2"),
    ("RATE = 0.1", "RATE = 0.2"),
    ("def unused(a):", "def unused(a, b=1):"),
)
"""edits that change no memory"""


class Planted(NamedTuple):
    """A program, how its growth is found, and the pattern of the right holder."""

    source: str
    shape: str
    found_as: str
    holder: str
    before: str = ""
    """the source when the baseline was recorded; "" if it is the same"""


def planted_program(seed):
    """Return the program with a seed."""
    chance = random.Random(seed)
    shape = [*SHAPES, *EDITS][seed % (len(SHAPES) + len(EDITS))]
    return edited_program(shape, chance) if shape in EDITS else _held_program(shape, seed, chance)


def edited_program(shape, chance):
    """Return a program with one edit that made it grow, and up to two others."""
    edit = chance.choice(EDITS[shape])
    line = EDITED[: EDITED.index(edit[0])].count("\n") + 1
    source = EDITED
    for old, new in (edit, *chance.sample(ASIDE, chance.randrange(3))):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return Planted(source, shape, EDIT, rf"\.py:{line} ", EDITED)


def _held_program(shape, seed, chance):
    fixture, before, steps, holder, ways = SHAPES[shape]
    found_as = ways[seed // (len(SHAPES) + len(EDITS)) % len(ways)]
    size, number = chance.choice((1, 2, 3)), chance.choice((1, 3, 30))
    outer = chance.choice([*CONTAINERS])
    big = f"mib({size if number < 30 else 0.5})"
    inner = chance.choice(INNERS)
    words = {
        "REGISTRY": "Registry()",
        "OUTER": outer,
        "ADD": CONTAINERS[outer],
        "INNER": inner,
        "NUMBER": str(number),
        "OPT": chance.choice(("opt", "Wrapped(opt)", "(opt, step)")),
        "BIG": big,
        "SIZE": str(size),
    }
    step = chance.choice(steps)
    besides = chance.sample(BESIDES, chance.randrange(3))
    body = [*before.splitlines(), *(first for first, _ in besides)]
    if found_as == PEAK:
        body += ["" if "net" in before else "net, opt = nn.Linear(8, 8, device='cuda'), None"]
    planted = [*step.splitlines()]
    if found_as == PEAK:
        planted = ["if NEW:", *(f"    {line}" for line in planted)]
    loop = [planted, *([after] for _, after in besides)]
    chance.shuffle(loop)
    if shape.startswith("a checkpoint"):
        loop.insert(0, [TRAINS])
    elif found_as == PEAK:
        loop.append(["net(torch.ones(1, 8, device='cuda'))"])
    if found_as in {GROWTH, GARBAGE}:
        loop.append(["gpu_memory.step()"])
    lines = [
        *filter(None, body),
        f"for step in range({chance.choice((4, 6, 9))}):",
        *(f"    {line}" for part in loop for line in part),
    ]
    mark = {
        LEAK: "max_leak_mib=0, baseline=False",
        GROWTH: "steady=True, baseline=False",
        GARBAGE: "steady=True, max_leak_mib=0, baseline=False",
        PEAK: "",
    }[found_as]
    # A fixture of function scope releases its memory after the test, so it cannot leak.
    scope = chance.choice(("module", "session") if found_as == LEAK else ("module", "function"))
    head = HEAD.replace("SCOPE", scope).replace("FIXTURE", fixture)
    head = head.replace("RETURNS", chance.choice(("return", "yield")))
    source = "\n".join(
        [
            head,
            f"@pytest.mark.gpu_memory({mark})",
            "def test_it(made, gpu_memory):",
            "    STORE.clear()",
            *(f"    {line}" for line in lines),
        ]
    )
    for word, meaning in words.items():
        source = re.sub(rf"\b{word}\b", lambda _, meaning=meaning: meaning, source)
    return Planted(source, shape, found_as, holder)


RIGHT, NOT_FIRST, NOT_SEARCHED, NOT_NAMED = (
    *("right first", "right, not first", "not searched", "nothing named"),
)
WRONG = "wrong, without the right one before it"


def naming(program, result):
    """Return whether a result names the right holder (RIGHT ... WRONG), and the names in it."""
    verdict = result and result["verdict"]
    if program.found_as == GARBAGE and verdict and verdict["kind"] == "within":
        notes = result["measurement"]["notes"]
        said = any(note.startswith("what grew from step to step was garbage") for note in notes)
        return RIGHT if said else NOT_NAMED, notes
    if not verdict or verdict["kind"] not in {"leaked", "regressed"}:
        return f"the verdict is {verdict and verdict['kind']}", []
    if program.found_as == EDIT:
        lead = verdict["lead"]
        named = [lead["sentence"]] if lead["kind"] == "edit" else []
        for note in verdict["notes"]:
            named += note.split("; ") if note.startswith("edited since") else []
    elif program.found_as == PEAK:
        named = [
            " and ".join(dict.fromkeys(keeper["text"] for keeper in cause["keepers"]))
            for cause in verdict["causes"]
        ]
        named = [names for names in named if names]
    else:
        stayed = result["measurement"]["stayed"]
        others = " and " in program.holder  # two objects keep the same memory: both must be named
        named = [
            " and ".join([each["text"], *each["others"] * others]) for each in stayed["holders"]
        ]
    right = [bool(re.search(program.holder, name)) for name in named]
    if not named:
        return NOT_NAMED, named
    if right[0]:
        return RIGHT, named
    if any("not searched" in name or "as far as was searched" in name for name in named):
        return NOT_SEARCHED, named
    return (NOT_FIRST if any(right) else WRONG), named
