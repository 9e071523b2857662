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
    assert "leaked: allocated memory grew by 16.00 MiB in each of 4 steps (" in session.flat
    assert f"of which test_it.py:{line} (test_it.each) 48.00 MiB in 3 blocks" in session.flat
    assert "note: held by local variable kept of test_it, test_it.py:" in session.flat
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


def test_garbage_is_no_growth(suite):
    session = steady(
        suite,
        "class C: pass",
        "def each(step, loss):",
        "    c = C()",
        "    c.me, c.big = c, mib(4)",
        "train(6, each)",
    )
    assert session.verdicts() == {"test_it": "no baseline"}


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
    assert "leaked: allocated memory grew by 2.00 MiB in each of 3 steps" in session.flat
    assert (
        "held by global variable HISTORY of test_it.py (list of 5): 4.00 MiB in 2 blocks"
        in session.flat
    )
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
    assert "grew by 1.00 MiB in each of 2 steps" in session.flat


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
