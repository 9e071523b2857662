"""The native library's kernel of operators, and the functions that Python calls beside it."""

from __future__ import annotations

import pytest
from helpers.virtual_gpu import virtual_card


@pytest.fixture
def exchange_api(torch):
    """The library computes by itself, which it does of tensors that DLPack's exchange API tells."""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("Python computes, with the same values: torch before 2.10 has no exchange API")


def kernel_of(device, op, ways, *, written=0, unread=0):
    """Return a new kernel of an operator, and the list of what it was given to Python for."""
    from pytest_gpumem.devices.virtual.values.interception import Interception

    functions, told = Interception.functions, []
    kernel = functions.kernel(lambda *_args, **_kwargs: told.append("first"))

    def slow(*args, **kwargs):
        told.append("slow")
        return op._op(*args, **kwargs)

    functions.know(kernel, slow, None, op._op, op._op, None, ways, written, unread, 0)
    device.library.short_ways(1)
    return kernel, told


def test_a_kernel_makes_a_written_tensor_unknown_where_an_argument_is():
    import torch

    from pytest_gpumem.devices.virtual.operator_functions import OperatorFlags

    with virtual_card() as device:
        device.values.compute("auto")
        known, other = (torch.ones(8, device="cuda") for _ in range(2))
        unknown = torch.empty(8, device="cuda")
        address = known.data_ptr()
        device.library.forget(unknown.data_ptr(), 32)
        kernel, told = kernel_of(device, torch.ops.aten.add_.Tensor, OperatorFlags.SHORT, written=1)
        kernel(known, other, alpha=1)
        assert told == ["slow"]
        assert device.library.is_known(address, 32)
        kernel(known, unknown)
        assert told == ["slow"]
        assert not device.library.is_known(address, 32)


def test_a_number_in_the_place_of_a_tensor_takes_the_slow_way():
    import torch

    from pytest_gpumem.devices.virtual.operator_functions import OperatorFlags
    from pytest_gpumem.devices.virtual.values.interception import Interception

    with virtual_card() as device:
        device.values.compute("auto")
        unknown = torch.empty(8, device="cuda")
        device.library.forget(unknown.data_ptr(), 32)
        maximum, told = torch.ops.aten.maximum.default, []

        def slow(_left, right):
            told.append(type(right))

        functions = Interception.functions
        kernel = functions.kernel(slow)
        calls = maximum._op, None
        functions.know(kernel, slow, None, maximum._op, *calls, OperatorFlags.SHORT, 0, 0, 0b11)
        device.library.short_ways(1)
        kernel(unknown, 2.0)
        assert told == [float]
        kernel(unknown, torch.ones(8, device="cuda"))
        assert told == [float]


def test_a_number_in_the_place_of_a_tensor_is_given_to_the_function_that_takes_numbers():
    import torch

    from pytest_gpumem.devices.virtual.operator_functions import OperatorFlags
    from pytest_gpumem.devices.virtual.values.interception import Interception

    called = []
    with virtual_card() as device:
        device.values.compute("auto")
        unknown = torch.empty(8, device="cuda")
        device.library.forget(unknown.data_ptr(), 32)
        functions = Interception.functions
        kernel = functions.kernel(called.append)
        calls = lambda *_args: called.append("tensors"), lambda *_args: called.append("numbers")
        functions.know(kernel, called.append, None, None, *calls, OperatorFlags.SHORT, 0, 0, 0b11)
        device.library.short_ways(1)
        kernel(unknown, unknown, 2)  # the last one is in no tensor's place
        assert called == ["tensors"]
        for number in (2, 2.0, 2j, True):
            kernel(unknown, number)
        assert called[1:] == ["numbers"] * 4


def test_operators_on_unknown_values_take_numbers_and_raise_errors_as_without_values():
    import torch

    with virtual_card() as device:
        x = torch.empty(512, 512, device="cuda")
        for mode in ("off", "auto"):
            device.values.compute(mode)
            device.library.forget(x.data_ptr(), x.nbytes)
            results = x * 2, x / 2.0, x + True, x.mul_(2), x.clamp_min(2), x * 2j
            types = [torch.float32] * 5 + [torch.complex64]
            assert [result.dtype for result in results] == types
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(1 << 40, device="cuda")
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                x @ x[1:]


def test_a_kernel_excludes_its_key_while_the_operator_runs():
    import torch

    from pytest_gpumem.devices.virtual.operator_functions import OperatorFlags
    from pytest_gpumem.devices.virtual.values.dispatch_keys import KEY
    from pytest_gpumem.devices.virtual.values.interception import Interception

    key = torch._C._dispatch_key_parse(KEY)
    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    seen = []
    with virtual_card() as device:
        device.values.compute("auto")
        functions = Interception.functions
        number = torch.ones(())

        def run(*args, **kwargs):
            seen.append((is_excluded(key), functions.running() == (args, kwargs or None)))
            if kwargs:
                raise torch.OutOfMemoryError
            return 1.5

        kernel = functions.kernel(run)
        functions.know(kernel, run, None, run, run, None, OperatorFlags.SHORT, 0, 0, 0)
        assert kernel(number) == 1.5
        with pytest.raises(torch.OutOfMemoryError):
            kernel(number, out=2)
        assert seen == [(True, True)] * 2
        assert not is_excluded(key)
        assert functions.running() is None
        device.library.short_ways(0)
        kernel(number)
        assert seen[2:] == [(False, False)]


def test_where_tensors_lie_is_the_same_by_dlpack_and_by_attributes():
    import torch

    from pytest_gpumem.devices.virtual.values.host_tensors import describe

    with virtual_card():
        block = torch.ones(4, 8, device="cuda")
        assert describe(block)[:5] == (2, block.data_ptr(), 128, 128, 1)
        assert describe(block.t()[2:])[1:4] == (block.data_ptr() + 8, 96, 120)
        assert describe(torch.ones(3, dtype=torch.int64))[::2] == (1, 24, 0)
        assert describe(torch.eye(3).to_sparse())[0] == 3


def computing(device, op, *, written=0):
    """Return a kernel of an operator that hands nothing to Python: there, it would fail."""
    from pytest_gpumem.devices.virtual.operator_functions import OperatorFlags

    return kernel_of(
        device,
        op,
        OperatorFlags.SHORT | OperatorFlags.COMPUTES | OperatorFlags.CHEAP,
        written=written,
    )


@pytest.mark.usefixtures("exchange_api")
def test_a_result_of_known_tensors_is_computed_without_python():
    import torch

    with virtual_card() as device:
        device.values.compute("auto")
        x, y = (torch.arange(8.0, device="cuda") for _ in range(2))
        kernel, told = computing(device, torch.ops.aten.add.Tensor)
        result = kernel(x, y, alpha=2)
        assert device.library.is_known(result.data_ptr(), 32)
        assert result.tolist() == [0, 3, 6, 9, 12, 15, 18, 21]
        device.library.forget(x.data_ptr(), 32)
        assert not device.library.is_known(kernel(x, y).data_ptr(), 32)
        assert not told


@pytest.mark.usefixtures("exchange_api")
def test_a_known_tensor_that_an_operator_changes_is_computed_without_python():
    import torch

    with virtual_card() as device:
        device.values.compute("auto")
        x, y = (torch.arange(8.0, device="cuda") for _ in range(2))
        kernel, told = computing(device, torch.ops.aten.mul_.Tensor, written=1)
        assert kernel(x, y) is x
        assert not told
        assert x.tolist() == [0, 1, 4, 9, 16, 25, 36, 49]
        assert y.tolist() == [*range(8)]


@pytest.mark.usefixtures("exchange_api")
def test_while_values_are_assumed_python_looks_at_every_result():
    import torch

    with virtual_card() as device:
        device.values.compute("auto")
        x = torch.ones(8, device="cuda")
        kernel, told = computing(device, torch.ops.aten.mul_.Tensor, written=1)
        device.library.tell_assumed(1)
        kernel(x, x)
        assert told == ["slow"]
        device.library.tell_assumed(0)
        kernel(x, x)
        assert told == ["slow"]


def told_to_python(monkeypatch, *calls):
    """Return the operators of some calls that Python's code has looked at."""
    from pytest_gpumem.devices.virtual.values.mode import ValueMode

    told, finish = [], ValueMode.finish

    def noted(mode, call, result, plan):
        told.append(call.name)
        return finish(mode, call, result, plan)

    monkeypatch.setattr(ValueMode, "finish", noted)
    for call in calls:
        call()  # the first time, Python looks at each operator
        told.clear()
        yield call(), told


@pytest.mark.usefixtures("exchange_api")
@pytest.mark.parametrize("shape", [(3,), (64, 64), ()])
def test_plain_copies_and_zeros_of_small_tensors_are_left_to_the_library(monkeypatch, shape):
    import torch

    with virtual_card() as device:
        device.values.compute("auto")
        host = torch.rand(shape)
        x = host.to("cuda").clone()
        copies = (
            lambda: host.to("cuda"),
            x.clone,
            lambda: x.double().to(torch.float64, copy=True),
        )
        for copy, told in told_to_python(monkeypatch, *copies[:2]):
            assert not told
            assert torch.equal(copy.cpu(), host)
        ((zeros, told),) = told_to_python(monkeypatch, lambda: x.clone().zero_())
        assert not told
        assert zeros.tolist() == torch.zeros(shape).tolist()
        ((wide, told),) = told_to_python(monkeypatch, copies[2])
        assert told  # to another type: a kernel computes that
        assert torch.equal(wide.cpu(), host.double())


def test_a_copy_of_unknown_values_and_zeros_there_are_python_s(monkeypatch):
    import torch

    with virtual_card() as device:
        device.values.compute("auto")
        x = torch.ones(64, device="cuda")

        def copied():
            device.library.forget(x.data_ptr(), 256)
            return x.clone()

        ((copy, _),) = told_to_python(monkeypatch, copied)
        assert not device.library.is_known(copy.data_ptr(), 256)
        x.zero_()
        assert x.tolist() == [0] * 64


def test_a_copy_in_another_order_is_no_plain_one():
    import torch

    with virtual_card() as device:
        device.values.compute("auto")
        x = torch.arange(6.0, device="cuda").reshape(2, 3)
        for _ in range(2):
            assert x.t().contiguous().tolist() == [[0, 3], [1, 4], [2, 5]]
            assert x.t().clone().tolist() == [[0, 3], [1, 4], [2, 5]]
            assert x[:, 1:].clone().tolist() == [[1, 2], [4, 5]]
            assert x[:, :1].expand(2, 2).clone().tolist() == [[0, 0], [3, 3]]
            negative = torch._neg_view(torch.arange(3.0, device="cuda"))
            assert negative.clone().tolist() == [0, -1, -2]
            conjugate = torch.tensor([1 + 2j], device="cuda").conj()
            assert conjugate.clone().tolist() == [1 - 2j]
            assert torch.view_as_real(conjugate.resolve_conj()).tolist() == [[1, -2]]


def large_calls(device):
    """Return calls that cost a test's budget, on tensors of a device."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    x, weight = torch.rand(10, 1000).to(device), torch.rand(100, 1000).to(device)
    image = torch.rand(2, 8, 64, 64).to(device)
    convolution, norm = nn.Conv2d(8, 8, 3).to(device), nn.BatchNorm2d(8).to(device)
    trained = nn.BatchNorm2d(8).to(device)
    norm.eval()
    layer_norm = nn.LayerNorm(1000).to(device)
    gradients = torch.rand(2, 8, 62, 62).to(device)

    def backward():
        with torch.enable_grad():
            output = convolution(image)
            return torch.autograd.grad(output, convolution.weight, gradients)[0]

    return {
        "one result": lambda: nn.functional.linear(x, weight),
        "a list": lambda: torch.cat([image, image]),
        "several results": lambda: layer_norm(x),
        "arguments read, and results": lambda: norm(image),
        "an argument changed": lambda: image.clone().mul_(2).sum(),
        "a backward pass": backward,
        "arguments changed, and results": lambda: torch.cat(
            [trained(image).flatten(), trained.running_mean]
        ),
    }


@pytest.mark.usefixtures("exchange_api")
def test_larger_results_are_computed_without_python_as_by_it(monkeypatch):
    import torch

    with virtual_card() as device:
        device.values.compute("auto")
        mode, library = device.values._mode, device.library
        on_device, on_host = large_calls("cuda"), large_calls("cpu")
        told, finish = [], type(mode).finish

        def noted(mode, call, *rest):
            told.append(call.name)
            return finish(mode, call, *rest)

        monkeypatch.setattr(type(mode), "finish", noted)
        costs, seen = {}, {}
        with torch.no_grad():
            for name, call in on_device.items():
                call()  # the first time, Python looks at each operator
                on_host[name]()
                for native in (True, False):
                    told.clear()
                    library.short_ways(native)
                    flops, room = mode.host.budget.flops, library.value_budget()
                    result = call()
                    cost = flops - mode.host.budget.flops, room - library.value_budget()
                    costs[name, native], seen[name, native] = cost, {*told}
                    library.short_ways(1)
                    torch.testing.assert_close(result.cpu(), on_host[name](), rtol=1e-4, atol=1e-4)
        for name in on_device:
            assert costs[name, True] == costs[name, False]
            assert len(seen[name, True]) < len(seen[name, False])
        assert sum(flops for flops, _ in costs.values()) > 0
        assert not any(seen[name, True] for name in [*on_device][:4])
        for name, operator in (
            ("a backward pass", "convolution_backward"),
            ("arguments changed, and results", "cudnn_batch_norm"),
        ):
            assert operator in seen[name, False]
            assert operator not in seen[name, True]


@pytest.mark.usefixtures("exchange_api")
@pytest.mark.parametrize(("width", "rows"), [(64, 16), (2048, 4096)], ids=["known", "unknown"])
def test_a_step_passes_next_to_no_operator_to_python(monkeypatch, width, rows):
    """Python's code alone would make a step take more than twice as long."""
    import torch
    from torch import nn

    from pytest_gpumem.devices.virtual.values.mode import ValueMode

    passed = []

    def noting(method):
        def noted(mode, call, *rest):
            passed.append(call.name)
            return method(mode, call, *rest)

        return noted

    for name in ("run", "finish"):
        monkeypatch.setattr(ValueMode, name, noting(getattr(ValueMode, name)))
    numbers = []
    with virtual_card() as device:
        device.values.compute("auto")
        parts = nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 8)
        model = nn.Sequential(*parts).cuda()
        adam = torch.optim.Adam(model.parameters())
        x = torch.ones(rows, width, device="cuda")
        for native in (True, True, False):  # in the first step, Python looks at each operator
            device.library.short_ways(native)
            passed.clear()
            adam.zero_grad()
            model(x).square().mean().backward()
            adam.step()
            numbers.append(len(passed))
        device.library.short_ways(1)
    assert numbers[1] < 5
    assert numbers[2] > 50


def test_what_the_host_has_not_costs_nothing():
    import torch

    from pytest_gpumem.devices.virtual.operator_functions import OperatorFlags
    from pytest_gpumem.devices.virtual.values.interception import Interception
    from pytest_gpumem.devices.virtual.values.operators import traits_of

    op = torch.ops.aten.add.Tensor

    def missing(*_args, **_kwargs):
        raise NotImplementedError

    with virtual_card() as device:
        device.values.compute("auto")
        x = torch.ones(1 << 20, device="cuda")
        functions, mode = Interception.functions, device.values._mode
        costs = []
        for host in (op._op, missing):
            kernel = functions.kernel(op._op)
            traits = traits_of(op)._replace(host=host)
            ways = OperatorFlags.SHORT | OperatorFlags.COMPUTES
            functions.know(kernel, op._op, traits, host, op._op, None, ways, 0, 0, 0)
            before = mode.host.budget.flops
            result = kernel(x, x)
            costs.append(before - mode.host.budget.flops)
            assert mode.values.is_known(result) == (host is op._op)
        assert costs[0] == costs[1] > 0  # Python's own try takes the cost once
        assert "add" in mode.host.unknown.failures


def test_a_number_that_is_read_is_not_computed(monkeypatch):
    import torch

    with virtual_card() as device:
        device.values.compute("auto")
        x = torch.ones(8, device="cuda")
        mode = device.values._mode
        device.library.tell_assumed(1)
        assert x[3].item() == 1
        computed = []
        compute = type(mode.host).compute

        def noted(mode, call, *rest):
            computed.append(call.name)
            return compute(mode, call, *rest)

        monkeypatch.setattr(type(mode.host), "compute", noted)
        assert x[3].item() == 1
        assert not computed
