"""Operators' values, computed on the host where the virtual GPU's tensors lie."""

import ctypes
import io
import sys
from importlib.util import find_spec

import pytest
from helpers.paths import TESTS
from helpers.virtual_gpu import child, virtual_card

from pytest_gpumem.devices.virtual import native
from pytest_gpumem.meter.allocator import current


@pytest.fixture
def mode():
    from pytest_gpumem.devices.virtual.values.mode import ValueMode

    with virtual_card() as device, ValueMode(device.library) as mode:
        yield mode


@pytest.mark.usefixtures("mode")
def test_small_tensors_are_computed_and_read_back():
    import torch

    x = torch.arange(10, device="cuda")
    assert x.sum().item() == 45
    assert x[3:].tolist() == [3, 4, 5, 6, 7, 8, 9]
    y = torch.ones(3, 5, device="cuda")
    y.add_(1)
    y[:, 1] = 7
    assert y.tolist() == [[2, 7, 2, 2, 2]] * 3
    assert y.t().contiguous().cpu()[1].tolist() == [7, 7, 7]
    assert torch.ones(4, 2048, dtype=torch.long, device="cuda").bool().all().item()


@pytest.mark.usefixtures("mode")
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_torchs_tracer_compares_its_constants():
    """C++ gives ``equal`` and ``item`` tensors of numbers, and kernels in Python get numbers."""
    import torch

    ones = torch.ones(3, device="cuda")
    torch.jit.trace(lambda x: torch.tanh(x * 2.0 + 0.1) * 2.0, ones)
    traced = torch.jit.trace(lambda x: torch.tanh(x * 2.0 + 0.1) * 2.0, ones, check_trace=False)
    # Its second call would run fused code, which computes nothing.
    assert traced(ones * 0).tolist() == pytest.approx([0.199336] * 3)
    number = torch.ops.aten._local_scalar_dense(torch.ops.aten.add(torch.ones(()), 1.1))
    assert number == pytest.approx(2.1)


def test_too_deep_a_stack_does_not_make_values_unknown(mode, monkeypatch):
    import torch

    from pytest_gpumem.devices.virtual.values import host_computer

    def compute(*_args):
        raise RecursionError

    small = torch.ones(4, device="cuda")
    with monkeypatch.context() as patches, pytest.raises(RecursionError):
        patches.setattr(host_computer, "in_types_of_the_host", compute)
        torch.bernoulli(small)  # random numbers are never computed natively
    assert not mode.host.unknown.failures
    assert (small + 1).tolist() == [2, 2, 2, 2]


def test_a_lack_that_ctypes_names_in_a_text_is_raised_as_itself(mode, monkeypatch):
    import torch

    def forget(*_args):
        raise ctypes.ArgumentError(texts.pop())

    monkeypatch.setattr(mode, "forget", forget)
    texts = ["argument 1: TypeError: wrong type", "argument 2: RecursionError: too deep"]
    for kind in (RecursionError, ctypes.ArgumentError):
        with pytest.raises(kind):
            torch.randint(9, (3000, 1000), device="cuda")


def test_values_are_computed_after_an_operator_whose_copies_could_not_be_looked_at(
    mode, monkeypatch
):
    import torch

    def after(_call):
        raise MemoryError

    large = torch.randn(1000, 1000, device="cuda")
    with monkeypatch.context() as patches, pytest.raises(MemoryError):
        patches.setattr(mode, "after", after)
        large.nonzero()
    small = torch.arange(4, device="cuda")
    large.add_(1)  # its kernel makes all unknown where values are not computed
    assert small.tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("mode")
def test_a_tensor_that_another_stream_uses_keeps_its_values():
    """record_stream's schema says that it writes the tensor; it does not."""
    import torch

    x = torch.arange(4.0).cuda()
    x.record_stream(torch.cuda.Stream())
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("mode")
def test_backward_and_an_optimizer_are_the_cpus():
    import torch

    def train(device):
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(8, 4, generator=generator).to(device)
        weight = torch.randn(4, 4, generator=generator).to(device).requires_grad_()
        optimizer = torch.optim.Adam([weight], lr=0.1)
        losses = []
        for _ in range(3):
            loss = (x @ weight).tanh().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert train("cuda") == pytest.approx(train("cpu"))


def test_large_tensors_are_not_computed_and_what_depends_on_them_is_assumed(mode):
    import torch

    x = torch.randn(8192, 1024, device="cuda")
    assert not mode.values.is_known(x)
    loss = x.square().mean()
    assert not mode.values.is_known(loss)
    assert 0 < loss.item() < 1
    assert mode.values.are_assumed([loss])
    assert not torch.isnan(loss).item()
    experts = torch.nn.functional.linear(x, torch.randn(8, 1024, device="cuda")).topk(2).indices
    assert sorted({*experts.flatten().tolist()}) == list(range(8))
    assert 0 <= x.argmax(-1)[3].item() < 1024


@pytest.mark.usefixtures("mode")
def test_random_values_repeat_with_the_seed_and_leave_the_hosts_as_they_were():
    import torch

    def draw():
        torch.manual_seed(1)
        first = torch.rand(4, device="cuda")
        return first.tolist(), torch.rand(4, device="cuda").tolist(), torch.rand(2).tolist()

    first, second, on_host = draw()
    assert first != second
    assert draw() == (first, second, on_host)
    torch.manual_seed(1)
    assert torch.rand(2).tolist() == on_host


@pytest.mark.usefixtures("mode")
def test_tensors_live_no_longer_than_without():
    import torch

    before = current(0).allocated
    x = torch.ones(1000, device="cuda")
    for _ in range(3):
        x = x + 1
        x.mul_(2).sum().item()
    with pytest.raises(RuntimeError) as error:
        x @ x.reshape(2, 500)
    del x
    assert current(0).allocated == before, error


@pytest.mark.usefixtures("mode")
def test_subclasses_that_wrap_tensors_are_computed_inside():
    import torch
    from torch.utils._pytree import tree_map

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=inner.device)
            wrapper.inner = inner
            return wrapper

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            inner = tree_map(lambda x: x.inner if isinstance(x, cls) else x, args)
            return cls(func(*inner, **(kwargs or {})))

    assert (Wrapper(torch.ones(3, device="cuda")) + 1).inner.tolist() == [2, 2, 2]


@pytest.mark.usefixtures("mode")
def test_subclasses_that_wrap_nothing_have_values_and_their_own_methods_are_not_called_for_them():
    import torch

    called = []

    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            called.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs)

    def results(x):
        parts = [x[i : i + 2] for i in (0, 2)]
        y = x.clone()
        y.mul_(2).add_(parts[0].sum())
        y[1] = 7
        z = x.as_subclass(torch.Tensor).clone()
        z.copy_(y)
        x.requires_grad_()
        (x * x * x).sum().backward()
        given = torch.stack(parts), torch.cat(parts), y, z, x.sort(descending=True)[0], x.grad
        return given, x[x > 1], x.detach().unique(), torch.nn.Parameter(x.detach()) + 1, x.max()

    x = torch.arange(4.0).as_subclass(Named)
    expected = torch.utils._pytree.tree_leaves(results(x))
    seen = [*called]
    called.clear()
    taken = torch.utils._pytree.tree_leaves(results(x.detach().cuda()))
    assert called == ["detach", "cuda", *seen]
    assert [type(tensor) for tensor in taken] == [type(tensor) for tensor in expected]
    assert [tensor.tolist() for tensor in taken] == [tensor.tolist() for tensor in expected]


@pytest.mark.usefixtures("mode")
def test_a_users_own_mode_sees_each_operator_once_and_values_are_computed_once():
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    x = torch.zeros(3, device="cuda")
    with Names() as names:
        x.add_(1)
    assert names.names == ["aten::add_"]
    assert x.tolist() == [1, 1, 1]


@pytest.mark.usefixtures("mode")
def test_a_users_own_mode_gets_operators_without_one_of_their_tensors():
    """Attention's backward pass has no seed in torch 2.6, and PyTorch hands on None for it."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from torch.utils._python_dispatch import TorchDispatchMode

    from pytest_gpumem.devices.virtual.values.dispatch_keys import numbers_as_tensors

    class Passes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, 4, 16, 32, device="cuda", dtype=torch.float16, requires_grad=True)
    with Passes():
        scaled_dot_product_attention(x, x, x).sum().backward()
    assert x.grad.shape == x.shape
    none, one = numbers_as_tensors(torch.ops.aten.mul.Tensor, [None, 1])  # with any torch
    assert none is None
    assert one == 1


def test_parameters_and_vmap_work_and_memory_is_the_same(mode):
    import torch

    def step():
        torch.cuda.reset_peak_memory_stats()
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        net.cuda()
        x = torch.randn(256, 64, device="cuda")
        (net(x) + net(x)).sum().backward()
        torch.func.vmap(net)(x).mean().item()
        return torch.cuda.max_memory_allocated()

    step()  # the first one allocates cuBLAS' workspaces, in the middle of it
    with_values = step()
    mode.__exit__()
    assert step() == with_values
    mode.__enter__()


def test_large_tensors_are_taken_to_be_equal_and_finite(mode):
    import torch

    x = torch.randn(3000, 3000, device="cuda")
    y = x.clone()
    assert torch.equal(x, y)
    assert torch.allclose(x, y)
    torch.testing.assert_close(x, y)
    assert torch.isfinite(x).all()
    assert not x.isnan().any()
    small = torch.ones(10, device="cuda")
    assert not torch.equal(small, small + 1)
    assert mode.decisions.notes(TESTS)


@pytest.mark.usefixtures("mode")
def test_a_gradient_scaler_keeps_its_scale_and_norms_are_finite():
    import torch

    weight = torch.nn.Parameter(torch.randn(1000, 1000, device="cuda"))
    optimizer = torch.optim.Adam([weight])
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        scaler.scale((weight * weight).sum()).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 65536
    assert norm > 0
    assert optimizer.state[weight]["step"] == 2


@pytest.mark.usefixtures("mode")
def test_infinities_that_are_known_make_a_gradient_scaler_skip_its_step():
    import torch

    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32768
    assert weight.tolist() == [1, 1, 1, 1]


@pytest.mark.usefixtures("mode")
def test_an_optimizer_is_resumed_with_its_state_on_the_device():
    import torch

    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.Adam([weight])
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = torch.optim.Adam([weight])
    resumed.load_state_dict(torch.load(file, map_location="cuda"))
    resumed.step()
    assert resumed.state[weight]["step"].item() == 2


def test_a_kernel_of_nobodys_operator_makes_all_unknown(mode):
    import torch

    large = torch.randn(1000, 1000, device="cuda")
    x = torch.ones(4, device="cuda")
    for _ in range(2):  # the second one takes the short way, and fails there
        with pytest.raises(RuntimeError, match="size"):
            large.mul_(torch.ones(3, device="cuda"))
    large.add_(1)
    assert mode.values.is_known(x)
    ctypes.CDLL(str(native.LIBRARY)).cudaGraphLaunch(None, None)  # kernels of no operator
    assert not mode.values.is_known(x)


def test_compiled_regions_need_the_same_memory_and_one_compilation(mode):
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    def step():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU()).cuda()
        compiled = torch.compile(net, backend=counter)
        for _ in range(2):
            compiled(torch.randn(512, 64, device="cuda")).sum().backward()
        return torch.cuda.max_memory_allocated(), counter.frame_count

    step()  # the first one allocates cuBLAS' workspaces, in the middle of it
    with_values = step()
    mode.__exit__()
    assert step() == with_values
    assert with_values[1] == 1
    mode.__enter__()


@pytest.mark.usefixtures("mode")
def test_fake_tensors_pass_by():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3, device="cuda") @ torch.ones(3, 4, device="cuda")
    assert fake.shape == (4,)
    assert torch.ones(3, device="cuda").sum().item() == 3


def finished_from_now_on(mode, monkeypatch):
    """The names of operators whose values Python's code looks at: not those of the short way."""
    names = []
    finish = mode.finish

    def noting(call, *rest):
        names.append(call.name)
        finish(call, *rest)

    monkeypatch.setattr(mode, "finish", noting)
    return names


def test_an_operator_that_writes_one_large_tensor_takes_the_short_way(mode, monkeypatch):
    import torch

    x = torch.empty(3000, 3000, device="cuda").zero_()
    assert mode.values.is_known(x)

    def step():
        torch.nn.Parameter(x).data.mul_(2)
        y = (x @ x + x).clone()
        x.copy_(y)
        torch.nn.functional.layer_norm(y, (3000,))
        torch.ones(()).item()
        return y

    step()
    names = finished_from_now_on(mode, monkeypatch)
    assert not mode.values.is_known(x)
    assert not mode.values.is_known(step())
    assert names == []
    sparse = torch.eye(4, device="cuda").to_sparse()
    sparse.mul_(2)  # of which no nbytes can be asked for
    x[0, :4] = 3
    assert x[0, :4].tolist() == [3] * 4
    assert names.count("fill_") == 1
    names.clear()
    step()
    assert names == []  # after a sparse tensor, too


@pytest.mark.usefixtures("mode")
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:torch.sparse.SparseTensor:UserWarning")
def test_the_program_s_default_device_is_not_that_of_values():
    """Function modes are active where no call of Python's led to the operator."""
    import torch

    scripted = torch.jit.script(in_torchscript)
    x = torch.rand(4, 5, device="cuda")
    expected = in_torchscript(x.cpu())
    with torch.device("cuda"):
        result = scripted(x)
        sparse = torch.sparse.FloatTensor(torch.tensor([[0, 1], [2, 0]]), torch.ones(2))
        dense = sparse.to_dense()
    torch.testing.assert_close(result.cpu(), expected)
    assert dense.tolist() == [[0, 0, 1], [1, 0, 0]]


def in_torchscript(x):
    y = (x + 1).sum(0) * 2
    y[0] = 3
    return y.sort()[0].cumsum(0)


@pytest.mark.usefixtures("mode")
def test_parameters_of_lazy_modules_go_to_the_device_before_they_have_memory():
    import torch

    lazy = torch.nn.LazyLinear(2)
    lazy.weight = torch.nn.UninitializedParameter()  # as libraries' own modules do, on the host
    lazy.to("cuda")
    x = torch.arange(6.0).view(2, 3).cuda()
    y = lazy(x)
    expected = torch.nn.functional.linear(x.cpu(), lazy.weight.cpu(), lazy.bias.cpu())
    torch.testing.assert_close(y.cpu(), expected)


def test_operators_that_write_the_host_s_tensors_alone_take_the_short_way(mode, monkeypatch):
    import torch

    x, y = torch.ones(4), torch.zeros(4)

    def step():
        x.uniform_()
        torch._foreach_add_([x, y], 1)
        x.copy_(y).mul_(x).zero_()

    step()
    names = finished_from_now_on(mode, monkeypatch)
    step()
    assert names == []
    x.copy_(torch.full((4,), 3, device="cuda"))
    assert x.tolist() == [3] * 4
    assert names.count("copy_") == 1
    wrapped = torch.full((4,), 5, device="cuda").as_subclass(type("Wrapper", (torch.Tensor,), {}))
    x.copy_(wrapped)
    assert x.tolist() == [5] * 4
    assert names.count("copy_") == 2


@pytest.mark.usefixtures("mode")
def test_zeros_replace_what_a_large_tensor_held():
    """By a kernel before torch 2.15, which nobody sees write."""
    import torch

    x = torch.ones(100_000).cuda()
    assert x.sum().item() == 100_000
    assert x.zero_().sum().item() == 0
    y = torch.ones(100_000, 2, dtype=torch.float16).cuda()
    y[:, 0].zero_()
    assert y[0].tolist() != [1, 1]


def test_the_hosts_threads_are_as_they_were(mode, monkeypatch):
    import torch

    threads = torch.get_num_threads()
    used = []
    compute = mode.host.compute

    def noting(*args):
        used.append(torch.get_num_threads())
        return compute(*args)

    monkeypatch.setattr(mode.host, "compute", noting)
    torch.ones(8, device="cuda").add_(1).sum().item()
    assert set(used) == {1}
    assert torch.get_num_threads() == threads


LATE = """
import torch
from torch.utils.flop_counter import FlopCounterMode
from torch.utils._python_dispatch import TorchDispatchMode

class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))

x = torch.ones(3, device="cuda")

def define(schema, function):
    library = torch.library.Library("late", "FRAGMENT")
    library.define(schema)
    library.impl("change", function, "CompositeExplicitAutograd")
    return library

library = define("change(Tensor x) -> Tensor", lambda x: x + 1)
for mode in (Passing, lambda: FlopCounterMode(display=False)):
    with mode():
        print((torch.ops.late.change(x) * 2).tolist())
    print(torch.ops.late.change(x).sum().item())
library._destroy()
library = define("change(Tensor x, int times) -> Tensor", lambda x, times: x * times)
with Passing():
    print(torch.ops.late.change(x, 7).tolist())
"""


def test_operators_that_a_program_registers_late_run_under_modes_and_are_computed():
    lines = [line for _ in range(2) for line in ("[4.0, 4.0, 4.0]", "6.0")]
    assert child(LATE, warm=True).splitlines() == [*lines, "[7.0, 7.0, 7.0]"]


UNDEFINED = """
import torch
from pytest_gpumem.devices.virtual.values.interception import Interception

x = torch.ones(3, device="cuda")
library = torch.library.Library("late", "FRAGMENT")
library.define("pair(Tensor x) -> Tensor[]")
library.impl("pair", lambda x: [x, x + 1], "CUDA")
run = Interception.run

def leave_undefined(call):
    result = run(call)
    return [result[0], None] if call.traits.op.name() == "late::pair" else result

Interception.run = leave_undefined
print([tensor.tolist() for tensor in torch.ops.late.pair(x)])
"""


def test_a_list_may_have_undefined_tensors():
    """As that of FlashAttention 3, whose operators are in C++: Python's cannot return these."""
    assert child(UNDEFINED, warm=True) == "[[1.0, 1.0, 1.0], []]\n"


TRITON = """
import sys, torch
torch.rand(2, device="cuda").sum().item()
from pytest_gpumem.devices.virtual.values.operators import FORMULAS
print("triton" in sys.modules)
from torch.utils.flop_counter import flop_registry
print(FORMULAS is flop_registry, FORMULAS.keys() == flop_registry.keys())
"""


THREADS = """
import os
import torch.nn.functional as F
torch.set_num_threads(4)

def threads():
    return len(os.listdir("/proc/self/task"))

image, row = torch.rand(1, 3, 8, 8, device="cuda"), torch.rand(8000, device="cuda")
before = threads()
for _ in range(3):  # from the second call of an operator on, the native library calls the host's
    for computed in (
        F.pad(image, (2, 2, 2, 2), mode="reflect"), image.softmax(-1), image.triu(), row.exp(),
        row[:100].exp(),
    ):
        assert computed.sum().item() > 0
print(threads() - before)
"""


@pytest.fixture(scope="module")
def unprepared():
    """The lines that two programs print in a process that has imported nothing before."""
    triton, threads = child(f"{TRITON}\nprint('--')\n{THREADS}").split("--\n")
    return {"triton": triton.splitlines(), "threads": threads.splitlines()}


def test_values_import_no_triton(unprepared):
    """PyTorch's module of formulas does if there is one, which takes a quarter of a second."""
    is_there = find_spec("triton") is not None
    assert unprepared["triton"] == ["False", f"{not is_there} True"]


def test_small_tensors_are_computed_with_one_thread(unprepared):
    """A second one is waited for, on a busy machine for 10 ms and more."""
    assert unprepared["threads"] == ["0"]


def test_what_known_masks_and_indices_choose_of_large_tensors_has_its_size(mode):
    import torch

    x = torch.empty(5000, 1000, device="cuda").normal_()
    known = torch.ones(4, device="cuda")
    mask = torch.arange(5000, device="cuda") % 4 == 0
    assert x[mask].shape == (1250, 1000)
    assert x[:, mask[:1000]].shape == (5000, 250)
    assert x.masked_select(mask[:, None]).shape == (1_250_000,)
    x[mask] = torch.empty(1250, 1000, device="cuda").normal_()
    x[mask] = 1.0
    rows = torch.arange(7, device="cuda")
    assert x[rows].shape == (7, 1000)
    x[rows] = x[rows + 1]
    assert mode.values.is_known(known)
    assert not mode.values.is_known(x)
    assert not mode.decisions.counts[1]
    noise = torch.randn(5000, 1000, device="cuda")
    assert 100_000 < len(x[:400][noise[:400] > 0]) < 300_000
    assert mode.decisions.counts[1]


@pytest.mark.usefixtures("mode")
def test_memory_of_masked_large_tensors_is_that_of_a_known_size():
    import torch

    x = torch.empty(1000, 1000, device="cuda").normal_()
    mask = torch.arange(1000, device="cuda") % 4 == 0
    rows = mask.nonzero()[:, 0]
    torch.cuda.reset_peak_memory_stats()
    before = current(0).allocated
    chosen = x[mask]
    assert current(0).allocated - before == chosen.nbytes + 448 == x[rows].nbytes + 448


@pytest.mark.usefixtures("mode")
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_old_values_of_memory_that_is_used_again_are_no_answer():
    """An operator whose size nobody queues read them: 16,843,009 elements of 25."""
    import torch

    sparse = torch.ones(5, 5).to_sparse_csr().to("cuda")
    dense = torch.ones(5, 5, device="cuda")
    ones = torch.ones(1 << 14, dtype=torch.uint8)
    old = [ones.to("cuda") for _ in range(256)]  # all room of the pool of small tensors
    del old
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert dense.to_sparse()._nnz() in {0, 25}
    torch.sum(sparse, 0, keepdim=True)
    assert torch.cuda.max_memory_allocated() - before < 1 << 16


@pytest.mark.usefixtures("mode")
def test_results_that_cuda_resizes_have_their_values():
    import torch

    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    arguments = [torch.ones(2, **kind) for _ in range(4)]
    types = torch.bfloat16, torch.float32, torch.float32
    out = tuple(torch.empty(0, dtype=dtype, device="cuda") for dtype in types)
    torch.native_batch_norm(torch.ones(3, 2, 4, **kind), *arguments, False, 0.1, 1e-5, out=out)
    assert [tuple(tensor.shape) for tensor in out] == [(3, 2, 4), (2,), (2,)]
    assert out[0].eq(1).all()
    eight = torch.ones(32, 16, device="cuda").to(torch.float8_e4m3fn)
    one, product = torch.ones((), device="cuda"), torch.empty(0, device="cuda").bfloat16()
    torch._scaled_mm(eight, eight.t(), one, one, out_dtype=torch.bfloat16, out=product)
    assert product.eq(16).all()
    commonest = tuple(torch.empty(0, dtype=torch.long, device="cuda") for _ in range(2))
    torch.mode(torch.tensor([3, 5, 5], device="cuda"), out=commonest)  # values=, indices=
    assert commonest[0].item() == 5


def test_a_tensor_that_is_copied_to_itself_stays_unknown(mode):
    import torch

    x = torch.ones(4, device="cuda")
    mode.values.forget(x)
    x.copy_(x)
    assert not mode.values.is_known(x)
    torch.add(x, 1, out=x)
    assert not mode.values.is_known(x)


@pytest.mark.usefixtures("mode")
def test_values_are_computed_where_a_mode_of_pytorchs_is_active():
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.ones(8, 8, device="cuda")
    with FlopCounterMode(display=False) as counter:
        y = x @ x
    assert (counter.get_total_flops(), y.sum().item()) == (1024, 512)
    with FlopCounterMode(display=False) as counter, torch._C._DisableTorchDispatch():
        y = x @ y
    assert (counter.get_total_flops(), y.sum().item()) == (0, 4096)


@pytest.mark.usefixtures("mode")
def test_values_are_computed_inside_of_higher_order_operators():
    import torch

    x = torch.arange(4, device="cuda")
    run = torch.ops.higher_order.run_and_save_rng_state
    state, result = run(torch.ops.aten.add.Tensor, x, 1)
    assert result.tolist() == [1, 2, 3, 4]
    assert state.numel()
    choose = torch.ops.higher_order.cond
    with torch.no_grad():
        chosen = choose(x.sum() == 6, lambda x: (x + 1,), lambda x: (x - 1,), (x,))
    assert chosen[0].tolist() == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def own_operators():
    """A program's own operators in Python: one returns, one writes its second argument."""
    import torch

    table = []

    @torch.library.custom_op("gpumem_mode::scaled", mutates_args=(), device_types="cuda")
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return (x * table[0]).cumsum(0)

    library = torch.library.Library("gpumem_mode", "FRAGMENT")
    library.define("added(Tensor x, Tensor(a!) y) -> ()")
    library.impl("added", lambda x, y: y.add_(x)[:1].fill_(7) and None, "CUDA")
    yield table, scaled, torch.ops.gpumem_mode.added
    library._destroy()


def test_operators_inside_of_a_programs_own_in_python_are_computed(mode, own_operators):
    import torch

    table, scaled, added = own_operators
    table[:] = [torch.full((4,), 2, device="cuda")]
    x, y = torch.arange(4, device="cuda"), torch.ones(4, dtype=torch.long, device="cuda")
    assert scaled(x).tolist() == [0, 2, 6, 12]
    added(x, y)
    assert y.tolist() == [7, 2, 3, 4]
    assert table.pop().tolist() == [2, 2, 2, 2]  # no argument, and read inside
    assert mode.host.unknown.failures == {}


def test_a_programs_own_operator_is_computed_by_its_kernel_for_the_cpu(mode):
    """As all operators are, and not by the operators inside: those here do something else."""
    import torch

    library = torch.library.Library("gpumem_mode", "FRAGMENT")
    library.define("negated(Tensor(a!) x) -> ()")
    library.impl("negated", lambda x: (x.zero_(), None)[1], "CUDA")
    library.impl("negated", lambda x: (x.neg_(), None)[1], "CPU")
    x = torch.ones(1, device="cuda")
    torch.ops.gpumem_mode.negated(x)
    assert x.tolist() == [-1]
    assert mode.host.unknown.failures == {}
    library._destroy()


def test_what_a_programs_own_operator_writes_by_other_kernels_is_computed_on_the_host(mode):
    import torch

    calls = []

    @torch.library.custom_op("gpumem_mode::added_by_kernel", mutates_args={"x"})
    def added(x: torch.Tensor) -> None:
        calls.append(x.device.type)
        if x.is_cuda:
            torch.cuda._sleep(1)
            mode.forget(x.data_ptr(), x.nbytes)  # as after a kernel that is no operator's
        else:
            x.add_(1)

    x = torch.ones(4, device="cuda")
    added(x)
    assert calls == ["cuda", "cpu"]
    assert x.tolist() == [2] * 4


def test_a_programs_own_operator_is_not_run_for_its_values_beyond_the_budget(mode):
    import torch

    calls = []

    @torch.library.custom_op("gpumem_mode::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.device.type)
        return x * 2

    large = torch.ones(1 << 20, device="cuda")
    mode.host.budget.end()
    assert not mode.values.is_known(doubled(large))
    assert calls == ["cuda"]


@pytest.mark.usefixtures("mode")
def test_values_are_computed_in_threads_that_a_program_starts():
    import threading
    from concurrent.futures import ThreadPoolExecutor

    import torch

    def product():
        ones = torch.ones(8, 8, device="cuda")
        return torch.mm(ones, ones).sum().item()

    results = []
    thread = threading.Thread(target=lambda: results.append(product()))
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1) as pool:
        results.append(pool.submit(product).result())
    assert results == [512, 512]


def test_a_profiler_of_threads_stays_the_programs_own(mode):
    import sys
    import threading

    def profiler(*_event):
        pass

    seen = []
    mode.__exit__()
    threading.setprofile(profiler)
    try:
        with mode:
            thread = threading.Thread(target=lambda: seen.append(sys.getprofile()))
            thread.start()
            thread.join()
        assert threading.getprofile() is profiler
    finally:
        threading.setprofile(None)
        mode.__enter__()
    assert seen == [profiler]


@pytest.mark.usefixtures("mode")
def test_a_kernel_that_only_waits_leaves_all_values_known():
    import torch

    x = torch.arange(4, device="cuda")
    torch.cuda._sleep(1000)
    assert x.tolist() == [0, 1, 2, 3]


@pytest.fixture
def deterministic():
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("mode", "deterministic")
@pytest.mark.parametrize("dtype", ["int64", "float16", "complex64", "bool"])
def test_memory_that_pytorch_fills_as_it_takes_it_leaves_other_values_known(dtype):
    """Its kernel is no operator's in torch.tensor, which leaves out Python's dispatch key."""
    import torch

    x = torch.arange(4, device="cuda")
    y = torch.tensor([[1, 0], [1, 1]], dtype=getattr(torch, dtype), device="cuda")
    z = y.new_tensor([1, 0, 1])
    assert (x + 1).tolist() == [1, 2, 3, 4]
    assert y.sum().item() == 3
    assert z.sum().item() == 2


@pytest.mark.usefixtures("mode")
def test_a_computed_operator_takes_few_calls_of_python():
    """227 before each fact of a call was found once; the bound has room for newer torches."""
    import torch

    x, count = torch.ones(4, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    calls = []

    def note(frame, event, _argument):
        if event == "call":
            calls.append(frame.f_code.co_name)

    for compute in (lambda: x + x, lambda: count.add_(1)):
        compute()
        calls.clear()
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            compute()
        finally:
            sys.setprofile(before)
        assert len(calls) < 70, calls
        assert calls.count("tensors_in") < 5
    assert count.item() == 2
