"""Where a peak comes from, against what can be counted: 4 bytes a parameter, 4 a gradient, ..."""

import contextlib
import itertools
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
from virtual_gpu import CARD_80GIB, MIB, opened, virtual_device

from pytest_gpumem.attribution import explain
from pytest_gpumem.records import CATEGORIES, Peak
from pytest_gpumem.running import Retained, Run
from pytest_gpumem.spec import MemorySpec

ROOT = Path(__file__).parent


@pytest.fixture
def torch():
    virtual_device()
    import torch

    return torch


@contextmanager
def recorded(devices=1, owned=()):
    """A run that is recorded, on a card of 80 GiB."""
    with opened(CARD_80GIB, devices) as device:
        spec = MemorySpec(devices=devices)
        with Run.open(spec, device, ROOT, record=True) as run:
            run.start(owned)
        try:
            yield run
        finally:
            run.close()
            device.open(CARD_80GIB, devices)


def explained(run, *parts, timelines=False):
    """The attribution of each device, which has to add up to the peak, of the test or of a part."""
    names = ["", *parts]
    measurement = run.measurement()
    found = explain(run, names, ROOT, timelines=timelines)
    whole = found.attached("", measurement).attributions
    assert len(whole) == len(measurement.peaks)
    for attribution, peak in zip(whole, measurement.peaks, strict=True):
        adds_up(attribution, peak)
    if not parts:
        return whole
    tallies = [run.parts[part].tally for part in parts]
    others = [
        found.attached(part, run.meter.result(tally=tally)).attributions
        for part, tally in zip(parts, tallies, strict=True)
    ]
    for attributions, tally in zip(others, tallies, strict=True):
        for attribution, peak in zip(attributions, tally.peaks, strict=True):
            adds_up(attribution, peak)
    return [whole, *others]


def adds_up(attribution, peak):
    breakdown = attribution.breakdown
    assert attribution.notes == ()
    assert sum(breakdown.categories.values()) == peak.allocated
    assert sum(site.nbytes for site in breakdown.sites) == peak.allocated
    assert breakdown.cached <= peak.reserved
    assert all(value > 0 for value in breakdown.categories.values())


def categories(run):
    return explained(run)[0].breakdown.categories


def rounded(*sizes):
    """Bytes of blocks for so many elements of 4 bytes each."""
    return sum(-(-4 * size // 512) * 512 for size in sizes)


WIDTH = 1024
"""so that a weight takes 4 MiB: of other sizes blocks have rests that PyTorch does not split off"""
PARAMETERS = rounded(WIDTH * WIDTH, WIDTH)
"""bytes of the weight and bias of one linear layer"""


def data(torch, rows=64, **options):
    return torch.zeros(rows, WIDTH, device="cuda", **options)


def linears(torch, number=3):
    return torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(number))
    )


def train(torch, run, model, optimizer, rows=64, steps=2):  # noqa: PLR0913, PLR0917
    """Take steps whose parts are "forward", "backward" and "optimizer"."""
    for _ in range(steps):
        with run.part("forward", {}):
            loss = model(data(torch, rows)).sum()
        with run.part("backward", {}):
            loss.backward()
        with run.part("optimizer", {}):
            optimizer.step()
        optimizer.zero_grad()


def of_part(run, part):
    """The categories at the peak of a part."""
    return explained(run, part)[1][0].breakdown.categories


# ---- the memory equation ----


def test_parameters_gradients_and_adam(torch):
    with recorded() as run:
        model = linears(torch)
        train(torch, run, model, torch.optim.Adam(model.parameters(), foreach=True))
        found = of_part(run, "optimizer")
    assert found["parameters"] == 3 * PARAMETERS
    assert found["gradients"] == 3 * PARAMETERS
    assert found["optimizer state"] == 2 * 3 * PARAMETERS
    assert found["temporaries"] >= 3 * PARAMETERS  # foreach: a temporary each
    assert set(found) - {"workspaces"} == {
        "parameters",
        "gradients",
        "optimizer state",
        "temporaries",
        "activations",  # the loss
    }


def test_fused_adam_has_its_step_counts_on_the_device(torch):
    with recorded() as run:
        model = linears(torch)
        train(torch, run, model, torch.optim.Adam(model.parameters(), fused=True))
        found = of_part(run, "optimizer")
    assert found["optimizer state"] == 2 * 3 * PARAMETERS + 6 * 512
    assert "temporaries" not in found


def test_activations_and_batch_data_are_lines_over_the_batch_size(torch):
    def forward(rows):
        with recorded() as run:
            model = torch.nn.Sequential(*linears(torch), torch.nn.ReLU())
            with run.part("forward", {}):
                out = model(data(torch, rows))
            found = of_part(run, "forward")
            del model, out
            return found

    small, large = forward(4096), forward(8192)
    assert small["batch data"] == rounded(4096 * WIDTH)
    assert large["batch data"] == rounded(8192 * WIDTH)
    # the third linear layer's output is not kept, and still there when ReLU's is made
    assert small["activations"] == 4 * rounded(4096 * WIDTH)
    assert large["activations"] == 4 * rounded(8192 * WIDTH)
    assert small["parameters"] == large["parameters"] == 3 * PARAMETERS


def test_what_a_loss_makes_of_a_models_output_outside_of_modules_is_activations(torch):
    with recorded() as run:
        model = torch.nn.Linear(10, 1 << 20, device="cuda")
        logits = model(torch.zeros(8, 10, device="cuda"))
        loss = logits.exp().log_softmax(-1).sum()
        with run.part("the end of forward", {}):
            pass
        loss.backward()
        _, part = explained(run, "the end of forward")
    found = part[0].breakdown.categories
    assert found["activations"] == 3 * rounded(8 << 20) + 512  # linear, exp, log_softmax, loss


def test_what_nobody_can_tell_is_other(torch):
    with recorded() as run:
        mine = torch.zeros(1 << 20, device="cuda")
        found = categories(run)
        del mine
    assert found == {"other": 4 * MIB}


def test_buffers_are_told_from_parameters(torch):
    with recorded() as run:
        norm = torch.nn.BatchNorm1d(1 << 20, device="cuda")
        found = categories(run)
        del norm
    assert found == {"parameters": 8 * MIB, "buffers": 8 * MIB + 512}


def test_a_model_that_was_moved_there_and_never_called_is_known(torch):
    with recorded() as run:
        model = torch.nn.Linear(WIDTH, WIDTH).cuda()
        found = categories(run)
        del model
    assert found == {"parameters": PARAMETERS}


def test_tied_weights_and_views_count_once(torch):
    with recorded() as run:
        embedding = torch.nn.Embedding(WIDTH, WIDTH, device="cuda")
        model = torch.nn.Sequential(embedding, *linears(torch))
        model[1].weight = embedding.weight
        model.register_buffer("view", embedding.weight.detach()[:10])
        model(torch.zeros(4, dtype=torch.long, device="cuda")).sum().backward()
        found = categories(run)
    assert found["parameters"] == 3 * PARAMETERS  # the first layer's weight is the embedding's
    assert "buffers" not in found


def test_one_flat_storage_of_many_parameters(torch):
    """As FullyShardedDataParallel lays them out: parameters are views of one tensor."""
    with recorded() as run:
        model = linears(torch)
        total = sum(it.numel() for it in model.parameters())
        flat = torch.zeros(total, device="cuda")
        start = 0
        for parameter in model.parameters():
            parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        with run.part("forward", {}):
            model(data(torch))
        found = of_part(run, "forward")
    assert found["parameters"] == rounded(total)


def test_gradients_that_accumulate_lie_beside_the_next_forward(torch):
    with recorded() as run:
        model = linears(torch)
        model(data(torch)).sum().backward()
        with run.part("second forward", {}):
            model(data(torch))
        found = of_part(run, "second forward")
    assert found["gradients"] == 3 * PARAMETERS


def test_recomputed_activations(torch):
    from torch.utils.checkpoint import checkpoint

    rows = rounded(8192 * WIDTH)

    class Model(torch.nn.Module):
        def __init__(self, *, checkpointed):
            super().__init__()
            self.blocks = torch.nn.ModuleList(linears(torch, 4) for _ in range(4))
            self.checkpointed = checkpointed

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            return x

    def peaks(*, checkpointed):
        with recorded() as run:
            model = Model(checkpointed=checkpointed)
            with run.part("forward", {}):
                loss = model(data(torch, 8192, requires_grad=True)).sum()
            with run.part("backward", {}):
                loss.backward()
            _, forward, backward = explained(run, "forward", "backward")
            del model, loss
            return [it[0].breakdown.categories["activations"] // rows for it in (forward, backward)]

    plain, less = peaks(checkpointed=False), peaks(checkpointed=True)
    assert plain[0] == 16
    # the blocks' outputs, and two of the last one's own; in backward its own are made once more
    assert less[0] <= 4 + 2
    assert 4 <= less[1] <= 4 + 4


def test_autocasts_copies_of_weights_are_activations(torch):
    with recorded() as run:
        model = linears(torch)
        with torch.autocast("cuda", dtype=torch.bfloat16), run.part("forward", {}):
            out = model(data(torch, 8))
        found = of_part(run, "forward")
        del out
    assert found["parameters"] == 3 * PARAMETERS
    copies = 3 * 2 * (WIDTH * WIDTH + WIDTH)  # 2 bytes a parameter
    assert copies <= found["activations"] <= copies + 4 * 2 * 8 * WIDTH + 6 * 512


def test_evaluation_keeps_one_layers_output_at_a_time(torch):
    with recorded() as run:
        model = linears(torch, 6)
        with torch.no_grad():
            model(data(torch, 8192))
        found = categories(run)
    assert found["activations"] == 2 * rounded(8192 * WIDTH)


def test_cublas_workspaces_that_outlive_the_step(torch):
    """Of PyTorch that keeps them; newer ones give them back, so that they are temporaries."""
    with recorded() as run:
        model = torch.nn.Linear(100, 100, device="cuda")
        model(torch.zeros(100, 100, device="cuda")).sum().backward()
        found = categories(run)
    kept = found.get("workspaces", 0)
    borrowed = found.get("temporaries", 0)
    assert max(kept, borrowed) >= 32 * MIB
    assert found.get("activations", 0) < MIB


# ---- one rank of several ----


@contextmanager
def rank_of_four(torch):
    """Rank 1 of a distributed run, recorded."""
    with opened(CARD_80GIB) as device:
        spec = MemorySpec(world_size=4, rank=1)
        with Run.open(spec, device, ROOT, record=True) as run:
            run.start([])
        try:
            yield run
        finally:
            run.close()
            device.open(CARD_80GIB, 1)


def test_a_rank_of_fsdp_has_its_shards(torch):
    from torch.distributed.fsdp import fully_shard

    with rank_of_four(torch) as run:
        model = linears(torch, 4)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        train(torch, run, model, torch.optim.Adam(model.parameters()))
        _, forward, optimizer = explained(run, "forward", "optimizer")
    found = optimizer[0].breakdown.categories
    assert found["parameters"] == found["gradients"] == 4 * PARAMETERS // 4
    assert found["optimizer state"] == 2 * 4 * PARAMETERS // 4
    assert "other" not in found
    whole = forward[0].breakdown.categories["parameters"]
    assert whole >= 4 * PARAMETERS // 4 + PARAMETERS  # a layer's whole parameters beside the shards


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("views", "times"), [(False, 2), (True, 1)])
def test_ddps_buckets_are_gradients(torch, views, times, steps):
    """Its first ones, and those that it makes when it knows the order of the gradients."""
    with rank_of_four(torch) as run:
        wrapper = torch.nn.parallel.DistributedDataParallel
        model = wrapper(linears(torch, 4), gradient_as_bucket_view=views)
        train(torch, run, model, torch.optim.Adam(model.parameters()), steps=steps)
        found = of_part(run, "optimizer")
    assert found["parameters"] == 4 * PARAMETERS
    assert found["gradients"] == times * 4 * PARAMETERS
    assert "other" not in found


# ---- runs ----


def test_each_device_has_its_own(torch):
    with recorded(devices=2) as run:
        one = linears(torch, 1)
        two = torch.nn.Linear(WIDTH, 512, device="cuda:1")
        two(one(data(torch)).to("cuda:1")).sum().backward()
        first, second = explained(run)
        del one, two
    assert first.breakdown.categories["parameters"] == PARAMETERS
    assert second.breakdown.categories["parameters"] == rounded(512 * WIDTH, 512)


def test_nothing_at_all(torch):
    with recorded() as run:
        (found,) = explained(run)
    assert found.breakdown.categories == {}
    assert found.breakdown.sites == ()


def test_what_others_hold_is_in_no_category(torch):
    model = None
    with opened(CARD_80GIB):
        model = linears(torch)
    try:
        device = virtual_device()
        spec = MemorySpec()
        with Run.open(spec, device, ROOT, record=True) as run:
            run.start([])
        assert run.meter.others[0].allocated > 0
        model(data(torch)).sum().backward()
        with run.part("after", {}):
            pass
        found = of_part(run, "after")
        run.close()
        assert "parameters" not in found
        assert found["gradients"] == 3 * PARAMETERS
    finally:
        del model


def test_a_wide_fixtures_model_counts_with_what_it_is(torch):
    with opened(CARD_80GIB):
        model = linears(torch)
    try:
        held = Peak(3 * PARAMETERS, 0)
        fixture = Retained("model", (held,), (held,))
        device = virtual_device()
        with Run.open(MemorySpec(), device, ROOT, record=True) as run:
            run.start([fixture])
        model(data(torch)).sum().backward()
        with run.part("after", {}):
            pass
        found = of_part(run, "after")
        run.close()
        assert found["parameters"] == 3 * PARAMETERS
        assert found["gradients"] == 3 * PARAMETERS
    finally:
        del model


def test_after_a_restart_what_was_made_before_is_still_known(torch):
    with recorded() as run:
        model = linears(torch)
        adam = torch.optim.Adam(model.parameters())
        train(torch, run, model, adam, steps=1)
        run.begin_again(record=False)
        train(torch, run, model, adam, steps=1)
        found = of_part(run, "optimizer")
    assert found["parameters"] == 3 * PARAMETERS
    assert found["optimizer state"] == 2 * 3 * PARAMETERS


def test_a_second_recording_knows_what_was_made_before(torch):
    with recorded() as run:
        model = linears(torch)
        adam = torch.optim.Adam(model.parameters())
        train(torch, run, model, adam, steps=1)
        run.begin_again(record=True)
        train(torch, run, model, adam, steps=1)
        found = of_part(run, "optimizer")
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
        recording = run.meter.recording()
    steps = [it for it in recording.passes if it.name == "optimizer"]
    assert len(steps) == 3
    assert all(one.end < other.start for one, other in itertools.pairwise(steps))
    assert between < steps[0].end < recording.calls[4].end  # the next forward's
    assert steps[2].end < float("inf")
    assert [it.fresh for it in steps] == ["Failing", "Failing", ""]


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
        recording = run.meter.recording()
    (step,) = [it for it in recording.passes if it.name == "optimizer"]
    (backward,) = [it for it in recording.passes if it.name == "backward"]
    assert step.start <= recording.calls[0].start
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
        recording = run.meter.recording()
    ends = {it.path: it.end for it in recording.calls}
    assert list(ends) == ["Catches", "Catches.fails", "Catches.last"]
    assert ends["Catches.fails"] < ends["Catches.last"] < ends["Catches"] < float("inf")


def test_a_test_that_is_not_recorded_has_no_attribution(torch):
    with opened(CARD_80GIB) as device:
        with Run.open(MemorySpec(), device, ROOT) as run:
            run.start([])
        measurement = run.measurement()
        found = explain(run, [""], ROOT, timelines=False)
        run.close()
        device.open(CARD_80GIB, 1)
    assert found.recording is None
    assert found.attached("", measurement) == measurement


def test_recording_changes_no_figure(torch):
    def peaks(*, record):
        with opened(CARD_80GIB) as device:
            with Run.open(MemorySpec(), device, ROOT, record=record) as run:
                run.start([])
            model = linears(torch, 5)
            adam = torch.optim.AdamW(model.parameters())
            train(torch, run, model, adam, rows=4096)
            measurement = run.measurement()
            run.close()
            del model, adam
            device.open(CARD_80GIB, 1)
            return measurement.peaks, measurement.segments

    assert peaks(record=True) == peaks(record=False)


def test_recording_breaks_no_graph_of_torch_compile(torch):
    def peaks(*, record):
        torch._dynamo.reset()
        with opened(CARD_80GIB) as device:
            with Run.open(MemorySpec(), device, ROOT, record=record) as run:
                run.start([])
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
    from pytest_gpumem import recording

    monkeypatch.setattr(recording.time, "time_ns", lambda: 100_900)
    assert recording.beginning() == 100
    assert recording.now() == 100.9


def test_a_history_that_overflows_is_said(torch, monkeypatch):
    monkeypatch.setattr("pytest_gpumem.recorder.MOST_EVENTS", 10)
    with recorded() as run:
        linears(torch)(data(torch)).sum().backward()
        measurement = run.measurement()
        found = explain(run, [""], ROOT, timelines=False)
    attached = found.attached("", measurement)
    assert attached.attributions == ()
    assert "history keeps" in attached.notes[-1]


# ---- sites ----


def test_sites_name_the_users_line_and_the_module(torch):
    with recorded() as run:
        model = torch.nn.Sequential(*(linears(torch, 1) for _ in range(3)))
        out = model(data(torch, 8192))
        with run.part("forward", {}):
            pass
        out.sum().backward()
        _, part = explained(run, "forward")
    site = next(it for it in part[0].breakdown.sites if it.category == "activations")
    assert site.path == "test_attribution.py"
    assert site.function == "test_sites_name_the_users_line_and_the_module"
    assert site.code == "out = model(data(torch, 8192))"
    assert site.module == "Sequential.*.0"
    assert (site.blocks, site.nbytes) == (3, 3 * rounded(8192 * WIDTH))
    weights = next(it for it in part[0].breakdown.sites if it.category == "parameters")
    assert weights.function == "linears"
    assert weights.module == "Sequential.*.0"


def test_gradients_are_of_the_line_that_called_backward(torch):
    with recorded() as run:
        model = linears(torch)
        model(data(torch)).sum().backward()
        with run.part("after", {}):
            pass
        _, part = explained(run, "after")
    site = next(it for it in part[0].breakdown.sites if it.category == "gradients")
    assert site.code.endswith(".sum().backward()")
    assert site.module == "Sequential.*"
    assert site.blocks == 6


# ---- the timeline ----


def test_the_timeline_stacks_up_to_what_was_allocated(torch):
    with recorded() as run:
        model = linears(torch)
        train(torch, run, model, torch.optim.Adam(model.parameters()), rows=4096)
        measurement = run.measurement()
        found = explain(run, [""], ROOT, timelines=True).attached("", measurement)
    (attribution,) = found.attributions
    line = attribution.timeline
    sums = [
        sum(column[i] for column in line.categories.values()) for i in range(len(line.reserved))
    ]
    assert max(sums) == sums[line.peak] == measurement.peaks[0].allocated
    assert all(total <= held for total, held in zip(sums, line.reserved, strict=True))
    assert max(line.reserved) == measurement.peaks[0].reserved
    names = [phase.name for phase in line.phases]
    once = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    assert once == ["forward", "backward", "optimizer"] * 2
    at_peak = {name: column[line.peak] for name, column in line.categories.items()}
    assert {k: v for k, v in at_peak.items() if v} == attribution.breakdown.categories
    assert list(line.categories) == [it for it in CATEGORIES if it in line.categories]


def test_a_long_timeline_keeps_its_peaks(torch):
    from pytest_gpumem.attribution import MOST_POINTS

    with recorded() as run:
        for index in range(MOST_POINTS * 3):
            held = torch.empty((100 if index == 700 else 1) * MIB, dtype=torch.uint8, device="cuda")
            del held
        measurement = run.measurement()
        found = explain(run, [""], ROOT, timelines=True).attached("", measurement)
    line = found.attributions[0].timeline
    assert len(line.reserved) <= MOST_POINTS + 3
    assert line.categories["other"][line.peak] == 100 * MIB
