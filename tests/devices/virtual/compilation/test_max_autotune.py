"""torch.compile(mode="max-autotune") on the virtual GPU."""

import json
import types

import pytest
from helpers.left_out import need_triton
from helpers.virtual_gpu import child, virtual_card

from pytest_gpumem.devices.virtual.compilation.compiled_code import LESS_SURE
from pytest_gpumem.devices.virtual.compilation.max_autotune import (
    COMPILATION,
    LEFT_OUT,
    MISSING,
    MaxAutotuneSwitch,
)

COMPILE = """
import json, os, sys, tempfile
from pathlib import Path

import torch
import pytest_gpumem

layer = torch.nn.Linear(128, 256).cuda().half()
batch = torch.zeros(64, 128, device="cuda").half()


def step(batch):
    return torch.nn.functional.gelu(layer(batch))


def kernels():
    return len(list(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.ttir")))


figures = []
for _ in range(2):
    torch.compiler.reset()
    with pytest_gpumem.measure() as m:
        compiled = torch.compile(step, mode="max-autotune-no-cudagraphs")
        compiled(batch)
    figures.append([kernels(), m.peak_allocated, m.peak_reserved, list(m.measurement.note_texts)])
for run in (compiled, step):
    with pytest_gpumem.measure() as m:
        run(batch)
    figures.append(list(m.measurement.note_texts))
os.write(1, json.dumps(figures).encode())
"""


def test_max_autotune_compiles_one_kernel_and_has_the_same_figures_again(tmp_path):
    """The first time without a cache, the second time with one."""
    need_triton()
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    first, second, again, eager = json.loads(child(COMPILE, warm=True, **folders))
    assert first == second
    assert first[0] == 1  # the kernel after the matrix product
    assert first[3] == [LEFT_OUT, LESS_SURE]
    assert again == [LESS_SURE]  # it was compiled in an earlier run
    assert eager == []


@pytest.fixture
def compiler():
    """A stand-in for PyTorch's module, with the settings of each compilation."""
    module = types.ModuleType(COMPILATION.module)
    module.config = types.SimpleNamespace(
        max_autotune=False, max_autotune_gemm=False, triton=types.SimpleNamespace()
    )
    module.calls = []

    def compile_fx(graph, inputs, inner_compile=None, config_patches=None):
        module.calls.append(config_patches)

    module.compile_fx = compile_fx
    return module


def test_only_what_this_torch_has_is_turned_off(compiler):
    switch = MaxAutotuneSwitch()
    switch.install(compiler)
    with virtual_card():
        compiler.compile_fx(None, [])
        compiler.compile_fx(None, [], config_patches={"triton.cudagraphs": True})
        assert switch.notes() == []
        compiler.compile_fx(None, [], None, {"max_autotune": True, "triton.cudagraphs": True})
        compiler.config.max_autotune_gemm = True  # by the environment, or by hand
        compiler.compile_fx(None, [])
        assert switch.notes() == [LEFT_OUT]
        switch.begin()
        assert switch.notes() == []
    off = {"max_autotune": False, "max_autotune_gemm": False}
    cudagraphs = {"triton.cudagraphs": True}
    assert compiler.calls == [None, cudagraphs, {**off, **cudagraphs}, off]


def test_what_is_compiled_where_no_gpu_is_shown_is_tuned(compiler):
    switch = MaxAutotuneSwitch()
    switch.install(compiler)
    compiler.compile_fx(None, [], config_patches={"max_autotune": True})
    assert compiler.calls == [{"max_autotune": True}]
    assert switch.notes() == []


@pytest.mark.parametrize("attribute", ["compile_fx", "config"])
def test_a_torch_without_the_function_or_the_settings_is_left_as_it_is_and_noted(
    compiler, attribute
):
    delattr(compiler, attribute)
    names = set(vars(compiler))
    switch = MaxAutotuneSwitch()
    switch.install(compiler)
    assert set(vars(compiler)) == names
    assert switch.notes() == [MISSING]
