"""What is recorded, in its order, with nothing changed, held or left hooked."""

import contextlib
import itertools
import re
import time
import warnings

import pytest
from helpers.recorded_runs import (
    PARAMETERS,
    ROOT,
    WIDTH,
    data,
    explained,
    linears,
    of_part,
    recorded,
    train,
)
from helpers.virtual_gpu import CARD_80GIB, virtual_card

from pytest_gpumem.explain.explanations import explanations
from pytest_gpumem.spec import MemorySpec
from pytest_gpumem.testrun.run import Run


def begun_again(torch, *, record):
    """The categories of an optimizer's step after a run that was begun again."""
    with recorded() as run:
        model = linears(torch)
        adam = torch.optim.Adam(model.parameters())
        train(torch, run, model, adam, steps=1)
        run.begin_again(record=record)
        train(torch, run, model, adam, steps=1)
        return of_part(run, "optimizer")


def test_after_a_restart_what_was_made_before_is_still_known(torch):
    found = begun_again(torch, record=False)
    assert found["parameters"] == 3 * PARAMETERS
    assert found["optimizer state"] == 2 * 3 * PARAMETERS


def test_a_second_recording_knows_what_was_made_before(torch):
    found = begun_again(torch, record=True)
    assert found["parameters"] == 3 * PARAMETERS
    assert found["optimizer state"] == 2 * 3 * PARAMETERS


def test_a_step_that_an_error_ended_swallows_no_later_one(torch):
    class Failing(torch.optim.Adam):
        fails = True

        def step(self):
            if self.fails:
                raise ArithmeticError
            super().step()

    with recorded() as run:
        model = linears(torch)
        adam = Failing(model.parameters())
        with pytest.raises(ArithmeticError):
            train(torch, run, model, adam, steps=1)
        adam.fails = False
        between = time.time_ns() / 1000
        train(torch, run, model, adam, steps=2)
        recording = run.meter.recording.stop()
    steps = [it for it in recording.passes() if it.name == "optimizer"]
    assert len(steps) == 3
    assert all(one.end < other.start for one, other in itertools.pairwise(steps))
    assert between < steps[0].end < recording.calls()[4].end  # the next forward's
    assert steps[2].end < float("inf")
    assert [list(it.fresh.values()) for it in steps] == [["Failing"], ["Failing"], [""]]


def test_a_closure_runs_within_its_step(torch):
    with recorded() as run:
        model = linears(torch)
        adam = torch.optim.Adam(model.parameters())

        def closure():
            adam.zero_grad()
            loss = model(data(torch)).sum()
            loss.backward()
            return loss

        adam.step(closure)
        recording = run.meter.recording.stop()
    (step,) = [it for it in recording.passes() if it.name == "optimizer"]
    (backward,) = [it for it in recording.passes() if it.name == "backward"]
    assert step.start <= recording.calls()[0].start
    assert backward.end < step.end < float("inf")


def test_calls_that_end_in_another_order_are_told_apart(torch):
    """A module's forward may be left by an error that its caller catches, without a warning."""

    class Fails(torch.nn.Module):
        def forward(self, x):
            raise ArithmeticError

    class Catches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fails, self.last = Fails(), torch.nn.Linear(WIDTH, WIDTH, device="cuda")

        def forward(self, x):
            with contextlib.suppress(ArithmeticError):
                self.fails(x)
            return self.last(x)

    with recorded() as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        Catches()(data(torch)).sum().backward()
        recording = run.meter.recording.stop()
    ends = {it.path: it.end for it in recording.calls()}
    assert list(ends) == ["Catches", "Catches.fails", "Catches.last"]
    assert ends["Catches.fails"] < ends["Catches.last"] < ends["Catches"] < float("inf")


def test_a_compiled_module_warns_of_no_hook(torch):
    """PyTorch warns of global hooks on modules, and many suites make warnings errors."""
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    with recorded(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*global hooks")
        compiled(torch.ones(1, 2))


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_ends_once_and_before_the_modules_own_hooks(torch, fails):
    class Failing(torch.nn.Module):
        def forward(self, x):
            if fails:
                raise ArithmeticError
            return x

    module, hooked = Failing(), []
    module.register_forward_hook(lambda *_: hooked.append(time.time_ns() / 1000))
    with recorded() as run:
        with contextlib.suppress(ArithmeticError):
            module(torch.ones(1))
        recording = run.meter.recording.stop()
    assert recording.moment == 2
    assert len(hooked) == (not fails)
    assert recording.calls()[0].end <= min(hooked, default=time.time_ns() / 1000)
    assert len(module._forward_hooks) == 1


def test_parameters_that_a_forward_has_used_can_be_swapped(torch, request):
    """PyTorch refuses to swap tensors to which there are weak references."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    request.addfinalizer(lambda: torch.__future__.set_swap_module_params_on_conversion(False))
    with recorded():
        net = linears(torch)
        net(data(torch))
        net.half()
        assert {parameter.dtype for parameter in net.parameters()} == {torch.float16}


def test_methods_of_a_programs_tensors_are_not_called(torch):
    """As PyTorch's ExpandedWeight, which raises for functions that it does not know."""
    called = []

    class Parameter(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            called.append(func.__name__)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    def step(device):
        net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()).to(device)
        net[0].weight = Parameter(net[0].weight.detach())
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, foreach=False)
        called.clear()
        net(torch.ones(2, WIDTH, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [*called]

    expected = step("cpu")
    assert "linear" in expected
    with recorded():
        assert step("cuda") == expected


@pytest.mark.parametrize("where", ["around", "inside", "nowhere"])
def test_autocast_is_noted_around_a_module_and_inside(torch, where):
    class Casting(torch.nn.Module):
        def forward(self, x):
            with torch.autocast("cuda", enabled=where == "inside") as context:
                assert type(context) is kind
                return x + 1

    with torch.autocast("cpu") as unrecorded:
        kind = type(unrecorded)  # older versions of PyTorch give None
    casting = Casting()
    with recorded() as run:
        with torch.autocast("cuda", enabled=where == "around"):
            casting(torch.ones(1, device="cuda"))
        assert run.meter.recording.stop().autocast == (where != "nowhere")


def test_a_module_without_its_init_is_refused_by_pytorch(torch):
    class Bare(torch.nn.Module):
        def __init__(self):
            pass

        def forward(self, x):
            return x

    with pytest.raises(AttributeError) as plain:
        Bare()(torch.ones(1))
    with recorded(), pytest.raises(AttributeError, match=re.escape(str(plain.value))):
        Bare()(torch.ones(1))


@pytest.mark.parametrize("owner", ["class", "module"])
def test_a_modules_own_code_for_calls_is_run(torch, owner):
    class Own(torch.nn.Module):
        def forward(self, x):
            return x

    module = Own()
    if owner == "class":
        Own._call_impl = lambda self, x: 2 * self.forward(x)
    else:
        module._call_impl = lambda x: 2 * module.forward(x)
    with recorded():
        assert module(torch.ones(1)).item() == 2


def test_a_tracer_sees_the_modules_that_are_called(torch):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with recorded():
        graph = torch.jit.trace(net, torch.ones(1, 2)).graph
    assert "prim::CallMethod" in str(graph)


def test_a_test_that_is_not_recorded_has_no_attribution(torch):
    with virtual_card(CARD_80GIB) as device:
        with Run.open(MemorySpec(), device, ROOT) as run:
            run.start()
        measurement = run.measurement()
        found = explanations(run.recorded([""]), ROOT, timelines=False)
        run.close()
        device.open(CARD_80GIB, 1)
    assert found.recording is None
    assert found.attached("", measurement) == measurement


def test_recording_changes_no_figure(torch):
    def peaks(*, record):
        with virtual_card(CARD_80GIB) as device:
            with Run.open(MemorySpec(), device, ROOT, record=record) as run:
                run.start()
            model = linears(torch, 5)
            adam = torch.optim.AdamW(model.parameters())
            train(torch, run, model, adam, rows=4096)
            measurement = run.measurement()
            run.close()
            del model, adam
            device.open(CARD_80GIB, 1)
            return measurement.peaks, measurement.segments

    assert peaks(record=True) == peaks(record=False)


# As it is reset, Dynamo of torch 2.13 fails in weak references to what earlier tests compiled.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_recording_breaks_no_graph_of_torch_compile(torch):
    def peaks(*, record):
        torch._dynamo.reset()
        with virtual_card(CARD_80GIB) as device:
            with Run.open(MemorySpec(), device, ROOT, record=record) as run:
                run.start()
            layers = [layer for one in linears(torch, 3) for layer in (one, torch.nn.GELU())]
            model = torch.compile(torch.nn.Sequential(*layers), backend="aot_eager")
            adam = torch.optim.AdamW(model.parameters())
            train(torch, run, model, adam, rows=4096)
            measurement = run.measurement()
            if record:
                explained(run)
            breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
            run.close()
            del model, adam, layers
            device.open(CARD_80GIB, 1)
            return measurement.peaks, breaks

    before = peaks(record=False)
    assert peaks(record=True) == before


def test_nothing_is_left_hooked_and_nothing_is_held(torch):
    import weakref

    from torch.nn.modules import module as modules

    before = torch.autograd.backward, torch.autograd.grad, torch.nn.Module._apply
    with recorded() as run:
        model = linears(torch)
        model(data(torch)).sum().backward()
        weight = weakref.ref(model[0].weight)
        del model
        assert weight() is None
        explained(run)
    assert before == (torch.autograd.backward, torch.autograd.grad, torch.nn.Module._apply)
    left = [name for name in dir(modules) if name.startswith("_global_") and "hook" in name]
    assert len(left) > 5
    assert not [name for name in left if getattr(modules, name)]


def test_what_begins_has_no_later_time_than_what_it_allocates_at_once(monkeypatch):
    """The history has whole microseconds: an allocation at 100.95 is at 100, past 100.9 or not."""
    from pytest_gpumem.recording import recording

    monkeypatch.setattr(recording.time, "time_ns", lambda: 100_900)
    assert recording.beginning() == 100
    assert recording.now() == 100.9


def test_a_history_that_overflows_is_said(torch, monkeypatch):
    monkeypatch.setattr("pytest_gpumem.recording.recorder.MAX_EVENTS", 10)
    monkeypatch.setattr("pytest_gpumem.recording.shared_history.MAX_EVENTS", 10)
    with recorded() as run:
        linears(torch)(data(torch)).sum().backward()
        measurement = run.measurement()
        found = explanations(run.recorded([""]), ROOT, timelines=False)
    attached = found.attached("", measurement)
    assert attached.attributions == ()
    assert "history keeps" in attached.note_texts[-1]
