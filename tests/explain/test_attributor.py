"""Where a peak comes from, against what can be counted: 4 bytes a parameter, 4 a gradient, ..."""

from contextlib import contextmanager

import pytest
from helpers.recorded_runs import (
    PARAMETERS,
    ROOT,
    WIDTH,
    categories,
    data,
    explained,
    linears,
    of_part,
    recorded,
    rounded,
    train,
)
from helpers.virtual_gpu import CARD_80GIB, MIB, virtual_card, virtual_device
from helpers.wrapped_tensors import wrapped

from pytest_gpumem.meter.peaks import Held, Highest
from pytest_gpumem.spec import MemorySpec
from pytest_gpumem.testrun.run import Run
from pytest_gpumem.testrun.wide_fixture import SetUpStage, WideFixture

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


def test_a_buffer_that_is_no_tensor_is_left_out(torch):
    """A TensorDict of tensordict can be one; ``Module._apply`` converts whatever is there."""

    class Tensors(dict):
        def cuda(self, device=None):
            return Tensors({key: each.cuda(device) for key, each in self.items()})

    with recorded() as run:
        model = torch.nn.Linear(WIDTH, WIDTH)
        model._buffers["state"] = Tensors(mean=torch.zeros(WIDTH))
        model.cuda()
        model(torch.zeros(8, WIDTH, device="cuda"))
        found = categories(run)
        assert model.state["mean"].is_cuda
        del model
    assert found["parameters"] == PARAMETERS
    assert "buffers" not in found


def test_a_model_that_was_moved_there_and_never_called_is_known(torch):
    with recorded() as run:
        model = torch.nn.Linear(WIDTH, WIDTH).cuda()
        found = categories(run)
        del model
    assert found == {"parameters": PARAMETERS}


def test_parameters_that_a_conversion_swaps_are_known(torch):
    """PyTorch swaps no tensor to which a weak reference is left; torchao's conversions swap."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with recorded() as run:
            model = torch.nn.Linear(WIDTH, WIDTH).cuda()
            with pytest.raises(RuntimeError, match="different slots|same size|use_count|weakref"):
                torch.utils.swap_tensors(model.weight, model.weight.view(-1))
            found = categories(run)
            del model
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
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
    with virtual_card(CARD_80GIB) as device:
        spec = MemorySpec(world_size=4, rank=1)
        with Run.open(spec, device, ROOT, record=True) as run:
            run.start()
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
    with virtual_card(CARD_80GIB):
        model = linears(torch)
    try:
        device = virtual_device()
        spec = MemorySpec()
        with Run.open(spec, device, ROOT, record=True) as run:
            run.start()
        assert run.meter.isolation.foreign[0].allocated > 0
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
    with virtual_card(CARD_80GIB):
        model = linears(torch)
    try:
        held = Held.blocks(3 * PARAMETERS)
        device = virtual_device()
        with Run.open(MemorySpec(), device, ROOT, record=True) as run:
            run.start()
            stages = [SetUpStage(Highest.of([held]), [held])]
            run.fixtures.use(WideFixture("model", run.fixtures.devices, stages))
        model(data(torch)).sum().backward()
        with run.part("after", {}):
            pass
        found = of_part(run, "after")
        run.close()
        assert found["parameters"] == 3 * PARAMETERS
        assert found["gradients"] == 3 * PARAMETERS
    finally:
        del model


def test_tensor_subclasses_are_the_tensors_that_they_wrap(torch):
    class Quantized(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                for param in group["params"]:
                    codes = torch.zeros(param.numel() // 4, device="cuda")
                    self.state[param]["codes"] = [wrapped(codes)]

    with recorded() as run:
        model = linears(torch, 1)
        optimizer = Quantized(model.parameters())
        model(data(torch)).sum().backward()
        optimizer.step()
        with run.part("after", {}):
            pass
        found = of_part(run, "after")
        assert found["optimizer state"] == rounded(WIDTH * WIDTH // 4, WIDTH // 4)
        del model, optimizer


def test_parameters_of_lazy_modules_are_parameters_once_they_have_memory(torch):
    with recorded() as run:
        model = torch.nn.Sequential(torch.nn.LazyLinear(WIDTH)).cuda()
        model(data(torch))
        with run.part("after", {}):
            pass
        found = of_part(run, "after")
        assert found["parameters"] == rounded(WIDTH * WIDTH, WIDTH)
        del model


def test_a_tensor_subclass_is_not_asked_for_its_memory(torch):
    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise ValueError(func)

    with recorded() as run:
        module = torch.nn.Identity()
        module.register_buffer(
            "table", torch.ones(WIDTH, WIDTH, device="cuda").as_subclass(Refuses)
        )
        module(data(torch))
        with run.part("after", {}):
            pass
        found = of_part(run, "after")
        assert found["buffers"] == rounded(WIDTH * WIDTH)
        del module


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
    assert site.path == "explain/test_attributor.py"
    assert site.function == "test_sites_name_the_users_line_and_the_module"
    assert site.code == "out = model(data(torch, 8192))"
    assert site.module == "Sequential.*.0"
    assert (site.blocks, site.nbytes) == (3, 3 * rounded(8192 * WIDTH))
    weights = next(it for it in part[0].breakdown.sites if it.category == "parameters")
    assert weights.function == "linears"
    assert weights.module == "Sequential.*.0"


def test_a_site_is_the_line_that_calls_a_decorated_function(torch):
    def marked(function):
        def wrapped_function(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapped_function

    with recorded() as run:
        kept = marked(torch.zeros)(WIDTH, WIDTH, device="cuda")
        with run.part("forward", {}):
            pass
        _, part = explained(run, "forward")
    (site,) = (it for it in part[0].breakdown.sites if it.nbytes == kept.nbytes)
    assert site.code == 'kept = marked(torch.zeros)(WIDTH, WIDTH, device="cuda")'


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


# ---- what the hooks leave out because it was seen before ----


def test_state_that_an_optimizer_makes_anew_in_each_step_is_seen_each_time(torch):
    class Anew(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["average"] = state.get("average", 0) + parameter.grad

    with recorded() as run:
        model = linears(torch)
        optimizer = Anew(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(data(torch, 64)).sum().backward()
            optimizer.step()
        with run.part("after", {}):
            pass
        found = of_part(run, "after")
    assert found["optimizer state"] == 3 * PARAMETERS


def test_a_module_that_is_added_between_two_calls_has_its_path(torch):
    with recorded() as run:
        model = linears(torch)
        model(data(torch, 64))
        model.append(torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda"))
        out = model(data(torch, 64))
        sites = explained(run)[0].breakdown.sites
        del out
    modules = {site.module for site in sites if site.category == "parameters"}
    assert "Sequential.3" in modules


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscripts_modules_have_their_parameters_and_buffers(torch, how):
    """Their ``_parameters`` is no dict: it has neither ``get`` nor an iterator."""
    with recorded() as run:
        norm = torch.nn.BatchNorm1d(1 << 20).eval()
        batch = torch.zeros(2, 1 << 20)
        scripted = torch.jit.script(norm) if how == "script" else torch.jit.trace(norm, batch)
        scripted.cuda()
        if how == "script":
            scripted.register_buffer("running_mean", torch.zeros(1 << 20, device="cuda"))
        with run.part("forward", {}):
            loss = scripted(batch.cuda()).sum()
        with run.part("backward", {}):
            loss.backward()
        found = of_part(run, "backward")
        del norm, scripted, loss
    assert found["parameters"] == found["gradients"] == 8 * MIB
    assert found["buffers"] == 8 * MIB + 512
