"""What a recording shows that raises a peak: each hint with its number, and where there is none."""

from __future__ import annotations

import re

import pytest
from helpers.hint_suite import HEAD, recorded_hints


@pytest.fixture
def hints(suite):
    return recorded_hints(suite)


# -- one step with a fresh optimizer --

STEPS = """
    model, x = net(), batch()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(STEPS):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_the_hint_of_a_fresh_optimizer_has_what_the_next_step_needs_more(hints):
    """Adam keeps two tensors for each of three layers of 4 MiB."""
    (hint,), one = hints("ran with a new", STEPS.replace("STEPS", "1"))
    assert hint == (
        "only one step ran with a new Adam, and its state of 24.00 MiB was allocated last: "
        "the next step needs 24.00 MiB more (run two steps, or, if a fixture makes the "
        "optimizer, write warmup=1)"
    )
    found, two = hints("ran with a new", STEPS.replace("STEPS", "2"))
    assert found == []
    assert two - one == 24


def test_where_the_step_itself_was_the_peak_the_next_needs_less_than_the_state(hints):
    """The first peak is in the optimizer's step, with its state; how much more the next has depends
    on the workspaces of matrix products, which not every version of PyTorch keeps."""
    small = STEPS.replace("batch()", "torch.randn(64, N, device='cuda')")
    first, one = hints("ran with a new", small.replace("STEPS", "1"))
    found, two = hints("ran with a new", small.replace("STEPS", "2"))
    assert found == []
    more = [float(re.search(r"needs ([\d.]+) MiB more", hint)[1]) for hint in first]
    assert sum(more) == two - one
    assert two - one < 24


def test_where_the_first_steps_end_stays_the_peak_there_is_no_hint(hints):
    """Without matrices there are no workspaces: the optimizer's temporaries are the most."""
    body = """
    weight = torch.nn.Parameter(torch.zeros(N, N, device="cuda"))
    optimizer = torch.optim.Adam([weight], foreach=False)
    for _ in range(STEPS):
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    found, one = hints("ran with a new", body.replace("STEPS", "1"))
    _, two = hints("ran with a new", body.replace("STEPS", "2"))
    assert found == []
    assert two == one


def test_after_a_warm_up_no_optimizer_is_fresh(hints):
    """The optimizer is the module's, as a fixture of its scope would be."""
    body = """
    global optimizer, model
    if "optimizer" not in globals():
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
    model(batch()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    """
    assert hints("ran with a new", body, marker="warmup=1")[0] == []


def test_state_that_a_used_optimizer_makes_anew_is_no_hint(suite):
    """As L-BFGS does with what it remembers; the first step was the fixture's."""
    source = f"""{HEAD}
class Renewing(torch.optim.Optimizer):
    def step(self):
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["last"] = torch.zeros_like(weight)

@pytest.fixture(scope="module")
def training():
    model = net()
    optimizer = Renewing(model.parameters(), dict())
    if STEPPED:
        optimizer.step()
    return model, optimizer

@pytest.mark.gpu_memory(baseline=False)
def test_first(training):
    pass  # it makes the fixture, whose step is in no recording of the other

@pytest.mark.gpu_memory(baseline=False)
def test_it(training):
    model, optimizer = training
    model(batch()).sum().backward()
    optimizer.step()
"""
    session = suite.run("-v", "--gpumem-attribution=on", source=source.replace("STEPPED", "False"))
    assert "new Renewing, and its state of 12.00 MiB" in session.flat
    session = suite.run("-v", "--gpumem-attribution=on", source=source.replace("STEPPED", "True"))
    assert session.outcomes == {"passed": 2}
    assert "state of 12.00 MiB was allocated last: the next step needs" not in session.out


def test_of_two_optimizers_the_fresh_one_alone_is_named(hints):
    found, _ = hints(
        "ran with a new",
        """
    one, other, x = net(), net(), batch()
    adam = torch.optim.Adam(one.parameters())
    rms = torch.optim.RMSprop(other.parameters())
    for step in range(2):
        one(x).sum().backward()
        adam.step()
        adam.zero_grad()
    other(x).sum().backward()
    rms.step()
    """,
    )
    (hint,) = found
    assert "new RMSprop, and its state of 12.00 MiB" in hint
    assert "Adam" not in hint


def test_an_optimizer_without_state_is_no_hint(hints):
    body = STEPS.replace("STEPS", "1").replace("Adam(model.parameters(), foreach=False)", "SGD(P)")
    assert hints("ran with a new", body.replace("SGD(P)", "SGD(model.parameters())"))[0] == []


def test_the_report_of_a_failure_has_the_hint_in_place_of_the_note(suite):
    """The note has no number of the peak."""
    text = STEPS.replace("STEPS", "1")
    mark = "@pytest.mark.gpu_memory(max_allocated_gib=0.01)"
    session = suite.run(source=f"{HEAD}\n{mark}\ndef test_it():{text}")
    assert session.outcomes == {"failed": 1}
    assert "hint: only one step ran with a new Adam" in session.flat
    assert "note: only one step ran" not in session.flat
    session = suite.run("--gpumem-attribution=off")
    assert "hint:" not in session.out
    assert "note: only one step ran with a new Adam" in session.flat


# -- gradients kept --

KEPT = """
    model, x = net(), batch()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=SET)
"""


def test_gradients_kept_over_zero_grad_are_told_with_what_they_cost(hints):
    (hint,), kept = hints("gradients", KEPT.replace("SET", "False"))
    assert hint == (
        "gradients of 12.00 MiB that the optimizer had already used were still allocated "
        "at the peak: zero_grad() before the forward pass frees them (set_to_none=False "
        "keeps them)"
    )
    found, freed = hints("gradients", KEPT.replace("SET", "True"))
    assert found == []
    assert kept - freed == 12


def test_gradients_freed_after_the_forward_only_are_told(hints):
    """As where zero_grad() stands between the forward and the backward."""
    found, _ = hints(
        "gradients",
        """
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        loss = model(batch()).sum()
        with torch.no_grad():
            model(batch()), mib(512)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """,
    )
    assert found[0].startswith("gradients of 12.00 MiB that the optimizer had already used")


def test_gradients_that_accumulate_are_no_hint(hints):
    assert (
        hints(
            "gradients",
            """
    model, x = net(), batch()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        for _ in range(3):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """,
        )[0]
        == []
    )


def test_gradients_at_a_peak_in_the_optimizers_step_are_no_hint(hints):
    """They are needed there."""
    found, _ = hints(
        "gradients",
        """
    model, x = net(), batch()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: held.append(mib(500)))
    optimizer.register_step_post_hook(lambda *_: held.clear())
    held = []
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    """,
    )
    assert found == []


# -- graphs kept --


def test_losses_kept_with_their_graph_are_told_with_what_they_hold(hints):
    """Each forward leaves three outputs of 32 MiB; the fifth is the newest."""
    found, _ = hints(
        "earlier forward",
        """
    model, x, losses = net(), batch(), []
    for _ in range(5):
        losses.append(model(x).square().mean())
    """,
    )
    assert found[0] == (
        "activations of 384.00 MiB from 4 earlier forward passes were still allocated at "
        "the peak: a tensor keeps their autograd graph; loss.item() and loss.detach() keep "
        "no graph, and torch.no_grad() makes none"
    )


def test_what_reference_cycles_keep_without_a_graph_is_not_said_to_have_one(suite):
    """Nor would smaller batches lower it."""
    source = f"""{HEAD}
class Cycle:
    def __init__(self, x):
        self.me, self.x = self, x

class Net(torch.nn.Module):
    def forward(self, x):
        self.made = Cycle(mib(64))
        return x + 1

@pytest.mark.gpu_memory(max_allocated_gib=0.25, baseline=False)
def test_it():
    net = Net()
    for _ in range(8):
        net(mib(4))
"""
    session = suite.run(source=source)
    assert session.outcomes == {"failed": 1}
    assert "detach" not in session.flat
    assert "next: try to delete the references to the memory of the largest lines" in session.flat
    assert "and to break reference cycles" in session.flat
    assert "micro-batch" not in session.flat


def test_models_that_are_garbage_are_not_helped_by_smaller_batches(suite):
    source = f"""{HEAD}
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2**24, device="cuda"))
        self.call = self.forward

@pytest.mark.gpu_memory(max_allocated_gib=0.25, baseline=False)
def test_it():
    import gc
    for _ in range(8):
        Net()
    gc.collect()
"""
    session = suite.run(source=source)
    assert session.outcomes == {"failed": 1}
    assert "and to break reference cycles" in session.flat
    assert "micro-batch" not in session.flat


def test_a_graph_that_a_backward_retains_is_told(hints):
    """The peak is in the fourth backward."""
    found, _ = hints(
        "earlier forward",
        """
    model, x, total = net(), batch(), []
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        total.append(loss)
    """,
    )
    assert found[0].startswith("activations of 288.00 MiB from 3 earlier forward passes")


@pytest.mark.parametrize(
    "body",
    [
        "losses.append(model(x).square().mean().detach())",
        "losses.append(model(x).square().mean().item())",
        "loss = model(x).square().mean(); loss.backward(); losses.append(loss)",
        "losses.append(model(x).detach())",
        "with torch.no_grad(): losses.append(model(x))",
        "with torch.no_grad(): losses += [model[1](layer := model[0](x)), layer]",
        "model[0].register_forward_hook(keep); torch.no_grad()(model)(x)",
        "losses.append(model(x)); losses[-1].sum().backward()",
        "loss = model(x).square().mean()",
    ],
)
def test_what_holds_no_older_graph_is_no_hint(hints, body):
    found, _ = hints(
        "earlier forward",
        f"""
    model, x, losses = net(), batch(), []
    def keep(module, given, output):
        losses.append(output)
    for _ in range(5):
        {body}
    """,
    )
    assert found == []


def test_a_graph_that_no_backward_uses_is_told(hints):
    """Two of three outputs are kept by the graph alone."""
    found, _ = hints("no backward", "model, x = net(), batch()\nloss = model(x).square().mean()")
    (hint,) = found
    assert hint == (
        "activations of 64.00 MiB are of a forward pass that no backward pass followed: "
        "torch.no_grad() frees them during the pass"
    )


@pytest.mark.parametrize(
    "body",
    [
        "model(x).sum().backward()",
        "with torch.no_grad(): kept = model(x)",
        "model.requires_grad_(False); kept = model(x)",
        "kept = [model[0](x), model[0](x)]",  # outputs, of which each is used
        "losses = [model(x).mean() for _ in range(3)]; sum(losses).backward()",
        "losses = [model(x).mean() for _ in range(3)]",  # of earlier forwards: another hint
    ],
)
def test_what_a_backward_uses_or_no_graph_keeps_is_not_told(hints, body):
    assert hints("no backward", f"model, x = net(), batch()\n{body}")[0] == []


def test_forwards_of_one_backward_are_no_hint(hints):
    """What they leave is needed, and freed by it."""
    found, _ = hints(
        "earlier forward",
        """
    model, x = net(), batch()
    for _ in range(2):
        loss = sum(model(x).square().mean() for _ in range(4))
        loss.backward()
    """,
    )
    assert found == []


def test_what_a_module_caches_is_no_hint(hints):
    """Of the first forward for ever, and of each until the next is nearly over."""
    found, _ = hints(
        "earlier forward",
        """
    class Caching(torch.nn.Module):
        cache = last = None
        def forward(self, x):
            if self.cache is None:
                self.cache = batch()
            out = x + self.cache
            self.last = out * 2
            return out
    model, x = Caching(), batch(requires_grad=True)
    for _ in range(5):
        model(x)
    """,
    )
    assert found == []


def test_hints_of_what_passed_are_for_those_who_ask(suite):
    """What fails says its own in its report."""
    mark = "@pytest.mark.gpu_memory(baseline=False)"
    text = STEPS.replace("STEPS", "1")
    source = f"{HEAD}\n{mark}\ndef test_one():{text}\n{mark}\ndef test_other():{text}"
    session = suite.run("--gpumem-attribution=on", source=source)
    assert "hint:" not in session.out
    assert "note: only one step ran with a new Adam" in session.flat
    session = suite.run("--gpumem-attribution=on", "-v")
    assert session.out.count("hint: only") == 1
    assert ", write warmup=1) (2 tests)" in session.flat
    assert "hint:" not in suite.run("-v").out


def test_a_fresh_optimizer_that_another_one_steps_is_named(hints):
    (hint,), _ = hints(
        "ran with a new",
        """
        class Lookahead(torch.optim.Optimizer):
            def __init__(self, base):
                self.base, self.param_groups, self.state = base, base.param_groups, {1: 1}
                self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}

            def step(self):
                self.base.step()

        model, x = net(), batch()
        optimizer = Lookahead(torch.optim.Adam(model.parameters(), foreach=False))
        optimizer._patch_step_function()
        model(x).sum().backward()
        optimizer.step()
        """,
    )
    assert hint.startswith("only one step ran with a new Adam, and its state of 24.00 MiB")
