"""Equivalents of CUDA's own operators: results and gradients are the CPU's; a page lists all."""

import re
from itertools import pairwise

import pytest
import torch
from helpers.paths import ROOT
from helpers.torch_features import require, require_kernel
from helpers.virtual_gpu import virtual_card
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytest_gpumem.devices.virtual.values.mode import ValueMode
from pytest_gpumem.devices.virtual.values.operator_table import EQUIVALENTS

KINDS = ("CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
NUMBER = re.compile(r"(?<=_native|_triton)_\d+$")
"""of a kernel of torch._native: it counts others, which depend on the packages that are there"""
ELSEWHERE = {"c10d", "_c10d_functional", "symm_mem", "_test"}
"""namespaces of operators that the native library carries out"""


@pytest.fixture(scope="module")
def opened_mode():
    with virtual_card() as device, ValueMode(device.library) as mode:
        yield mode


@pytest.fixture
def mode(opened_mode):
    opened_mode.host.unknown.failures.clear()
    return opened_mode


def lists():
    """The page's two tables: names with an equivalent, names without."""
    page = (ROOT / "tests" / "tables" / "equivalents.md").read_text()
    have, without = page.split("## Without one")
    return [
        {
            name
            for line in part.splitlines()
            if line.startswith("| `")
            for name in re.findall(r"`(\w+)`", line.split("|")[1])
        }
        for part in (have, without)
    ]


def test_every_operator_that_is_cudas_alone_is_listed():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    alone = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        kinds = (*KINDS, "CompositeExplicitAutogradNonFunctional")
        if namespace.startswith("gpumem"):  # another test of this process defined it
            continue
        on_host = namespace in ELSEWHERE or any(has_kernel(name, kind) for kind in kinds)
        if has_kernel(name, "CUDA") and not on_host:
            alone.add(NUMBER.sub("", operator.partition(".")[0]))
    have, without = ({NUMBER.sub("", name) for name in names} for names in lists())
    assert len(alone) > 50
    assert sorted(alone - have - without) == []
    assert sorted(have & without) == []


def test_every_equivalent_is_listed():
    have, _ = lists()
    named = {name.partition("::")[2].partition(".")[0] for name in EQUIVALENTS}
    assert sorted(named - have) == []


# -- results and gradients --

SEED = 5


def numbers(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape) + SEED)
    return torch.randn(*shape, generator=generator).to(dtype)


def attended(backend, dtype=torch.bfloat16, heads=3, **options):
    """Output and gradients of attention by one of CUDA's ways."""

    def run(device):
        query = numbers(2, 3, 8, 16, dtype=dtype).to(device).requires_grad_()
        key = numbers(2, heads, 8, 16, dtype=dtype).to(device).requires_grad_()
        mask = options.get("attn_mask")
        given = {**options, **({} if mask is None else {"attn_mask": mask.to(device)})}
        with sdpa_kernel(backend if device == "cuda" else SDPBackend.MATH):
            output = functional.scaled_dot_product_attention(query, key, key.square(), **given)
        output.float().square().sum().backward()
        return [output, query.grad, key.grad]

    return run


STARTS = [0, 5, 6, 12]
"""rows of three sequences that lie one after the other"""


def of_many_lengths(backend, dtype, **options):
    """Output and gradients of attention within sequences of many lengths."""

    def run(device):
        query, key = (numbers(12, 3, 16 * at, dtype=dtype)[..., :16] for at in (1, 2))
        query, key = (part.to(device).requires_grad_() for part in (query, key))
        if device == "cuda":
            starts = torch.tensor(STARTS, device=device)
            heads = [
                torch.nested.nested_tensor_from_jagged(part, starts).transpose(1, 2)
                for part in (query, key, key.square())
            ]
            with sdpa_kernel(backend):
                nested = functional.scaled_dot_product_attention(*heads, **options)
            output = nested.transpose(1, 2).values()
        else:
            parts = [
                functional.scaled_dot_product_attention(
                    *(part[first:last].transpose(0, 1) for part in (query, key, key.square())),
                    **options,
                ).transpose(0, 1)
                for first, last in pairwise(STARTS)
            ]
            output = torch.cat(parts)
        output.float().square().sum().backward()
        return [output, query.grad, key.grad]

    return run


def varying(device):
    """Output and gradients of ``varlen_attn``, by cuDNN or flash attention."""
    module = pytest.importorskip("torch.nn.attention.varlen")
    query, key = (numbers(12, 3, 16 * at, dtype=torch.bfloat16)[..., :16] for at in (1, 2))
    query, key = (part.to(device).requires_grad_() for part in (query, key))
    if device == "cpu":
        return of_many_lengths(FLASH, torch.bfloat16)(device)
    starts = torch.tensor(STARTS, device=device, dtype=torch.int32)
    output = module.varlen_attn(query, key, key.square(), starts, starts, 6, 6)
    output.float().square().sum().backward()
    return [output, query.grad, key.grad]


def cells(cell):
    def run(device):
        torch.manual_seed(SEED)
        cell_there = cell(4, 6).to(device)
        x = numbers(3, 4).to(device).requires_grad_()
        state = cell_there(x)
        state = cell_there(x, state)
        (state[0] if isinstance(state, tuple) else state).square().sum().backward()
        return [x.grad, *(weight.grad for weight in cell_there.parameters())]

    return run


def recurrent(packed=False, **options):
    def run(device):
        torch.manual_seed(SEED)
        network = torch.nn.LSTM(4, 6, 2, **options).to(device)
        x = numbers(5, 3, 4).to(device).requires_grad_()
        lengths = torch.tensor([5, 2, 4])
        rows = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        output, (hidden, cell) = network(rows if packed else x)
        output = output.data if packed else output
        (output.square().sum() + hidden.sum() + cell.square().sum()).backward()
        return [output, hidden, x.grad, *(weight.grad for weight in network.parameters())]

    return run


def bagged(mode):
    def run(device):
        weight = numbers(10, 4).to(device).requires_grad_()
        index = torch.tensor([1, 2, 2, 5, 9, 0, 5]).to(device)
        starts = torch.tensor([0, 3, 4]).to(device)
        output = functional.embedding_bag(index, weight, starts, mode=mode)
        output.square().sum().backward()
        return [output, weight.grad]

    return run


def normalised(function, *shape, dtype=torch.float32):
    def run(device):
        x = numbers(*shape, dtype=dtype).to(device).requires_grad_()
        weight = numbers(shape[1], dtype=dtype).to(device).requires_grad_()
        output = function(x, weight)
        output.square().sum().backward()
        return [output, x.grad, weight.grad]

    return run


def statistics(x, weight):
    mean, var = torch.zeros(x.shape[1], device=x.device), torch.ones(x.shape[1], device=x.device)
    output = functional.batch_norm(x, mean, var, weight, training=True)
    return output + mean[:, None] + functional.batch_norm(x, mean, var, weight)


def int4(device):
    weight, x = torch.arange(16 * 128).reshape(16, 128) % 16, numbers(4, 128, dtype=torch.bfloat16)
    scales = numbers(4, 16, 2, dtype=torch.bfloat16)
    if device == "cpu":
        factors = scales.float().repeat_interleave(32, 0)
        product = x.float() @ ((weight.T - 8) * factors[..., 0] + factors[..., 1])
        return [product.bfloat16()]
    pairs = (weight[:, ::2] << 4 | weight[:, 1::2]).to(device, torch.uint8)
    packed = torch._convert_weight_to_int4pack(pairs, 2)
    return [torch._weight_int4pack_mm(x.to(device), packed, 32, scales.to(device))]


def scaled(rows):
    def run(device):
        left = numbers(32, 16).to(device, torch.float8_e4m3fn)
        right = numbers(48, 16).to(device, torch.float8_e4m3fn).t()
        scales = (numbers(32, 1).abs(), numbers(1, 48).abs()) if rows else (numbers(1), numbers(1))
        if device == "cpu":  # whose own product is newer than the GPU's
            return [(left.float() @ right.float() * scales[0] * scales[1]).bfloat16()]
        scales = [scale.to(device) for scale in scales]
        return [torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16)]

    return run


def grouped(device):
    require(torch, "_grouped_mm")
    require_kernel("aten::_grouped_mm", "CPU")
    left = numbers(24, 16, dtype=torch.bfloat16).to(device)
    right = numbers(3, 16, 16, dtype=torch.bfloat16).to(device).transpose(-2, -1)
    return [torch._grouped_mm(left, right, torch.tensor([8, 16, 24], dtype=torch.int32).to(device))]


def wide(device):
    require(torch.ops.aten.mm, "dtype")
    left, right = numbers(4, 8, dtype=torch.bfloat16), numbers(8, 4, dtype=torch.bfloat16)
    if device == "cpu":
        return [left.float() @ right.float()]
    return [torch.mm(left.to(device), right.to(device), out_dtype=torch.float32)]


def sampled(device):
    x = numbers(1, 2, 4, 4).to(device).requires_grad_()
    grid = numbers(1, 3, 3, 2).tanh().to(device).requires_grad_()
    output = functional.grid_sample(x, grid, align_corners=True)
    output.square().sum().backward()
    return [output, x.grad, grid.grad]


def in_single_precision(function):
    def run(device):
        x = numbers(4, 8, dtype=torch.float16).to(device).requires_grad_()
        output = function(x, dim=-1, dtype=torch.float32)
        output.square().sum().backward()
        return [output, x.grad]

    return run


def spoken(device):
    scores = numbers(20, 2, 5).log_softmax(-1).to(device).requires_grad_()
    texts = torch.arange(16, dtype=torch.int32) % 4 + 1  # cuDNN takes them from the host
    if device == "cuda":
        arguments = (texts, [20, 20], [8, 8], 0, True, False)
        return list(torch.ops.aten._cudnn_ctc_loss(scores.detach(), *arguments))
    lengths = torch.tensor([20, 20]), torch.tensor([8, 8])
    loss = functional.ctc_loss(scores, texts, *lengths, reduction="none")
    loss.sum().backward()
    return [loss, scores.grad]


FLASH, EFFICIENT, CUDNN = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)
SEEN = torch.tril(torch.ones(8, 8)).bool() | (torch.arange(8) < 2)
USES = {
    "flash": attended(FLASH),
    "flash, causal": attended(FLASH, is_causal=True),
    "flash, shared keys": attended(FLASH, heads=1, enable_gqa=True, scale=0.5),
    "efficient": attended(EFFICIENT, torch.float32),
    "efficient, causal": attended(EFFICIENT, torch.float32, is_causal=True),
    "efficient, mask": attended(EFFICIENT, attn_mask=SEEN),
    "flash, many lengths": of_many_lengths(FLASH, torch.bfloat16, is_causal=True),
    "efficient, many lengths": of_many_lengths(EFFICIENT, torch.float32),
    "varlen_attn": varying,
    "cuDNN": attended(CUDNN, is_causal=True),
    "cuDNN, mask": attended(CUDNN, attn_mask=SEEN),
    "LSTMCell": cells(torch.nn.LSTMCell),
    "GRUCell": cells(torch.nn.GRUCell),
    "LSTM, both ways": recurrent(bidirectional=True),
    "LSTM, packed": recurrent(packed=True),
    "LSTM, projected": recurrent(proj_size=3),
    "LSTM without biases": recurrent(bias=False),
    "bag, mean": bagged("mean"),
    "bag, sum": bagged("sum"),
    "bag, max": bagged("max"),
    "batch norm": normalised(statistics, 4, 3, 5),
    "rms norm, half": normalised(
        lambda x, weight: functional.rms_norm(x, (8,), weight), 4, 8, dtype=torch.float16
    ),
    "layer norm, bfloat16": normalised(
        lambda x, weight: functional.layer_norm(x, (8,), weight), 4, 8, dtype=torch.bfloat16
    ),
    "group norm": normalised(lambda x, weight: functional.group_norm(x, 2, weight), 4, 8, 5),
    "log sigmoid": normalised(lambda x, weight: functional.logsigmoid(x * weight), 4, 8),
    "softmax of half": in_single_precision(functional.softmax),
    "log softmax of half": in_single_precision(functional.log_softmax),
    "int4": int4,
    "scaled": scaled(rows=False),
    "scaled by rows": scaled(rows=True),
    "grouped": grouped,
    "out_dtype": wide,
    "grid_sample": sampled,
    "ctc_loss": spoken,
    "histc": lambda device: [torch.histc(numbers(20).to(device), 4)],
    "depthwise": lambda device: [
        functional.conv2d(numbers(1, 4, 5, 5).to(device), numbers(4, 1, 3, 3).to(device), groups=4)
    ],
}
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}


@pytest.mark.parametrize("name", USES)
def test_results_and_gradients_are_the_cpus(mode, name):
    expected, results = USES[name]("cpu"), USES[name]("cuda")
    assert mode.host.unknown.failures == {}
    for result, wanted in zip(results, expected, strict=True):
        tolerance = TOLERANCES[wanted.dtype]
        torch.testing.assert_close(result.cpu(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("mode")
def test_attention_to_what_is_not_a_number_is_none_either():
    query = numbers(1, 1, 8, 16)
    query[0, 0, 2] = torch.nan
    query = query.to("cuda").requires_grad_()
    with sdpa_kernel(EFFICIENT):
        value = torch.ones_like(query)
        output = functional.scaled_dot_product_attention(query, query.detach(), value)
    output.sum().backward()
    assert output.isnan().all()  # each other query attends to that key
    assert query.grad.isnan().all()


def test_whole_numbers_are_counted_in_bins_of_whole_numbers(mode):
    values = torch.arange(-20, 90)
    for least, greatest, bins in ((1, 50, 49), (-3, 60, 7), (0, 0, 10)):
        ends = (least, greatest) if greatest else (-20, 89)
        inside = values[(values >= ends[0]) & (values <= ends[1])]
        places = ((inside - ends[0]) * bins // (ends[1] - ends[0])).clamp(max=bins - 1)
        counts = torch.histc(values.to("cuda"), bins, least, greatest)
        assert counts.tolist() == torch.bincount(places, minlength=bins).tolist()
    assert mode.host.unknown.failures == {}


def test_what_dropout_leaves_is_scaled(mode):
    output, mask = torch.ops.aten._fused_dropout(torch.ones(1000, device="cuda"), 0.25)
    assert torch.equal(output.cpu(), mask.cpu() * 4.0)
    assert 150 < mask.sum().item() < 350
    assert mode.host.unknown.failures == {}


@pytest.mark.usefixtures("mode")
def test_attentions_dropout_has_one_mask_forwards_and_backwards():
    query = torch.randn(1, 1, 8, 16, device="cuda", dtype=torch.bfloat16)
    value = torch.ones_like(query).requires_grad_()
    output = functional.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
    output.float().sum().backward()
    rows = output.detach().float().cpu()[0, 0, :, 0]  # what is left of each row's weights
    assert rows.std() > 0.1
    assert value.grad.float().sum().item() == pytest.approx(rows.sum().item() * 16, rel=0.05)


def test_what_attention_would_cost_reads_no_lengths_from_the_device(mode):
    known = torch.arange(5, device="cuda")
    heads = numbers(12, 3, 16, dtype=torch.bfloat16).to("cuda")
    starts = torch.tensor(STARTS, device="cuda", dtype=torch.int32)
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    rest = (starts, starts, 6, 6, 0.0, False, False)
    output, *others = torch.ops.aten._flash_attention_forward(heads, heads, heads, *rest)
    results = [part for part in (output, *others) if part.is_cuda and part.numel()]
    made = {part.untyped_storage().data_ptr() for part in results}
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - allocations == len(made)
    assert mode.values.is_known(known)
    assert mode.values.is_known(output)


def test_lengths_that_an_operator_returns_as_they_are_stay_known(mode):
    require(torch.ops.aten, "_cudnn_attention_backward")  # before it, none took lengths
    rows = 1 << 19  # too large to be computed
    heads = torch.empty(rows, 3, 16, dtype=torch.bfloat16, device="cuda")
    mode.values.forget(heads)
    starts = torch.tensor([0, rows], device="cuda", dtype=torch.int32)
    lengths = (starts, starts, rows, rows)
    torch.ops.aten._cudnn_attention_forward(heads, heads, heads, None, *lengths, True)
    assert starts.tolist() == [0, rows]
