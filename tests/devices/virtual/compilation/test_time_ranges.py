"""What a GPU decides by time is at the upper end of a compiled test's range, with any caches."""

import json

import pytest
import torch
from helpers.compiled_sources import OPTIMIZER_OF_8_BITS
from helpers.left_out import need_triton
from helpers.virtual_gpu import MIB, child, virtual_card

from pytest_gpumem.devices.virtual.compilation.kernel_timing import KERNELS_TIMED
from pytest_gpumem.devices.virtual.compilation.padded_products import (
    PADDED,
    PRODUCTS,
    PaddedProducts,
    Product,
)

SUITE = """
import pytest
import torch
import triton
import triton.language as tl


"""
SUITE += OPTIMIZER_OF_8_BITS
SUITE += """
def optimizer():
    optimizer_of_8_bits(4096)


@torch.compile
def layers(x, first, second):
    return (x @ first).relu() @ second


def training():
    "Products of odd sizes, whose padded operands may be saved for the backward pass."
    with torch.device("cuda"):
        x = torch.zeros(8191, 1023, dtype=torch.half)
        weights = [torch.zeros(1023, 1023, dtype=torch.half).requires_grad_() for _ in range(2)]
    for _ in range(2):
        layers(x, *weights).float().square().sum().backward()


@torch.compile
def product(a, b):
    return a @ b


def even():
    product(*torch.zeros(2, 1024, 1024, device="cuda", dtype=torch.half))


@torch.compile
def odd_product(a, b):
    return a @ b


def odd(*, grad):
    with torch.set_grad_enabled(grad):
        kept = odd_product(
            torch.zeros(8191, 1023, device="cuda", dtype=torch.half, requires_grad=True),
            torch.zeros(1023, 1001, device="cuda", dtype=torch.half),
        )
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda")


def forward():
    odd(grad=True)


def inference():
    odd(grad=False)


@triton.autotune(
    [triton.Config({"BLOCK": block}) for block in (256, 512)], key=["n"], restore_value=["x"]
)
@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + places, mask=places < n)
    tl.store(x + places, 2 * values, mask=places < n)


def autotuned():
    x = torch.zeros(16 << 20, device="cuda")
    double[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, x.numel())


@pytest.mark.parametrize("time", ["first", "again"])
@pytest.mark.parametrize("step", [optimizer, training, even, forward, inference, autotuned])
@pytest.mark.gpu_memory
def test_step(step, time):
    step()


@pytest.mark.gpu_memory(warmup=1)
def test_warm():
    optimizer()


@pytest.mark.gpu_memory(max_reserved_gib=0.18)
def test_limit():
    optimizer()
"""
AS_A_GPU = """
import os

from pytest_gpumem.devices.virtual.compilation import kernel_timing, padded_products

if "AS_A_GPU" in os.environ:
    kernel_timing.is_shown = padded_products.is_shown = lambda: False
"""
SESSION = """
import os, sys
import pytest

os.chdir(os.environ["FOLDER"])
options = ["-p", "gpumem", "-p", "no:randomly", "-p", "no:cacheprovider", "-q"]
options.append("--gpumem-visible=session")  # Triton 3.2 asks for a driver as it decorates
status = pytest.main([*options, "--gpumem-json=report.json", *sys.argv[1:]])
os._exit(0)
"""


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    """The results of sessions with cold caches, with warm ones, and with kernels timed."""
    need_triton()
    folder = tmp_path_factory.mktemp("ranges")
    (folder / "test_it.py").write_text(SUITE, encoding="utf-8")
    (folder / "conftest.py").write_text(AS_A_GPU, encoding="utf-8")

    def session(caches, *options, **more):
        environment = {
            "FOLDER": str(folder),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / caches),
            "TRITON_CACHE_DIR": str(folder / caches / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        child(SESSION, card=None, warm=True, args=options, **environment, **more)
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        return {result["nodeid"].partition("::")[2]: result for result in report["results"]}

    return {
        "cold": session("ours"),
        "warm": session("ours"),
        "GPU": session("real", "-k", "first and optimizer", AS_A_GPU="1"),
    }


def nodeid(step, *, time="first"):
    return f"test_step[{step}-{time}]"


def ends(result):
    """Return the allocated and reserved MiB of a result, at its range's ends and as measured."""
    measured = result["measurement"]
    spanned = measured["range"] or {"least": measured["peaks"], "most": measured["peaks"]}
    peaks = [spanned["least"], measured["peaks"], spanned["most"]]
    return [[peak[0][kind] / MIB for kind in ("allocated", "reserved")] for peak in peaks]


@pytest.mark.parametrize("step", ["optimizer", "training", "even", "autotuned"])
def test_a_range_is_the_same_with_cold_and_warm_caches_and_in_a_second_test(sessions, step):
    first = sessions["cold"][nodeid(step)]
    for caches, time in (("cold", "again"), ("warm", "first"), ("warm", "again")):
        result = sessions[caches][nodeid(step, time=time)]
        assert ends(result) == ends(first)
        assert result["measurement"]["range"] == first["measurement"]["range"]


def test_the_upper_end_is_what_a_gpus_first_run_reserves(sessions):
    least, usual, most = ends(sessions["cold"][nodeid("optimizer")])
    assert least == usual
    assert most == ends(sessions["GPU"][nodeid("optimizer")])[1]
    assert most[1] >= usual[1] + 50  # the buffer that flushes the cache of an H100


def test_kernels_of_tritons_are_timed_with_a_buffer_and_copies(sessions):
    _, usual, most = ends(sessions["cold"][nodeid("autotuned")])
    assert usual == [64, 64]
    assert most == [64, 64 + 64 + 256]  # the tensor that is restored, and the buffer


def test_padded_copies_may_be_saved_for_the_backward_pass(sessions):
    _, usual, most = ends(sessions["cold"][nodeid("training")])
    copy = 8192 * 1024 * 2 / MIB
    assert most[0] >= usual[0] + copy
    assert sessions["cold"][nodeid("training")]["measurement"]["range"]["reason"] == (
        f"{KERNELS_TIMED}; {PADDED}"
    )


def test_copies_stay_as_long_as_the_result_unless_no_backward_pass_can_follow(sessions):
    """A block that fills its room may be larger by less than 1 MiB."""
    for step, copies in (("forward", 2 * (8192 * 1024 + 1024 * 1008) / MIB), ("inference", 0)):
        _, usual, most = ends(sessions["cold"][nodeid(step)])
        assert copies <= most[0] - usual[0] < copies + 1


def test_products_of_even_sizes_have_no_range(sessions):
    assert sessions["cold"][nodeid("even")]["measurement"]["range"] is None


def test_a_range_takes_the_place_of_the_warnings(sessions):
    kinds = sessions["cold"][nodeid("training")]["measurement"]["note_kinds"]
    assert "timing" not in kinds
    assert "range" in kinds


def test_what_is_compiled_in_a_warm_up_has_no_range(sessions):
    least, usual, most = ends(sessions["cold"]["test_warm"])
    assert least == usual == most


@pytest.mark.parametrize("caches", ["cold", "warm"])
def test_limits_are_held_to_the_upper_end(sessions, caches):
    result = sessions[caches]["test_limit"]
    _, usual, most = ends(result)
    assert usual[1] < 0.18 * 1024 < most[1]
    assert result["verdict"]["kind"] == "over budget"


def test_code_of_a_cache_that_an_earlier_version_wrote_has_a_range():
    product = Product((8191, 1023, 1001), (8191, 1023, 1001), (1, 1, 7), itemsize=2, bias=0)
    with virtual_card() as device:
        torch.cuda.init()
        code = CachedCode()
        setattr(code, PRODUCTS, ((*product, (False, False), (True, True)),))
        call = PaddedProducts(device.gpu_choices)._call
        assert call(lambda _code: "its result", code) == "its result"
        assert device.alternatives().larger


class CachedCode:
    """Stands for PyTorch's compiled code, which is kept with our attribute."""
