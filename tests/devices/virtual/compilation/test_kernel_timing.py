"""A compiled step has one figure, with cold caches and with warm ones, alone and after others."""

import json

import pytest
from helpers.compiled_sources import OPTIMIZER_OF_8_BITS
from helpers.left_out import need_triton
from helpers.virtual_gpu import MIB, child

from pytest_gpumem.devices.virtual.compilation.compiled_code import BESIDE_OTHERS
from pytest_gpumem.devices.virtual.compilation.kernel_timing import NOT_TIMED
from pytest_gpumem.devices.virtual.compilation.padded_products import NOT_PADDED

STEPS = """
import json, os, sys

import torch
import torch._inductor.config
import pytest_gpumem
from pytest_gpumem.devices.virtual.compilation import kernel_timing

if "AS_A_GPU" in os.environ:
    kernel_timing.is_shown = lambda: False
torch._inductor.config.force_disable_caches = "NO_CACHES" in os.environ

WIDTH = 256


class Block(torch.nn.Module):
    "A transformer's block, as GPT-2 has it."

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(y.transpose(1, 2).reshape(x.shape))


def trained(model, mode=None):
    model = torch.compile(model.cuda(), mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(8, 64, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def perceptron(mode=None):
    layers = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.LayerNorm(4 * WIDTH), torch.nn.GELU()
    trained(torch.nn.Sequential(*layers), mode)


"""
STEPS += OPTIMIZER_OF_8_BITS
STEPS += """


def product_that_a_gpu_may_pad():
    product = torch.compile(lambda a, b: (a @ b).relu())
    product(*torch.zeros(2, 1023, 1023, device="cuda", dtype=torch.half))


PROGRAMS = {
    "block": lambda: trained(Block()),
    "max-autotune": lambda: perceptron("max-autotune-no-cudagraphs"),
    "optimizer": lambda: optimizer_of_8_bits(1024),
    "product": product_that_a_gpu_may_pad,
    "reduce-overhead": lambda: perceptron("reduce-overhead"),
}


def figures(program):
    with pytest_gpumem.measure() as m:
        program()
    notes = list(m.measurement.note_texts)
    return m.peak_allocated, m.peak_reserved, m.measurement.segments, notes


rows = []
for name in sys.argv[1:] or PROGRAMS:
    rows.append([name, "first", *figures(PROGRAMS[name])])
    if len(sys.argv) == 1:
        rows.append([name, "again", *figures(PROGRAMS[name])])
if len(sys.argv) == 1:
    torch.compiler.reset()
    rows.append([name, "reset", *figures(PROGRAMS[name])])
os.write(1, json.dumps(rows).encode())
"""
TIMED = "optimizer"
"""the program that is run with its kernels timed, too, as on a GPU"""
DISABLED = ("optimizer",)
"""the program that is compiled without caches as well: that takes long"""


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    """The figures of the programs in a process with cold caches, with warm ones and without any."""
    need_triton()
    folder = tmp_path_factory.mktemp("inductor")
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }

    def figures(*programs, **more):
        rows = json.loads(child(STEPS, args=programs, warm=True, **environment, **more))
        return {(name, time): values for name, time, *values in rows}

    return {
        "cold": figures(),
        "warm": figures(),
        "disabled": figures(*DISABLED, NO_CACHES="1"),
        "timed": figures(TIMED, NO_CACHES="1", AS_A_GPU="1"),
    }


def bytes_of(figures, *programs):
    return {key: values[:3] for key, values in figures.items() if key[0] in programs}


def test_figures_with_cold_and_warm_caches_and_without_caches_are_the_same(sessions):
    cold, warm, disabled = sessions["cold"], sessions["warm"], sessions["disabled"]
    programs = {name for name, _ in cold}
    assert len(programs) == 5
    assert bytes_of(warm, *programs) == bytes_of(cold, *programs)
    first = {key: values for key, values in cold.items() if key[1] == "first"}
    assert bytes_of(disabled, *DISABLED) == bytes_of(first, *DISABLED)


def test_where_kernels_are_timed_allocated_is_the_same_and_what_they_took_is_noted(sessions):
    """As on a real GPU; the segment of the buffer is left to the step."""
    cold, timed = (sessions[caches][TIMED, "first"] for caches in ("cold", "timed"))
    assert timed[0] == cold[0]
    assert timed[1] > cold[1]
    excess, left = (sentence for sentence in timed[3] if "with warm caches" in sentence)
    assert excess.startswith("while torch.compile compiled or timed kernels, ")
    assert left.startswith("torch.compile left ")


@pytest.mark.parametrize("caches", ["cold", "warm"])
def test_a_second_test_that_compiles_nothing_has_the_figures_of_the_first(sessions, caches):
    figures = sessions[caches]
    for name, time in figures:
        if time == "again" and name != "reduce-overhead":
            assert (name, figures[name, time][:3]) == (name, figures[name, "first"][:3])


def test_cuda_graphs_beside_those_of_an_earlier_test_are_noted_and_a_reset_ends_that(sessions):
    first, again, reset = (
        sessions["cold"]["reduce-overhead", time] for time in ("first", "again", "reset")
    )
    assert again[:3] != first[:3]
    assert reset[:3] == first[:3]
    assert [BESIDE_OTHERS in row[3] for row in (first, again, reset)] == [False, True, False]


def test_what_a_gpus_first_run_takes_besides_is_noted_where_kernels_would_be_timed(sessions):
    timed, padded = (
        {key for key, values in sessions["cold"].items() if sentence in values[3]}
        for sentence in (NOT_TIMED, NOT_PADDED)
    )
    times = ("first", "again")
    assert {(name, time) for name in ("block", "optimizer") for time in times} <= timed
    assert padded == {("product", time) for time in times}


def test_the_notes_are_the_same_with_warm_caches(sessions):
    for key, values in sessions["cold"].items():
        warm = sessions["warm"][key][3]
        for sentence in (NOT_TIMED, NOT_PADDED):
            assert (key, sentence in warm) == (key, sentence in values[3])


KERNEL = """
import torch, triton
import triton.language as tl


@triton.autotune(
    [triton.Config({"BLOCK": block}) for block in (256, 512)], key=["n"], restore_value=["x"]
)
@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + places, mask=places < n)
    tl.store(x + places, 2 * values, mask=places < n)


def step():
    x = torch.zeros(16 << 20, device="cuda")
    double[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, x.numel())
"""
TWICE = """
import json, os, sys

import pytest_gpumem

sys.path.insert(0, os.environ["FOLDER"])
from kernel import double, step

rows = []
for _ in range(2):
    with pytest_gpumem.measure() as m:
        step()
    rows.append([m.peak_allocated, m.peak_reserved, list(m.measurement.note_texts)])
os.write(1, json.dumps([*rows, str(double.best_config.kwargs)]).encode())
"""


def test_a_kernel_of_tritons_that_was_autotuned_in_an_earlier_test_has_the_same_figures(tmp_path):
    need_triton()
    (tmp_path / "kernel.py").write_text(KERNEL, encoding="utf-8")
    folders = {"FOLDER": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    first, again, configuration = json.loads(child(TWICE, warm=True, **folders))
    assert first[:2] == [64 * MIB, 64 * MIB]
    assert again[:2] == first[:2]
    assert all(NOT_TIMED in row[2] for row in (first, again))
    assert configuration == "{'BLOCK': 256}"


ALL_TIMES = """
from torch._inductor.runtime.benchmarking import benchmarker

time = benchmarker.benchmark_gpu
print(time(lambda: None), time(lambda: None, return_mode="all"))
"""


def test_times_are_a_list_where_inductor_requests_all_of_them():
    assert child(ALL_TIMES, warm=True).split(maxsplit=1) == ["1.0", "[1.0]\n"]


PROFILING_RUN = """
import json, os, sys

import pytest_gpumem
import torch
from pytest_gpumem.devices.servers import WATCH

sys.path.insert(0, os.environ["FOLDER"])
from kernel import step

"""
PROFILING_RUN += OPTIMIZER_OF_8_BITS
PROFILING_RUN += """

def peak(program):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with WATCH.profiling_run():
        program()
    return torch.cuda.max_memory_allocated()


with pytest_gpumem.measure() as m:
    peaks = [peak(program) for program in (lambda: optimizer_of_8_bits(1024), step)]
os.write(1, json.dumps([*peaks, list(m.measurement.note_texts)]).encode())
"""


def test_a_servers_profiling_run_has_the_memory_that_a_gpu_takes_to_time_kernels(tmp_path):
    """Inductor's choices are in the cache at the second start, those of Triton's autotuner never.

    On an H100 Inductor flushes the cache by a buffer of 50 MiB, Triton's autotuner by 256 MiB.
    """
    need_triton()
    (tmp_path / "kernel.py").write_text(KERNEL, encoding="utf-8")
    folders = {
        "FOLDER": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    first, again = (json.loads(child(PROFILING_RUN, warm=True, **folders)) for _ in range(2))
    copy_of_scale = 4 * 1024 * 1024 // 256
    assert first[0] - again[0] == 50 * MIB + copy_of_scale
    assert first[1] == again[1] == (64 + 64 + 256) * MIB
    assert [NOT_TIMED in notes for *_, notes in (first, again)] == [False, True]
