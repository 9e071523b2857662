"""Seeing that a step was the first of its optimizer, whose state comes last."""

import pytest
from helpers.virtual_gpu import CARD_80GIB, MIB, virtual_card

from pytest_gpumem.recording.optimizer_watch import OptimizerWatch

N = 2 * MIB
"""elements of the parameter: 8 MiB"""


@pytest.fixture
def watch():
    with virtual_card(CARD_80GIB):
        watch = OptimizerWatch()
        watch.start()
        yield watch
        watch.stop()


def made(name="Adam", **options):
    import torch

    param = torch.nn.Parameter(torch.zeros(N, device="cuda"))
    param.grad = torch.zeros_like(param)
    return getattr(torch.optim, name)([param], **options)


def test_one_step_with_a_fresh_optimizer_is_noted_with_its_states_size(watch):
    optimizer = made(foreach=False)
    optimizer.step()
    (note,) = watch.notes()
    assert note == (
        "only one step ran with a new Adam, and its state of 16.00 MiB was allocated last: the "
        "next step's peak includes this state; run two steps, or, if a fixture makes the "
        "optimizer, write warmup=1"
    )


def test_parameters_without_a_gradient_are_noted_where_some_have_one(watch):
    import torch

    experts = [torch.nn.Parameter(torch.zeros(N, device="cuda")) for _ in range(3)]
    frozen = torch.nn.Parameter(torch.zeros(N, device="cuda"), requires_grad=False)
    optimizer = torch.optim.SGD([*experts, frozen], lr=0.1)
    optimizer.step()
    assert watch.notes_on_gradients() == []
    for trained in ([0], [1, 2], [0, 1, 2]):
        optimizer.zero_grad()
        sum(experts[index].sum() for index in trained).backward()
        optimizer.step()
    (note,) = watch.notes_on_gradients()
    assert note.startswith("parameters of 16.00 MiB got no gradient in a step of SGD, so the")
    watch.forget()
    optimizer.step()
    assert watch.notes_on_gradients() == []


def test_two_steps_need_no_note(watch):
    optimizer = made()
    optimizer.step()
    optimizer.step()
    assert watch.notes() == []


def test_an_optimizer_without_state_needs_no_note(watch):
    made("SGD", lr=0.1).step()
    assert watch.notes() == []


def test_one_that_was_stepped_before_needs_no_note(watch):
    optimizer = made()
    watch.stop()
    optimizer.step()
    watch.start()
    optimizer.step()
    assert watch.notes() == []


def test_after_a_warm_up_nothing_is_fresh(watch):
    optimizer = made()
    optimizer.step()
    watch.forget()
    optimizer.step()
    assert watch.notes() == []


def test_each_fresh_optimizer_is_noted(watch):
    one, other = made(), made("RMSprop")
    one.step()
    other.step()
    assert [note.split(",")[0] for note in watch.notes()] == [
        "only one step ran with a new Adam",
        "only one step ran with a new RMSprop",
    ]


def test_one_that_came_where_another_was_freed_is_not_taken_for_it(watch, monkeypatch):
    """Python gives a new object a freed one's id."""
    monkeypatch.setattr("builtins.id", lambda _: 7)
    one, other = made(), made("RMSprop")
    one.step()
    other.step()
    monkeypatch.undo()
    (note,) = watch.notes()
    assert "RMSprop" in note


def test_state_on_the_host_is_not_counted(watch):
    import torch

    param = torch.nn.Parameter(torch.zeros(N))
    param.grad = torch.zeros_like(param)
    torch.optim.Adam([param]).step()
    assert watch.notes() == []


def test_nothing_is_seen_after_the_end(watch):
    watch.stop()
    made().step()
    assert watch.notes() == []


def test_a_measurement_does_not_keep_an_optimizer_alive(watch):
    import gc
    import weakref

    optimizer = made()
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert len(watch.notes()) == 1


def test_a_step_that_calls_its_bases_is_one_step(watch):
    import torch

    torch.optim.SGD([torch.zeros(1)])  # hooks are called around SGD's own step from now on

    class Two(torch.optim.SGD):
        def step(self):
            super().step()

    told = []
    watching = OptimizerWatch(lambda: told.append("before"), lambda _: told.append("after"))
    watching.start()
    try:
        Two([torch.zeros(1, requires_grad=True)]).step()
    finally:
        watching.stop()
    assert told == ["before", "after"]


class Lookahead:
    """As timm's: it steps another optimizer, and PyTorch hooks its class later, if at all."""

    def __new__(cls, base):
        import torch

        class Outer(torch.optim.Optimizer):
            def __init__(self):
                self.base = base
                self.param_groups, self.state, self.defaults = base.param_groups, {}, {}
                self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}

            def step(self):
                self.base.step()

        return Outer()


def test_steps_of_an_optimizer_that_another_one_steps_count_for_it(watch):
    optimizer = Lookahead(made("RAdam"))
    optimizer.step()
    assert len(watch.notes()) == 1
    optimizer._patch_step_function()  # as what is unpickled or copied is
    optimizer.step()
    assert watch.notes() == []


def test_what_measures_is_told_of_the_outermost_step_alone(watch):
    told = []
    watching = OptimizerWatch(lambda: told.append("before"), lambda it: told.append(type(it)))
    watching.start()
    try:
        optimizer = Lookahead(made("RAdam"))
        optimizer._patch_step_function()
        for _ in range(2):
            optimizer.step()
    finally:
        watching.stop()
    assert told == ["before", type(optimizer)] * 2


def test_a_step_that_an_error_ended_is_around_no_later_one(watch):
    optimizer = Lookahead(made("RAdam"))
    optimizer._patch_step_function()
    optimizer.base.param_groups[0]["params"].append(None)
    with pytest.raises(AttributeError):
        optimizer.step()
    optimizer.base.param_groups[0]["params"].pop()
    optimizer.base.step()
    assert len(watch.notes()) == 1


def test_the_state_of_a_tensor_subclass_is_that_of_the_tensors_it_wraps(watch):
    import torch
    from helpers.wrapped_tensors import wrapped

    class Quantized(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["half"] = wrapped(torch.zeros_like(param)[: N // 4])

    param = torch.nn.Parameter(torch.zeros(N, device="cuda"))
    Quantized([param]).step()
    (note,) = watch.notes()
    assert "its state of 2.00 MiB was allocated last" in note


FIXTURE = """
@pytest.fixture
def training():
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model)
    optimizer.step()
    return model, optimizer

def step(model):
    model(torch.zeros(1024, 1024, device="cuda")).sum().backward()

@pytest.mark.gpu_memory(baseline=False)
def test_it(training):
    model, optimizer = training
    {body}
"""


@pytest.mark.parametrize(("body", "noted"), [("step(model)", False), ("mib(4)", True)])
def test_a_step_in_a_fixture_before_the_tests_own_pass_is_no_note(suite, body, noted):
    """The state lies beside the test's activations and gradients."""
    session = suite.run("-v", source=FIXTURE.replace("{body}", body))
    assert session.outcomes == {"passed": 1}
    assert ("only one step ran with a new AdamW" in session.flat) is noted
