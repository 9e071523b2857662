"""Growth: what is allocated after each step has to stop growing."""

from __future__ import annotations

import pytest
from helpers.marked_sessions import one_test

LOOP = """
HISTORY = []

def train(steps, each=lambda step, loss: None, **options):
    model = torch.nn.Linear(1024, 1024).cuda()
    adam = torch.optim.Adam(model.parameters())
    for step in range(steps):
        x = torch.zeros(64, 1024, device="cuda")
        loss = model(x).sum()
        loss.backward()
        each(step, loss)
        adam.step()
        adam.zero_grad()
"""


def steady(suite, *body, mark="steady=True", **more):
    return one_test(suite, *body, mark=mark, head=LOOP, **more)


def test_training_that_keeps_nothing_is_steady(suite):
    session = steady(suite, "train(4)")
    assert session.verdicts() == {"test_it": "no baseline"}


def test_what_each_step_keeps_is_growth_with_its_line_and_its_holder(suite):
    session = steady(
        suite,
        "kept = []",
        "def each(step, loss):",
        "    kept.append(torch.empty(16 << 20, dtype=torch.uint8, device='cuda'))",
        "train(6, each)",
    )
    assert session.outcomes == {"failed": 1}
    assert session.verdicts() == {"test_it": "leaked"}
    written = (suite.path / "test_it.py").read_text().splitlines()
    line = next(i for i, it in enumerate(written, 1) if "kept.append" in it)
    grew = "leaked: allocated memory grew by 16.00 MiB in each of the last 3 of 6 steps ("
    assert grew in session.flat
    # One time, and one amount.
    assert f"of which test_it.py:{line} (test_it.each) 48.00 MiB in 3 blocks" in session.flat
    held = "note: held by local variable kept of test_it, test_it.py:21 (list of 6): 48.00 MiB in 3"
    assert held in session.flat
    assert "stayed, allocated by" in suite.run("-v").out


def test_losses_that_are_kept_are_growth_with_their_graphs(suite):
    session = steady(suite, "losses = []", "train(5, lambda step, loss: losses.append(loss.exp()))")
    assert session.verdicts() == {"test_it": "leaked"}
    assert "local variable losses of test_it" in session.flat
    assert "with its autograd graph (ExpBackward0)" in session.flat
    session = steady(
        suite, "losses = []", "train(5, lambda step, loss: losses.append(loss.item()))"
    )
    assert session.verdicts() == {"test_it": "no baseline"}


def test_what_happens_once_is_no_growth(suite):
    session = steady(
        suite,
        "def each(step, loss):",
        "    if step in (0, 2): HISTORY.append(mib(8))",
        "train(6, each)",
    )
    assert session.verdicts() == {"test_it": "no baseline"}


CYCLES = """
class Trainer:
    def __init__(self):
        self.batch = mib(64)
        self.hook = lambda: self.batch

"""


def test_garbage_is_no_growth_and_counts_for_the_peak(suite):
    body = ["for _ in range(8):", "    Trainer()", "    gpu_memory.step()"]
    plain = one_test(suite, *body, head=CYCLES, fixtures="gpu_memory", mark="")
    session = one_test(suite, *body, head=CYCLES, fixtures="gpu_memory", mark="steady=True")
    assert session.verdicts() == {"test_it": "no baseline"}
    assert session.figures() == plain.figures()
    assert "test_it 512.00" in session.flat
    assert "what grew from step to step was garbage in reference cycles" in session.flat


def test_garbage_whose_blocks_have_rests_is_no_growth(suite):
    """Every third block is 7.2 MiB: a rest below 1 MiB of a segment of 20 MiB is not split off."""
    body = ["for _ in range(12):", "    Trainer(6.4)", "    gpu_memory.step()"]
    head = CYCLES.replace("self):", "self, size):").replace("64", "size")
    session = one_test(suite, *body, head=head, fixtures="gpu_memory", mark="steady=True")
    assert session.verdicts() == {"test_it": "no baseline"}
    assert "what grew from step to step was garbage in reference cycles" in session.flat


def test_rests_of_free_blocks_are_no_growth(suite):
    """Two tensors of 3.3 MiB are alive after each step: in blocks of 6.6 to 7.7 MiB."""
    body = [
        "random.seed(221)",
        "others = [random.uniform(0.5, 12) for _ in range(3)]",
        "alive, levels = [], []",
        "for step in range(8):",
        "    temporary = [mib(size) for size in others]",
        "    alive.append(mib(3.3))",
        "    random.shuffle(temporary)",
        "    del alive[:-2], temporary",
        "    gpu_memory.step()",
        "    levels.append(gpu_memory.allocated)",
        "assert levels[3] < levels[4] == levels[5] < levels[6] < levels[7]",
    ]
    session = one_test(
        suite, *body, head="import random", fixtures="gpu_memory", mark="steady=True"
    )
    assert session.verdicts() == {"test_it": "no baseline"}


def test_a_cache_that_the_second_run_finds_full_is_growth_beside_garbage(suite):
    body = [
        "for step in range(8):",
        "    CACHE.get(step) is None and CACHE.update({step: mib(2)})",
        "    Trainer()",
        "    gpu_memory.step()",
    ]
    head = f"CACHE = {{}}\n{CYCLES}"
    session = one_test(suite, *body, head=head, fixtures="gpu_memory", mark="steady=True")
    grew = "grew by 2.00 MiB in each of the last 4 of 8 steps (8.00 MiB -> 16.00 MiB), of which"
    assert grew in session.flat
    assert "held by global variable CACHE of test_it.py" in session.flat


IN_USE = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
        self.call = self.forward

    def forward(self, x):
        return x * self.weight

def train():
    net = Net()
    for _ in range(4):
        net(torch.zeros(1 << 20, device="cuda")).sum().backward()
"""


@pytest.mark.parametrize("body", ["train()", "net = Net(); net(mib(4).float()[: 1 << 20]).sum()"])
def test_a_module_in_a_cycle_that_is_used_until_its_function_ends_is_no_garbage(suite, body):
    one_test(suite, body, head=IN_USE, mark="")
    assert "reference cycles" not in suite.run("-v").flat


COLLECTOR = """
import gc, pytest, torch

class Trainer:
    def __init__(self):
        self.batch = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        self.hook = lambda: self.batch

def steps(gpu_memory):
    counts = []
    gc.collect()
    # Python keeps up to 80 freed lists and dicts: with none left, each one more shows.
    taken = [({}, [], *map(tuple, map(range, range(1, 20)))) for _ in range(300)]
    for _ in range(400):
        Trainer()
        gpu_memory.step()
        counts.append(gc.get_count()[0])
    return counts

COUNTS = []

# The first test of a process makes what later ones find, as the caches of PyTorch's.
@pytest.mark.gpu_memory
def test_first(gpu_memory):
    steps(gpu_memory)

@pytest.mark.gpu_memory
def test_plain(gpu_memory):
    COUNTS.append(steps(gpu_memory))

@pytest.mark.gpu_memory(steady=True)
def test_steady(gpu_memory):
    COUNTS.append(steps(gpu_memory))

def test_counts():
    assert COUNTS[0] == COUNTS[1]
"""


def test_pythons_collector_runs_as_it_does_without(suite):
    # Else the first collection depends on the objects that were made before the test. The session
    # has a process of one thread: another thread, as of an xdist worker, makes objects in between.
    session = suite.run_warm(source=COLLECTOR)
    assert session.outcomes == {"passed": 4}
    figures = session.figures()
    assert figures["test_plain"] == figures["test_steady"]
    assert figures["test_plain"][0] < 400  # some was collected


@pytest.mark.parametrize("second", ["raise ValueError", "steps = 9"])
def test_where_the_second_run_is_another_the_first_tells_what_it_can(suite, second):
    body = [
        "steps, kept = 8, []",
        "CALLS.append(1)",
        "if len(CALLS) == 2:",
        f"    {second}",
        "for _ in range(steps):",
        "    kept.append(mib(1)); HISTORY.append(mib(2))",
        "    gpu_memory.step()",
    ]
    head = f"{LOOP}\nCALLS = []"
    session = one_test(suite, *body, head=head, fixtures="gpu_memory", mark="steady=True")
    grew = "grew by 3.00 MiB in each of the last 4 of 8 steps (12.00 MiB -> 24.00 MiB), of which"
    assert grew in session.flat
    assert "(mib) 12.00 MiB in 8 blocks" in session.flat
    assert "held by global variable HISTORY of test_it.py (list of 8): 8.00 MiB" in session.flat
    assert "some of the memory that grew may be garbage in reference cycles" in session.flat


def test_a_leak_beside_garbage_is_told_without_it(suite):
    body = [
        "for _ in range(8):",
        "    HISTORY.append(mib(3))",
        "    Trainer()",
        "    gpu_memory.step()",
        "assert gpu_memory.peak_allocated == 536 << 20",  # fails in the second run
    ]
    session = one_test(suite, *body, head=CYCLES + LOOP, fixtures="gpu_memory", mark="steady=True")
    grew = "grew by 3.00 MiB in each of the last 4 of 8 steps (12.00 MiB -> 24.00 MiB), of which"
    assert grew in session.flat
    assert "held by global variable HISTORY of test_it.py (list of 16): 12.00 MiB" in session.flat


@pytest.mark.parametrize("steps", [8, 20, 40, 200])
def test_a_buffer_that_is_full_is_no_growth_and_has_the_memory_that_it_has_without(suite, steps):
    body = [
        "buffer, levels = [], []",
        f"for _ in range({steps}):",
        "    buffer.append(mib(4))",
        "    del buffer[:-4]",
        "    gpu_memory.step()",
        "    levels.append(gpu_memory.allocated >> 20)",
        f"assert levels == [4, 8, 12] + [16] * {steps - 3}",
    ]
    session = steady(suite, *body, fixtures="gpu_memory")
    assert session.verdicts() == {"test_it": "no baseline"}
    assert "second time" not in session.flat


HOLDERS = {
    "a hidden state": (
        [
            "cell = torch.nn.GRUCell(1024, 4096, device='cuda')",
            "h = torch.zeros(256, 4096, device='cuda')",
        ],
        "h = cell(torch.randn(256, 1024, device='cuda'), h)",
        # Of each step the input, the new state, and five gates that the backward wants.
        ("49.00", "196.00 MiB in 20 blocks", "local variable h of test_it"),
    ),
    "a list beside views of a parameter": (
        ["layer = torch.nn.Linear(2048, 2048, device='cuda')", "rows, kept = [], []"],
        "rows.append(layer.weight.detach()[0]); kept.append(mib(1))",
        ("1.00", "4.00 MiB in 4 blocks", "local variable kept of test_it"),
    ),
    "embeddings of a fixed encoder": (
        ["encoder = torch.nn.Linear(1024, 1024).cuda()", "cache = []"],
        "cache.append(encoder(torch.zeros(256, 1024, device='cuda')[:]))",
        ("2.00", "8.00 MiB in 8 blocks", "local variable cache of test_it"),
    ),
    "outputs, of which a variable has the last": (
        ["outputs = []"],
        "output = mib(2); gpu_memory.step(); outputs.append(output); continue",
        ("2.00", "8.00 MiB in 4 blocks", "local variable outputs of test_it"),
    ),
    "a tensor that grows": (
        ["buffer = mib(1)"],
        "buffer = torch.cat([buffer, mib(1)])",
        ("1.00", "4.00 MiB in 1 block", "local variable buffer of test_it"),
    ),
    "a dict by step": (
        [],
        "CACHE[step] = mib(2)",
        ("2.00", "8.00 MiB in 4 blocks", "global variable CACHE of test_it.py"),
    ),
    "a dict that the second run finds full": (
        [],
        "CACHE.get(step) is None and CACHE.update({step: mib(2)})",
        ("2.00", "8.00 MiB in 4 blocks", "global variable CACHE of test_it.py"),
    ),
    "a gradient of an output": (
        ["w = torch.zeros(1 << 20, device='cuda', requires_grad=True)", "kept = []"],
        "y = w * 1; y.retain_grad(); y.sum().backward(); kept.append(y)",
        ("8.00", "32.00 MiB in 8 blocks", "local variable kept of test_it"),
    ),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_the_holder_is_that_of_the_blocks_that_grew_and_of_all_of_them(suite, name):
    before, step, (each, blocks, holder) = HOLDERS[name]
    body = [*before, "for step in range(8):", f"    {step}", "    gpu_memory.step()"]
    session = one_test(suite, *body, mark="steady=True", head="CACHE = {}", fixtures="gpu_memory")
    assert f"grew by {each} MiB in each of the last 4 of 8 steps" in session.flat
    assert session.flat.count("held by") == 2  # in the note, and in the table
    assert f"note: held by {holder}" in session.flat
    assert f": {blocks}" in session.flat


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_of_too_few_steps_nothing_can_be_told_and_that_fails(suite, steps):
    session = steady(suite, f"train({steps})")
    assert session.outcomes == {"failed": 1}
    assert (
        f"steady=True: the test had {steps} steps, and growth needs 4 or more steps (a "
        "step ends with optimizer.step()); run more steps; without an optimizer, call "
        "gpu_memory.step() after each step"
    ) in session.flat


def test_steps_without_an_optimizer_end_where_the_test_says(suite):
    body = ["for _ in range(5):", "    HISTORY.append(mib(2))", "    gpu_memory.step()"]
    session = steady(suite, *body, fixtures="gpu_memory")
    grew = "leaked: allocated memory grew by 2.00 MiB in each of the last 2 of 5 steps"
    assert grew in session.flat
    assert "held by global variable HISTORY of test_it.py (list of 10): 4.00 MiB" in session.flat
    body[1] = "    x = mib(2)"
    assert steady(suite, *body, fixtures="gpu_memory").outcomes == {"passed": 1}
    session = steady(suite, *body, fixtures="gpu_memory", mark="")  # it does no harm
    assert session.outcomes == {"passed": 1}


def test_where_the_test_says_the_optimizers_steps_are_none(suite):
    """Of two micro-batches the first makes the gradients: they come and go."""
    session = steady(
        suite,
        "train(2, lambda step, loss: gpu_memory.step())",
        fixtures="gpu_memory",
    )
    assert "the test had 2 steps" in session.flat


def test_of_several_optimizers_the_first_ends_a_step(suite):
    session = steady(
        suite,
        "models = [torch.nn.Linear(512, 512).cuda() for _ in range(2)]",
        "adams = [torch.optim.Adam(it.parameters()) for it in models]",
        "for _ in range(4):",
        "    for model, adam in zip(models, adams):",
        "        model(torch.zeros(8, 512, device='cuda')).sum().backward()",
        "        adam.step()",
        "        adam.zero_grad()",
        "    HISTORY.append(mib(1))",
    )
    assert "grew by 1.00 MiB in each of the last 2 of 4 steps" in session.flat


OPTIMIZERS = """
def train(kept, number=1):
    layers = [torch.nn.Linear(1024, 1024, device="cuda") for _ in range(number)]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
    sum(layer(torch.randn(8, 1024, device="cuda")).sum() for layer in layers).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    kept += optimizers
"""


def test_optimizers_that_are_made_anew_and_kept_end_a_step_each(suite):
    body = ["kept = []", "for _ in range(8):", "    train(kept)"]
    session = one_test(suite, *body, head=OPTIMIZERS, mark="steady=True")
    assert "grew by 4.00 MiB in each of the last 4 of 8 steps (" in session.flat
    assert "held by local variable kept of test_it" in session.flat
    # How many of them a step has is not known.
    assert "each optimizer stepped once, so each of these calls of step() counts" in session.flat
    body[-1] = "    train([])"
    session = one_test(suite, *body, head=OPTIMIZERS, mark="steady=True")
    assert session.verdicts() == {"test_it": "no baseline"}


def test_two_optimizers_that_are_made_anew_are_one_step(suite):
    body = ["for _ in range(3):", "    train([], 2)"]
    session = one_test(suite, *body, head=OPTIMIZERS, mark="steady=True")
    assert "the test had 3 steps" in session.flat


def test_a_warm_up_counts_no_steps(suite):
    session = steady(suite, "train(2)", mark="steady=True, warmup=2")
    assert "the test had 2 steps" in session.flat


def test_figures_are_those_without_it(suite):
    with_it = steady(suite, "train(4)").figures()
    assert with_it == steady(suite, "train(4)", mark="").figures()


def test_without_attribution_the_holder_is_told_and_no_line(suite):
    body = ["train(5, lambda step, loss: HISTORY.append(mib(4)))"]
    session = steady(suite, *body, args=["--gpumem-attribution=off"])
    assert "held by global variable HISTORY" in session.flat
    assert "of which" not in session.flat


def test_a_growing_test_gets_no_baseline(suite):
    body = ["train(5, lambda step, loss: HISTORY.append(mib(4)))"]
    steady(suite, *body, args=["--gpumem-update-baselines"])
    assert suite.baselines() == {}


def test_a_mistake_in_the_field_is_an_error_of_the_test(suite):
    session = steady(suite, "pass", mark="steady='yes'")
    assert "steady must be True or False; write steady=True" in session.flat
