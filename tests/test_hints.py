"""What a recording shows that raises a peak: each hint with its number, and where there is none."""

from __future__ import annotations

import re

import pytest

from pytest_gpumem.hints import fragmentation, is_fragmented
from pytest_gpumem.records import Peak
from pytest_gpumem.sizes import MIB

HEAD = """
import pytest, torch
from torch.nn import Linear, Sequential

N, BATCH = 1024, 8192
'''A layer's parameters are 4 MiB, its outputs 32 MiB.'''

def mib(n, device="cuda"):
    return torch.empty(int(n * 2**20), dtype=torch.uint8, device=device)

def net(layers=3, **options):
    made = [Linear(N, N, bias=False, device="cuda", **options) for _ in range(layers)]
    return Sequential(*made)

def batch(**options):
    return torch.randn(BATCH, N, device="cuda", **options)

"""


@pytest.fixture
def hints(suite):
    """Run a test recorded; return its hints that have a word, and its peak allocated in MiB."""

    def run(word, body, marker=""):
        lines = body.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        source = "\n".join(f"    {line[indent:]}" for line in lines)
        mark = f"@pytest.mark.gpu_memory(baseline=False, {marker})"
        suite.write("test_it.py", f"{HEAD}\n{mark}\ndef test_it():\n{source}\n")
        session = suite.run("-v", "--gpumem-attribution=on")
        assert session.outcomes == {"passed": 1}, session.out
        found = re.findall(r"hint: (.*?) \(1 test\)", session.flat)
        return [hint for hint in found if word in hint], session.figures()["test_it"][0]

    return run


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
    (hint,), one = hints("fresh", STEPS.replace("STEPS", "1"))
    assert hint == (
        "only one step ran with a fresh Adam, whose state of 24.00 MiB came last: the next step "
        "needs 24.00 MiB more (run two steps, or give warmup=1)"
    )
    found, two = hints("fresh", STEPS.replace("STEPS", "2"))
    assert found == []
    assert two - one == 24


def test_where_the_step_itself_was_the_peak_the_next_needs_less_than_the_state(hints):
    """The first peak is in the optimizer's step, with its state; how much more the next has depends
    on the workspaces of matrix products, which not every version of PyTorch keeps."""
    small = STEPS.replace("batch()", "torch.randn(64, N, device='cuda')")
    first, one = hints("fresh", small.replace("STEPS", "1"))
    found, two = hints("fresh", small.replace("STEPS", "2"))
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
    found, one = hints("fresh", body.replace("STEPS", "1"))
    _, two = hints("fresh", body.replace("STEPS", "2"))
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
    assert hints("fresh", body, marker="warmup=1")[0] == []


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
    assert "fresh Renewing, whose state of 12.00 MiB" in session.flat
    session = suite.run("-v", "--gpumem-attribution=on", source=source.replace("STEPPED", "True"))
    assert session.outcomes == {"passed": 2}
    assert "whose state" not in session.out


def test_of_two_optimizers_the_fresh_one_alone_is_named(hints):
    found, _ = hints(
        "fresh",
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
    assert "fresh RMSprop, whose state of 12.00 MiB" in hint
    assert "Adam" not in hint


def test_an_optimizer_without_state_is_no_hint(hints):
    body = STEPS.replace("STEPS", "1").replace("Adam(model.parameters(), foreach=False)", "SGD(P)")
    assert hints("fresh", body.replace("SGD(P)", "SGD(model.parameters())"))[0] == []


def test_the_report_of_a_failure_has_the_hint_in_place_of_the_note(suite):
    """The note has no number of the peak."""
    text = STEPS.replace("STEPS", "1")
    mark = "@pytest.mark.gpu_memory(max_allocated_gib=0.01)"
    session = suite.run(source=f"{HEAD}\n{mark}\ndef test_it():{text}")
    assert session.outcomes == {"failed": 1}
    assert "hint: only one step ran with a fresh Adam" in session.flat
    assert "note: one step ran" not in session.flat
    session = suite.run("--gpumem-attribution=off")
    assert "hint:" not in session.out
    assert "note: one step ran with a fresh Adam" in session.flat


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
        "gradients of 12.00 MiB that the optimizer had used already were still held at the peak: "
        "zero_grad() before the forward frees them (set_to_none=False keeps them)"
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
    assert found[0].startswith("gradients of 12.00 MiB that the optimizer had used already")


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
        "activations of 384.00 MiB from 4 earlier forward passes were still held at the peak: a "
        "tensor keeps their graph; loss.item() or loss.detach() does not, and torch.no_grad() "
        "makes none"
    )


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


# -- float32 --

FORWARDS = """
    model, x = net(16, dtype=DTYPE), batch(dtype=DTYPE)
    with torch.autocast("cuda", torch.bfloat16, enabled=AUTOCAST):
        model(x).sum().backward()
"""


def forwards(dtype="torch.float32", *, autocast=False):
    return FORWARDS.replace("DTYPE", dtype).replace("AUTOCAST", str(autocast))


def test_float32_activations_are_told_with_about_half_of_them(hints):
    (hint,), full = hints("autocast", forwards())
    activations, half = map(float, re.findall(r"([\d.]+) MiB", hint))
    assert hint.startswith("activations take ")
    assert "torch.autocast('cuda', torch.bfloat16) would about halve them" in hint
    assert activations == 15 * 32  # the inputs of all layers but the first
    assert half == activations / 2
    found, less = hints("autocast", forwards(autocast=True))
    assert found == []
    assert full - less == pytest.approx(half, rel=0.3)


def test_bfloat16_parameters_are_no_hint(hints):
    assert hints("autocast", forwards("torch.bfloat16"))[0] == []


def test_parameters_of_two_types_are_no_hint(hints):
    assert (
        hints(
            "autocast",
            """
    net(1, dtype=torch.half)(batch(dtype=torch.half))
    net(16)(batch()).sum().backward()
    """,
        )[0]
        == []
    )


def test_where_parameters_are_the_most_it_is_no_hint(hints):
    assert (
        hints(
            "autocast",
            """
    model = net(16)
    model(batch()[:64].clone()).sum().backward()
    """,
        )[0]
        == []
    )


def test_an_older_card_is_told_of_float16(hints):
    (hint,), _ = hints("autocast", forwards(), marker="card='T4'")
    assert "torch.autocast('cuda', torch.float16)" in hint


# -- fragmentation --

FRAGMENTED = """
    keep = []
    for i in range(1, 20):
        large = mib(20 * i)
        keep.append(mib(4))
        del large
"""


def test_fragmentation_is_told_with_what_expandable_segments_reserve(suite, hints):
    """Each larger tensor needs a segment of its own: the rooms before it hold 4 MiB each."""
    import torch

    (hint,), allocated = hints("peak reserved", FRAGMENTED)
    assert allocated == 456
    above, with_them, less = map(float, re.findall(r"([\d.]+) MiB", hint))
    reserved = above + allocated
    assert with_them + less == reserved
    assert not torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]

    suite.write("conftest.py", "import torch")
    program = f"""
    import pytest_gpumem
    pytest_gpumem.use_virtual_gpu("H100")
    {HEAD.replace("import pytest, torch", "import torch").replace(chr(10), chr(10) + "    ")}
    with pytest_gpumem.measure() as measured:
    {FRAGMENTED.replace(chr(10), chr(10) + "    ")}
    print(measured.peak_reserved)
    """
    assert int(suite.python(program).out) == reserved * MIB
    suite.pytester._monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert int(suite.python(program).out) == with_them * MIB


def test_the_hint_of_a_failure_costs_runs_and_one_of_a_success_none(suite):
    """A third one: the second is recorded."""
    source = f"""{HEAD}
runs = []
def teardown_module():
    print("runs:", len(runs))

@pytest.mark.gpu_memory(max_reserved_gib=LIMIT)
def test_it():
    runs.append(1)
{FRAGMENTED}
"""
    session = suite.run("-s", source=source.replace("LIMIT", "1"))
    assert session.outcomes == {"failed": 1}
    assert "expandable_segments:True this step reserves 560.00 MiB" in session.flat
    assert "runs: 3" in session.out
    session = suite.run("-s", source=source.replace("LIMIT", "8"))
    assert session.outcomes == {"passed": 1}
    assert "runs: 1" in session.out
    assert "hint:" not in session.out


def test_a_step_that_does_not_fit_is_told_what_it_would_take(suite):
    mark = "@pytest.mark.gpu_memory(max_gib=0.4)"
    session = suite.run(source=f"{HEAD}\n{mark}\ndef test_it():{FRAGMENTED}")
    assert session.outcomes == {"failed": 1}
    assert "it needs 3820.00 MiB" in session.flat
    assert (
        "expandable_segments:True this step reserves 560.00 MiB, 3260.00 MiB less" in session.flat
    )


def test_little_waste_is_not_tried(hints):
    assert hints("peak reserved", "keep = [mib(100) for _ in range(9)]")[0] == []


def test_settings_of_the_allocator_are_put_back(virtual_gpu):
    from pytest_gpumem.settling import _set_allocator, expandable_segments

    def settings():
        return virtual_gpu.cuda.memory._snapshot()["allocator_settings"]

    before = settings()
    try:
        _set_allocator("max_split_size_mb:64")
        with expandable_segments() as anew:
            assert anew
            assert settings()["expandable_segments"]
            assert settings()["max_split_size"] == 64 * MIB
            with expandable_segments() as again:
                assert not again
        assert not settings()["expandable_segments"]
        assert settings()["max_split_size"] == 64 * MIB
        assert settings()["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    finally:
        _set_allocator(before["PYTORCH_CUDA_ALLOC_CONF"] or "")
    assert settings() == before


def test_a_real_gpu_is_not_asked_for_another_run(suite, monkeypatch):
    """As a GPU that computes: the hint has no number of its own."""
    monkeypatch.setattr("pytest_gpumem.devices.virtual.VirtualDevice.computes", True)
    mark = "@pytest.mark.gpu_memory(max_reserved_gib=1)"
    source = f"{HEAD}\nruns = []\n{mark}\ndef test_it():\n    runs.append(1){FRAGMENTED}"
    session = suite.run(source=f"{source}\ndef test_runs(): assert len(runs) == 2\n")
    assert session.outcomes == {"failed": 1, "passed": 1}
    assert (
        "hint: peak reserved is 3364.00 MiB above peak allocated: the allocator's" in session.flat
    )
    assert "this step reserves" not in session.flat


def test_hints_of_what_passed_are_for_those_who_ask(suite):
    """What fails says its own in its report."""
    mark = "@pytest.mark.gpu_memory(baseline=False)"
    text = STEPS.replace("STEPS", "1")
    source = f"{HEAD}\n{mark}\ndef test_one():{text}\n{mark}\ndef test_other():{text}"
    session = suite.run("--gpumem-attribution=on", source=source)
    assert "hint:" not in session.out
    assert "note: one step ran with a fresh Adam" in session.flat
    session = suite.run("--gpumem-attribution=on", "-v")
    assert session.out.count("hint: only") == 1
    assert "needs 24.00 MiB more (run two steps, or give warmup=1) (2 tests)" in session.flat
    assert "hint:" not in suite.run("-v").out


PLAIN = Peak(1000 * MIB, 2000 * MIB)


@pytest.mark.parametrize(
    ("peak", "worth"),
    [
        (PLAIN, True),
        (Peak(1000 * MIB, 1512 * MIB), False),
        (Peak(1000 * MIB, 1513 * MIB), True),
        (Peak(8000 * MIB, 9999 * MIB), False),
        (Peak(8000 * MIB, 10001 * MIB), True),
    ],
)
def test_waste_is_worth_a_run_from_a_fifth_and_half_a_gib_on(peak, worth):
    assert is_fragmented(peak) is worth


def test_on_a_real_gpu_no_number_is_made_up():
    assert fragmentation(PLAIN, None) == (
        "peak reserved is 1000.00 MiB above peak allocated: the allocator's memory is fragmented, "
        "or cached; try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )


def test_where_expandable_segments_give_nothing_there_is_no_hint():
    assert fragmentation(PLAIN, Peak(1000 * MIB, 1990 * MIB)) == ""
    assert "1970.00 MiB, 30.00 MiB less" in fragmentation(PLAIN, Peak(1000 * MIB, 1970 * MIB))
