"""Refusals are heard past the capture of pytest, and so is the end of a process in a test."""

import os
import re
import subprocess
import sys

import pytest
import torch
from helpers.left_out import NVIDIA, need_libraries
from helpers.native_sources import compiler
from helpers.virtual_gpu import child, run_python
from helpers.warm import HANGS, warm_python

from pytest_gpumem.devices.cards import find_card
from pytest_gpumem.devices.virtual import quirks

EXITING = """
#include <stdlib.h>
int cuGreenCtxCreate(void);
int give_up(int status) { if (cuGreenCtxCreate()) exit(status); return 0; }
"""
"""as bitsandbytes does upon an error of CUDA's: it asks for something and calls exit()"""

SUITE = """
import ctypes, os, sys
import pytest

def give_up(status):
    return ctypes.CDLL({library!r}).give_up(status)

@pytest.mark.gpu_memory
def test_it(gpu_memory):
    print("captured")
    {body}

def test_after():
    pass
"""


@pytest.fixture
def run(tmp_path):
    """Run a suite of one marked test in a process of its own; return the process."""
    source, library = tmp_path / "exiting.c", tmp_path / "libexiting.so"
    source.write_text(EXITING)
    subprocess.run([*compiler(), "-shared", "-fPIC", source, "-o", library], check=True)

    def run_suite(body, *options, python=None):
        (tmp_path / "test_suite.py").write_text(SUITE.format(library=str(library), body=body))
        options += ("-p", "no:cacheprovider", "--gpumem-device=virtual", "-v")
        return subprocess.run(
            [python or warm_python(), "-m", "pytest", *options, "test_suite.py"],
            cwd=tmp_path,
            env={**os.environ, "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=HANGS,
            check=False,
        )

    return run_suite


def test_a_process_that_a_library_ends_names_the_test_and_the_refusal(run):
    done = run("give_up(3)", python=sys.executable)  # the interpreter's end
    assert done.returncode == 3
    assert "passed" not in done.stdout  # pytest had no chance to say anything
    lines = done.stderr.split("\n")
    assert "pytest-gpumem: the virtual GPU does not support cuGreenCtxCreate" in lines
    assert (
        "pytest-gpumem: the process ended with exit status 3 in test_suite.py::test_it (call); "
        "last refused: cuGreenCtxCreate"
    ) in lines


def test_a_refusal_is_heard_once_and_stays_in_the_capture(run):
    done = run("[ctypes.CDLL(None).cuGreenCtxCreate() for _ in range(3)]")
    message = "pytest-gpumem: the virtual GPU does not support cuGreenCtxCreate"
    assert done.stderr.count(message) == 1
    assert message in done.stdout.split("Captured stderr call")[1]
    assert "ended with exit status" not in done.stderr


def test_without_capture_it_is_said_once(run):
    done = run("ctypes.CDLL(None).cuGreenCtxCreate()", "-s")
    assert done.stderr.count("the virtual GPU does not support cuGreenCtxCreate") == 1


def test_an_end_that_pytest_itself_makes_is_not_reported(run):
    done = run("pytest.exit('enough', 7)")
    assert done.returncode == 7
    assert "ended with exit status" not in done.stderr


def test_a_forked_childs_end_is_not_reported(run):
    done = run("pid = os.fork(); pid or ctypes.CDLL(None).exit(5); assert os.waitpid(pid, 0)[1]")
    assert "2 passed" in done.stdout
    assert "ended with exit status" not in done.stderr


def test_a_cuda_runtime_of_a_librarys_own_is_refused_by_name():
    """As an extension has it that is linked statically, and ctypes or CuPy that load another."""
    need_libraries()
    found = sorted(NVIDIA.rglob("libcudart.so.*"))
    done = run_python(
        """
        import ctypes, sys
        from pytest_gpumem.devices.virtual.library import NativeLibrary

        library = NativeLibrary()
        library.show(1)
        runtime = ctypes.CDLL(sys.argv[1])
        print(runtime.cudaFree(None))
        print(*library.unsupported())
        """,
        str(found[0]),
    )
    assert done.returncode == 0, done.stderr
    status, refused = done.stdout.splitlines()
    assert status == "36"  # "not supported in the installed CUDA driver": the library's own words
    assert refused.startswith(f"{found[0]}: it has a CUDA runtime of its own (")
    assert f"does not support {refused}" in done.stderr


BINDINGS = """
import torch
from cuda.bindings import driver, runtime
from pytest_gpumem.devices.virtual.device import VirtualDevice

driver.cuInit(0)
assert driver.cuMemAlloc(1 << 20)[0] == 0
print(*VirtualDevice.loaded().library.unsupported())
free = torch.cuda.mem_get_info()[0]
status, address = runtime.cudaMalloc(32 << 20)
print(int(status), free - torch.cuda.mem_get_info()[0])
print(*VirtualDevice.loaded().library.unsupported())
"""


def bindings_or_skip():
    """Skip the test where cuda.bindings is not installed, or is of another CUDA than 13."""
    bindings = pytest.importorskip("cuda.bindings", reason="pip install cuda-bindings")
    cuda = torch.version.cuda
    if not bindings.__version__.startswith("13.") or not cuda.startswith("13."):
        pytest.skip(f"cuda.bindings {bindings.__version__} with torch for CUDA {cuda}")


def test_the_bindings_of_driver_and_runtime_work():
    """cuda.bindings: the runtime's have a copy of it inside, whose place the virtual GPU takes."""
    bindings_or_skip()
    assert child(BINDINGS, card="T4", warm=True) == f"\n0 {32 << 20}\n\n"


def test_the_runtimes_bindings_see_the_devices_that_are_shown_and_a_graph_of_pytorchs():
    bindings_or_skip()
    text = child(
        """
        import torch
        from cuda.bindings import runtime

        print(*map(int, runtime.cudaGetDeviceCount()))
        status, properties = runtime.cudaGetDeviceProperties(0)
        print(properties.name.decode(), properties.totalGlobalMem)
        x = torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            y = x + 1
        nodes = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(graph.raw_cuda_graph()), 1)[1]
        print(*map(int, runtime.cudaGraphNodeGetType(nodes[0])))
        graph.instantiate()
        executable = runtime.cudaGraphExec_t(graph.raw_cuda_graph_exec())
        print(*map(int, runtime.cudaGraphExecGetFlags(executable)))
        """,
        card="T4",
        devices=2,
        warm=True,
    )
    total = find_card("T4").total_memory
    assert text.splitlines()[:3] == ["0 2", f"Tesla T4 {total}", "0 0"]
    assert text.splitlines()[3].startswith("0 ")


def test_the_runtimes_bindings_work_in_a_started_process():
    """They read their functions when torch imports them."""
    bindings_or_skip()
    text = child(
        """
        import subprocess, sys

        code = "import torch; from cuda.bindings import runtime; print(*runtime.cudaMalloc(4)[:1])"
        subprocess.run([sys.executable, "-c", code], check=True)
        """,
        card="T4",
        warm=True,
    )
    assert "cudaSuccess" in text


def test_the_runtimes_bindings_of_an_older_cuda_are_refused_by_name():
    """The driver's look every function up, also the one that a runtime asks for."""
    pytest.importorskip("cuda.bindings.driver", reason="pip install cuda-bindings")
    begin = """
import pytest_gpumem
from pytest_gpumem.devices.virtual import quirks

quirks.FIRST_CUDA = 99
pytest_gpumem.use_virtual_gpu("T4")
"""
    before, result, after = child(begin + BINDINGS, card=None).splitlines()
    assert before == ""
    assert result == "36 0"
    assert re.search(r"bindings/_\w+/\w+", after)
    assert after.endswith(
        "(import torch before it, with cuda.bindings 13 and torch for CUDA 13; or use torch.cuda)"
    )


NUMBA = """
class Driver:
    is_initialized, initialization_error = False, None

    def ensure_initialized(self):
        assert self.is_initialized, "the driver is called"

    @property
    def is_available(self):
        self.ensure_initialized()
        return self.initialization_error is None

driver = Driver()
"""


def test_numba_is_not_available_and_names_the_virtual_gpu(tmp_path):
    """A stand-in for numba.cuda's module, of the same names: Numba itself calls the driver."""
    folder = tmp_path / "numba/cuda/cudadrv"
    folder.mkdir(parents=True)
    (folder / "driver.py").write_text(NUMBA)
    text = child(
        """
        import sys

        sys.path.insert(0, sys.argv[1])
        from numba.cuda.cudadrv.driver import driver

        print(driver.is_available, driver.initialization_error)
        """,
        args=[str(tmp_path)],
        warm=True,
    )
    assert text == f"False {quirks.NUMBA_REFUSAL}\n"


def test_jax_gets_no_cuda_device_and_names_the_virtual_gpu(tmp_path):
    """A stand-in for JAX's plugin: the real one ends the process in NVIDIA's CUPTI."""
    (tmp_path / "jax_plugins").mkdir()
    (tmp_path / "jax_plugins/xla_cuda13.py").write_text("def initialize(): print('initialized')")
    text = child(
        """
        import importlib
        import sys

        sys.path.insert(0, sys.argv[1])
        try:
            importlib.import_module("jax_plugins.xla_cuda13").initialize()
        except RuntimeError as error:
            print(error)
        """,
        args=[str(tmp_path)],
        warm=True,
    )
    assert text == f"{quirks.JAX_REFUSAL}\n"


FLASHINFER = """
class JitSpec:
    def __init__(self, name):
        self.name = name

    def build_and_load(self):
        raise RuntimeError("Ninja build failed. Ninja output:\\nnvcc: not found")
"""


def test_flashinfers_sampling_is_not_compiled_and_other_modules_are_refused(tmp_path):
    """A stand-in for FlashInfer's compiler, of the same names; sampled tokens are unknown."""
    (tmp_path / "flashinfer/jit").mkdir(parents=True)
    (tmp_path / "flashinfer/jit/core.py").write_text(FLASHINFER)
    text = child(
        """
        import sys

        import torch

        sys.path.insert(0, sys.argv[1])
        from flashinfer.jit.core import JitSpec

        module = JitSpec("sampling").build_and_load()
        logits, samples = torch.ones(3, device="cuda"), torch.ones(3, device="cuda").int()
        print(type(logits.sum().item()).__name__, type(samples.sum().item()).__name__)
        print(module.sampling_from_logits(logits[:2], samples, None, True, None, 7, None, 8))
        print(type(samples.sum().item()).__name__, hasattr(module, "__copy__"))
        try:
            JitSpec("batch_prefill_with_kv_cache").build_and_load()
        except RuntimeError as error:
            print(error)
        """,
        args=[str(tmp_path)],
        warm=True,
    )
    lines = text.splitlines()
    assert lines[:2] == ["float int", "None"]
    assert lines[2] == "UncertainInt False"
    assert lines[3].startswith("FlashInfer's module 'batch_prefill_with_kv_cache': ")
    assert "compiled, and this failed (Ninja build failed)" not in lines[3]
    assert "--attention-backend FLASH_ATTN" in lines[3]


SGLANG = """
def load_jit(*names, cuda_files=None, cpp_files=None):
    raise RuntimeError(f"Failed to build JIT module {names[0]}")
"""
CUTE = """
class TVMFFIJitCompiledFunction:
    function_name = "cutlass___call___normRMSNormKernel_object_at__FakeTensorBFloat16"

    def __call__(self, *args):
        raise RuntimeError("cudaErrorCallRequiresNewerDriver")

class TVMFFIJitCompiledFunctionWithKwargs(TVMFFIJitCompiledFunction):
    def __call__(self, *args, **kwargs):
        raise RuntimeError("cudaErrorCallRequiresNewerDriver")
"""


def test_kernels_of_sglang_and_cute_dsl_leave_their_tensors_unknown(tmp_path):
    """Stand-ins of the same names: the one compiles, the other calls a copy of CUDA's runtime."""
    for name, text in (
        ("sglang/kernels/jit/utils/compile/loader.py", SGLANG),
        ("cutlass/cutlass_dsl/tvm_ffi_provider.py", CUTE),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    text = child(
        """
        import sys

        import torch

        sys.path.insert(0, sys.argv[1])
        from cutlass.cutlass_dsl.tvm_ffi_provider import (
            TVMFFIJitCompiledFunction, TVMFFIJitCompiledFunctionWithKwargs
        )
        from sglang.kernels.jit.utils.compile.loader import load_jit

        def known(tensor):
            return type(tensor.sum().item()).__name__

        first, second, third = (torch.ones(3, device="cuda").int() for _ in range(3))
        print(known(first), known(second), known(third))
        print(load_jit("fused_rope", "bf16", cuda_files=["rope.cuh"]).run(first))
        print(TVMFFIJitCompiledFunction()(second), known(first), known(second))
        print(TVMFFIJitCompiledFunctionWithKwargs()(out=third), known(third))
        for name, files in (
            ("dpsk_v4_compress_plan", {"cuda_files": ["plan.cuh"]}),  # returns tensors
            ("ngram_corpus", {"cpp_files": ["ngram.cpp"]}),  # runs on the host
        ):
            try:
                load_jit(name, **files)
            except RuntimeError as error:
                print(error)
        """,
        args=[str(tmp_path)],
        warm=True,
    )
    assert text.splitlines() == [
        "int int int",
        "None",
        "None UncertainInt UncertainInt",
        "None UncertainInt",
        "Failed to build JIT module dpsk_v4_compress_plan",
        "Failed to build JIT module ngram_corpus",
    ]


RUNNER = """
import torch

class GPUModelRunner:
    def sample(self, hidden_states, input_batch, grammar_output):
        counts = torch.empty(2, len(input_batch.idx_mapping_np), dtype=torch.int32, device="cuda")
        return grammar_output, counts[0], counts[1]
"""


@pytest.mark.parametrize("newer", [True, False])
def test_each_request_of_vllm_samples_one_token_a_step(tmp_path, newer):
    """A stand-in for vLLM's model runner, whose counts are written by a kernel of Triton.

    Of the requests in it, one is within its prompt, one at its end, and one has two drafts.
    """
    (tmp_path / "vllm/v1/worker/gpu").mkdir(parents=True)
    (tmp_path / "vllm/v1/worker/gpu/model_runner.py").write_text(RUNNER)
    text = child(
        """
        import sys
        from types import SimpleNamespace

        import numpy

        sys.path.insert(0, sys.argv[1])
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        batch = SimpleNamespace(
            idx_mapping_np=numpy.array([2, 0, 1]),
            num_scheduled_tokens=numpy.array([16, 8, 3]),
            cu_num_logits_np=numpy.array([0, 1, 2, 5]),
        )
        runner, computed = GPUModelRunner(), numpy.array([8, 4, 0])  # by place in the states
        if sys.argv[2] == "True":
            batch.num_computed_prefill_tokens_np = computed[batch.idx_mapping_np]
        runner.req_states = SimpleNamespace(
            prefill_len=SimpleNamespace(np=numpy.array([16, 4, 99])),
            num_computed_prefill_tokens=computed,
        )
        output, sampled, rejected = runner.sample(None, batch, "grammar")
        print(output, sampled.tolist(), rejected.tolist())
        """,
        args=[str(tmp_path), str(newer)],
        warm=True,
    )
    assert text == "grammar [0, 1, 1] [0, 0, 2]\n"
