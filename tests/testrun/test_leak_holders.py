"""Leaks: who refers to what a test still holds."""

from __future__ import annotations

import gc
import json
import re
import weakref

import pytest
from helpers.marked_sessions import LEAKS, leaked
from helpers.virtual_gpu import CARD_80GIB, virtual_card

from pytest_gpumem.recording.plain_tensors import place_of
from pytest_gpumem.recording.reference_graph import ReferenceGraph
from pytest_gpumem.recording.referrers import NOT_SEARCHED, UNNAMED, BlockKeeper, _Search, holders

KEEPERS = {
    "attribute history of Trainer, list of 1": (
        "class Trainer:\n    def __init__(self): self.history = []\nTRAINER = Trainer()",
        ["TRAINER.history.append(mib(8))"],
        "global variable TRAINER of test_it.py (attribute history of Trainer, list of 1)",
    ),
    "variable of a context": (
        (
            "import contextvars\nCONTEXT = contextvars.copy_context()\n"
            "VARIABLES = [contextvars.ContextVar(f'v{i}') for i in range(20)]"
        ),
        [
            "for variable in VARIABLES: CONTEXT.run(variable.set, [])",
            "CONTEXT.run(VARIABLES[7].set, [mib(8)])",
        ],
        "context variable v7 (list of 1): 8.00 MiB",
    ),
    "class": (
        "class Trainer:\n    last = None",
        ["Trainer.last = mib(8)"],
        "class attribute last of Trainer",
    ),
    "closure": (
        "HOOKS = {}",
        ["big = mib(8)", "def hook(): return big", "HOOKS['a'] = hook"],
        "global variable HOOKS of test_it.py (dict of 1, closure of test_it.<locals>.hook, ",
    ),
    "global": ("LAST = None", ["global LAST", "LAST = mib(8)"], "global variable LAST of"),
    "parameter": (
        "KEPT = []",
        ["KEPT.append(torch.nn.Linear(1024, 2048, bias=False, device='cuda'))"],
        "global variable KEPT of test_it.py (list of 1, Linear)",
    ),
    "model": (
        "KEPT = []",
        [
            "model = torch.nn.Linear(1024, 2048, bias=False, device='cuda')",
            "for _ in range(9): model = torch.nn.Sequential(torch.nn.ModuleList([model]))",
            "KEPT.append({'model': model})",
        ],
        "global variable KEPT of test_it.py (list of 1, dict of 1, Sequential): 8.00 MiB",
    ),
    "stored exception": (
        "ERRORS = []\ndef fails():\n    big = mib(8)\n    raise ValueError",
        ["try: fails()", "except ValueError as error: ERRORS.append(error)"],
        "global variable ERRORS of test_it.py (list of 1, ValueError, local variable big of fails,",
    ),
    "module with an exception": (
        (
            "class Model(torch.nn.Module):\n    def forward(self, x):\n        big = mib(8)\n"
            "        try: raise KeyError\n        except KeyError as error: self.error = error\n"
            "MODEL = Model()"
        ),
        ["MODEL(1)"],
        (
            "global variable MODEL of test_it.py (attribute error of Model, KeyError, "
            "local variable big of forward,"
        ),
    ),
    "generator": (
        "def batches():\n    big = mib(8)\n    yield big\nBATCHES = []",
        ["BATCHES.append(batches())", "next(BATCHES[0])"],
        "global variable BATCHES of test_it.py (list of 1, generator batches",
    ),
    "dict with several ways": (
        "CACHE = {}",
        ["CACHE['a'] = [mib(4), mib(1)]", "CACHE['b'] = mib(3)"],
        "global variable CACHE of test_it.py (dict of 2): 8.00 MiB in 3 blocks",
    ),
    "graph without Python objects": (
        (
            "LOSSES = []\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
            "        return x.exp().sin()"
        ),
        [
            "x = mib(2).float().requires_grad_()",
            "loss = Net()(x).sum()",
            "loss.backward(retain_graph=True)",
            "LOSSES.append(loss)",
        ],
        (
            "global variable LOSSES of test_it.py (list of 1), with its autograd graph "
            "(SumBackward0): 24.00 MiB in 4 blocks"
        ),
    ),
    "graph of checkpoints": (
        (
            "from torch.utils.checkpoint import checkpoint\nLOSSES = []\n"
            "class Block(torch.nn.Module):\n    def forward(self, x): return x.exp().sin()"
        ),
        [
            "x = mib(2).float().requires_grad_()",
            "block = Block()",
            "for _ in range(3): x = checkpoint(block, x, use_reentrant=False)",
            "LOSSES.append(x.sum())",
        ],
        (
            "global variable LOSSES of test_it.py (list of 1), with its autograd graph "
            "(SumBackward0): 24.00 MiB in 4 blocks"
        ),
    ),
    "graph": (
        "KEPT = []",
        ["KEPT.append(mib(8).float().requires_grad_().exp().sum())"],
        "global variable KEPT of test_it.py (list of 1), with its autograd graph (SumBackward0)",
    ),
}


@pytest.mark.parametrize("name", KEEPERS)
def test_who_refers_to_it(suite, name):
    head, body, words = KEEPERS[name]
    session = leaked(suite, *body, head=head)
    assert session.outcomes == {"passed": 1, "errors": 1}
    assert f"note: held by {words}" in session.flat


def test_a_hook_that_keeps_activations(suite):
    session = leaked(
        suite,
        "model = torch.nn.Sequential(torch.nn.Linear(512, 4096), torch.nn.ReLU()).cuda()",
        "model[0].register_forward_hook(lambda module, args, out: SEEN.append(out))",
        "model(torch.zeros(512, 512, device='cuda'))",
        head="SEEN = []",
    )
    assert "global variable SEEN of test_it.py (list of 1), with its autograd graph" in session.flat
    assert "activations" in session.flat


def test_without_attribution_the_holder_is_told_and_no_line(suite):
    session = suite.run("--gpumem-attribution=off", source=LEAKS)
    assert "held by global variable CACHE" in session.flat
    assert "of which" not in session.flat


def test_a_search_that_has_too_many_objects_says_so_and_names_no_other_holder(suite, monkeypatch):
    monkeypatch.setattr("pytest_gpumem.recording.referrers.MAX_LEVELS", 1)
    head, body, words = KEEPERS["attribute history of Trainer, list of 1"]
    session = leaked(suite, *body, head=head)
    assert words not in session.flat
    assert f"note: held by {NOT_SEARCHED}: 8.00 MiB in 1 block" in session.flat


def test_the_holder_is_the_same_whatever_the_clock_says(suite, busy_clock):
    busy_clock()
    session = suite.run(source=LEAKS)
    assert "held by global variable CACHE of test_it.py (list of 5): 80.00 MiB" in session.flat


def test_memory_without_a_name_comes_last_however_much_it_is(torch):
    with virtual_card(CARD_80GIB):
        small = torch.zeros(1 << 18, device="cuda")
        named, unnamed = holders({place_of(small): 1 << 20, (0, 512): 1 << 30})
        del small
    assert named.text.startswith("local variable small of test_memory_without_a_name_comes_last")
    assert (unnamed.text, unnamed.nbytes) == (UNNAMED, 1 << 30)


GROWTH = """
import pytest, torch
from collections import deque
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.outs = nn.Linear(8, 8), []

class Agent:
    pass

@pytest.fixture(scope="module")
def net():
    return nn.Sequential(nn.Linear(8, 8)).cuda()

@pytest.fixture(scope="module")
def waiting():
    made = []
    yield made.append

@pytest.mark.gpu_memory(max_leak_mib=0, baseline=False)
def test_attribute_of_a_fixture(net):
    net[0].saved = torch.zeros(2**20, device="cuda")

@pytest.mark.gpu_memory(max_leak_mib=0, baseline=False)
def test_variable_of_a_fixture(waiting):
    waiting(torch.zeros(2**20, device="cuda"))

@pytest.mark.gpu_memory(steady=True, baseline=False)
def test_module_in_a_module(gpu_memory):
    model = nn.Sequential(Net(), Net()).cuda()
    for _ in range(6):
        model[1].outs.append(torch.zeros(2**20, device="cuda"))
        gpu_memory.step()

@pytest.mark.gpu_memory(steady=True, baseline=False)
@pytest.mark.parametrize("store", [list, deque])
@pytest.mark.parametrize("each", [list, tuple])
def test_lists_of_lists(gpu_memory, store, each):
    agent = Agent()
    agent.memory = store()
    for _ in range(6):
        for _ in range(8):
            agent.memory.append(each([torch.zeros(2**16, device="cuda") for _ in range(5)]))
        gpu_memory.step()

class Wrapped:
    def __init__(self, optimizer):
        self.optimizer = optimizer

class Registry:
    def __init__(self):
        self.models, self.optimizers = [], []

@pytest.mark.gpu_memory(steady=True, baseline=False)
@pytest.mark.parametrize("wrap", [Wrapped, lambda optimizer: optimizer])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_registry(gpu_memory, kind, wrap):
    registry = Registry()
    for _ in range(6):
        model = nn.Sequential(*(nn.Linear(1024, 1024, device="cuda") for _ in range(4)))
        opt = kind(model.parameters())
        registry.models.append(model)
        registry.optimizers.append(wrap(opt))
        model(torch.randn(64, 1024, device="cuda")).sum().backward()
        opt.step(), opt.zero_grad()
        gpu_memory.step()
"""


def test_holders_that_reports_of_others_found_wrong(suite):
    """Fixtures' objects, modules in modules, lists of lists, registries (accelerate#84, NeMo-RL).

    Of a registry the optimizers hold all; parameters are freed only when the models let go too.
    """
    session = suite.run("--gpumem-json=r.json", "-v", source=GROWTH)
    results = json.loads((suite.path / "r.json").read_text())["results"]
    held = {
        result["nodeid"].partition("::")[2]: result["measurement"]["stayed"]["holders"]
        for result in results
    }
    texts = {
        name: [re.sub(r" of test_\w+, test_it.py:\d+", "", holder["text"]) for holder in holders]
        for name, holders in held.items()
    }
    assert texts.pop("test_attribute_of_a_fixture") == [
        "fixture net (Sequential, attribute saved of Linear 0)"
    ]
    assert texts.pop("test_variable_of_a_fixture") == [
        "fixture waiting (builtin_function_or_method, list of 1)"
    ]
    assert texts.pop("test_module_in_a_module") == [
        "local variable model (Sequential, attribute outs of Net 1, list of 6)"
    ]
    for each in ("list", "tuple"):
        for store in ("list", "deque"):
            assert texts.pop(f"test_lists_of_lists[{each}-{store}]") == [
                f"local variable agent (attribute memory of Agent, {store} of 48, {each} of 5)"
            ]
    optimizers, models = "attribute optimizers of Registry", "attribute models of Registry"
    parameters = 3 * 4 * (4 << 20 | 4 << 10)
    for wrap in ("Wrapped", "<lambda>"):
        (adam,), (sgd,) = (held[f"test_registry[{kind}-{wrap}]"] for kind in ("Adam", "SGD"))
        assert optimizers in adam["text"]
        assert adam["others"] == [f"{models}, list of 6, Sequential"]
        assert (adam["shared"], adam["bytes"]) == (parameters, 3 * parameters)
        assert models in sgd["text"]
        assert sgd["others"][0].startswith(f"{optimizers}, list of 6")
        assert sgd["shared"] == sgd["bytes"] == parameters
    assert session.flat.count("in 24 blocks, freed when all of them let go") == 2


@pytest.fixture
def device(torch):
    """A virtual GPU that is open."""
    with virtual_card(CARD_80GIB) as device:
        device.open(CARD_80GIB, 1)
        yield device


@pytest.mark.usefixtures("device")
def test_a_search_keeps_no_object_and_no_memory(torch):
    layer = torch.nn.Linear(1024, 1024, device="cuda")
    kept, alive = [], []
    for _ in range(3):
        tensor = torch.empty(1 << 20, device="cuda")
        box = [tensor, layer, *kept[-1:]]  # ways that cross
        kept.append(box)
        alive.append(weakref.ref(tensor))
    del tensor, box
    before = torch.cuda.memory_allocated()
    gc.collect()
    gc.disable()  # what a cycle keeps would stay
    try:
        blocks = {place_of(reference()): 4 << 20 for reference in alive}
        (holder,) = holders(blocks)
        assert (holder.nbytes, holder.blocks) == (12 << 20, 3)
        assert torch.cuda.memory_allocated() == before
        assert gc.get_freeze_count() == 0
        kept.clear()
        assert [reference() for reference in alive] == [None] * 3
        assert torch.cuda.memory_allocated() == before - (12 << 20)
        assert not any(
            type(value) in (BlockKeeper, _Search, ReferenceGraph) for value in gc.get_objects()
        )
    finally:
        gc.enable()


@pytest.mark.usefixtures("device")
def test_all_of_a_long_list_is_the_lists(torch):
    kept = [torch.empty(128, device="cuda") for _ in range(600)]
    (holder,) = holders({place_of(tensor): 512 for tensor in kept})
    assert holder.text.startswith("local variable kept of test_all_of_a_long_list_is_the_lists,")
    assert holder.blocks == 600


@pytest.mark.usefixtures("device")
def test_of_two_names_the_one_with_more_of_the_blocks_has_them(torch):
    kept = []
    for _ in range(3):
        last = torch.empty(1 << 20, device="cuda")
        kept.append(last)
    (holder,) = holders({place_of(tensor): 4 << 20 for tensor in kept})
    assert holder.text.startswith("local variable kept of ")
    assert holder.blocks == 3
    assert last is kept[-1]
