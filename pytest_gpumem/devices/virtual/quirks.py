"""Workarounds for single libraries, in a process with a virtual GPU."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pytest_gpumem.devices.torch_import import IMPORTS
from pytest_gpumem.devices.virtual.compilation.triton_launches import forget_written
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


# -- bitsandbytes loads its CPU library for good if it sees no GPU when it is imported --

CPU_LIBRARY: Final = (
    "; bitsandbytes was imported outside the test, where no GPU is visible, and keeps its "
    "CPU library from then on: import bitsandbytes in the test or in a fixture, or run "
    "with --gpumem-visible=session"
)
"""clause on why a test used no memory of its device"""


def has_cpu_library() -> bool:
    """Return whether bitsandbytes has loaded its CPU library in this process."""
    loaded = getattr(sys.modules.get("bitsandbytes.cextension"), "lib", None)
    return "bitsandbytes" in sys.modules and not getattr(loaded, "compiled_with_cuda", True)


# -- cuda.bindings.runtime has a copy of NVIDIA's runtime, which works only with NVIDIA's driver --
# The copied runtime requests undocumented tables from the driver. The module that contains it
# exports C functions to other modules as Cython does (``cimport``): ``__pyx_capi__`` has a capsule
# for each function, named by its signature. Those modules read the pointers when they are imported.

COPIES: Final = Patch(
    "cuda.bindings",
    # first line: version 13.5; second: 13.0 to 13.2; "ptds": one default stream per thread
    *("_internal.runtime.__pyx_capi__", "_internal.runtime_ptds.__pyx_capi__"),
    *("_bindings.cyruntime.__pyx_capi__", "_bindings.cyruntime_ptds.__pyx_capi__"),
    reason="the copy of NVIDIA's runtime inside works only with NVIDIA's driver",
)
FIRST_CUDA: Final = 13
"""oldest CUDA whose functions are replaced: CUDA 12's headers rename functions such as
cudaGetDeviceProperties in C, so the library's function of that name is a different one"""
OTHER_NAMES: Final = {"cudaGetDeviceCount": "gpumem_visible_device_count"}
"""functions whose result for PyTorch is wrong for other callers, and their replacements"""
_NAME_OF: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)
_NEW: Final = ctypes.PYFUNCTYPE(ctypes.py_object, *[ctypes.c_void_p] * 3)


def answer_as_virtual(module: ModuleType) -> None:
    """Replace the functions of the copied runtime by the virtual GPU's.

    Functions that the virtual GPU lacks are not replaced: calls of them are refused.
    Nothing is replaced if torch or cuda.bindings is for an older CUDA.

    Args:
        module: the module that contains the copy.
    """
    library = ctypes.CDLL(None)  # the virtual GPU's functions, found as torch finds them
    cuda = getattr(sys.modules.get("torch.version"), "cuda", None) or "0"
    bindings = sys.modules["cuda.bindings"].__version__
    if min(int(version.split(".")[0]) for version in (cuda, bindings)) < FIRST_CUDA:
        return
    # Own prototypes: argument types set on ctypes.pythonapi's functions would affect all code.
    name_of = _NAME_OF(("PyCapsule_GetName", ctypes.pythonapi))
    new = _NEW(("PyCapsule_New", ctypes.pythonapi))
    capsules: dict[str, object] = getattr(module, "__pyx_capi__", {})
    for exported, capsule in capsules.items():
        name = exported.removeprefix("_")
        function = getattr(library, OTHER_NAMES.get(name, name), None)
        if name.startswith("cuda") and function is not None:
            # PyCapsule_New does not copy the name. It belongs to the module, which is never freed.
            pointer = ctypes.cast(function, ctypes.c_void_p)
            capsules[exported] = new(pointer, name_of(capsule), None)


# -- JAX asks CUPTI for its version: without a driver, CUPTI calls itself until it crashes --

DEVICES: Final = Patch(
    "jax_plugins",
    *("xla_cuda12.initialize", "xla_cuda13.initialize"),
    reason="JAX's CUDA devices are refused by name",
)
JAX_REFUSAL: Final = (
    "the virtual GPU does not support JAX's CUDA devices, because JAX loads its kernels "
    "itself; set JAX_PLATFORMS=cpu, or run this on a real GPU (--gpumem-device=cuda)"
)


def refuse_devices(plugin: ModuleType) -> None:
    """Make JAX's CUDA plugin fail, so that JAX logs the error and uses its other devices.

    ``plugin`` is the module whose ``initialize`` registers CUDA devices with JAX.
    """

    def initialize() -> NoReturn:
        raise RuntimeError(JAX_REFUSAL)

    DEVICES.on(plugin, "initialize", initialize)


# -- numba.cuda loads and launches kernels with functions of the driver that it expects to exist --

DRIVER: Final = Patch(
    "numba.cuda.cudadrv.driver",
    *("driver.is_initialized", "driver.initialization_error"),
    reason="numba.cuda is refused by name",
)
NUMBA_REFUSAL: Final = (
    "the virtual GPU does not support numba.cuda, because numba loads its kernels itself; "
    "guard the code with `if numba.cuda.is_available():`, or run this on a real GPU "
    "(--gpumem-device=cuda)"
)


def refuse_driver(module: ModuleType) -> None:
    """Make ``numba.cuda.is_available()`` return False, and each use raise CudaSupportError.

    ``module`` contains the object ``driver``, which calls CUDA's driver.
    """
    if hasattr(type(getattr(module, "driver", None)), "ensure_initialized"):
        DRIVER.put(module, dict(zip(DRIVER.names, (True, NUMBA_REFUSAL), strict=True)))


# -- FlashInfer compiles its kernels, and the C++ functions that launch them, at the first use --

JIT_MODULES: Final = Patch(
    "flashinfer.jit.core",
    "JitSpec.build_and_load",
    reason="FlashInfer's sampling kernels are not compiled, because no kernel runs",
)
WRITING_MODULES: Final = frozenset({"sampling"})
"""FlashInfer's modules whose functions return nothing, allocate nothing, and only launch kernels
that write to tensors among the arguments: flashinfer_sampling_binding.cu declares each void"""


class WritingModule:
    """Replaces a compiled module that only launches kernels.

    Its functions launch nothing, and mark the tensors among their arguments as unknown.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, function: str) -> Callable[..., None]:
        if function.startswith("__"):  # copy, pickle and inspect look up such names
            raise AttributeError(function)

        def write(*args: object, **kwargs: object) -> None:
            forget_written(f"{self._name}.{function}", [*args, *kwargs.values()])

        return write


def load_without_compiler(module: ModuleType) -> None:
    """Make FlashInfer load a WritingModule in place of each module in WRITING_MODULES.

    Other modules are compiled: their functions return figures that callers need, such as the
    workspace of an attention's plan, and call CUDA's runtime, which the virtual GPU has.
    """
    JIT_MODULES.wrap(module, wrapped_by(_load_module))


def _load_module(build_and_load: Callable[[Any], object], spec: Any) -> object:  # noqa: ANN401 - FlashInfer's
    if spec.name in WRITING_MODULES:
        return WritingModule(f"flashinfer {spec.name}")
    try:
        return build_and_load(spec)
    except (RuntimeError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(". ")
        raise DeviceError(
            f"FlashInfer's module {spec.name!r}",
            f"its functions return figures that the virtual GPU cannot know, so they must be "
            f"compiled, and this failed ({reason})",
            "install the CUDA toolkit (nvcc, and the headers of all its libraries), or use no "
            "kernels of FlashInfer: in vLLM, --attention-backend FLASH_ATTN or TRITON_ATTN for "
            "attention, --moe-backend triton for experts, VLLM_USE_FLASHINFER_SAMPLER=0 for "
            "sampling; in SGLang, --attention-backend triton",
        ) from error


# -- SGLang compiles kernels of its own at the first use --

SGLANG_MODULES: Final = Patch(
    "sglang.kernels.jit.utils.compile.loader",
    "load_jit",
    reason="SGLang's kernels are not compiled, because no kernel runs",
)
RETURNING_MODULES: Final = frozenset(
    {"communicator", "cuda_ipc", "custom_all_reduce", "tp_qknorm", "dpsk_v4_compress_plan"}
    | {"hicache", "occupancy_cluster_probe", "paged_experts"}
)
"""SGLang's modules with functions whose results its kernels/ops use (0.5.23). Functions of its
other modules only launch kernels that write to tensors among the arguments"""


def load_without_nvcc(module: ModuleType) -> None:
    """Make SGLang load a WritingModule in place of each CUDA module that only launches kernels."""
    SGLANG_MODULES.wrap(module, wrapped_by(_load_jit))


def _load_jit(load: Callable[..., object], *names: str, **sources: Any) -> object:  # noqa: ANN401 - SGLang's
    # A module without CUDA files runs on the host.
    if names[0] in RETURNING_MODULES or not sources.get("cuda_files"):
        return load(*names, **sources)
    return WritingModule(f"sglang {names[0]}")


# -- CuTe DSL's compiled functions launch through a copy of NVIDIA's runtime inside its library --

LAUNCHES: Final = Patch(
    "cutlass.cutlass_dsl.tvm_ffi_provider",
    *("TVMFFIJitCompiledFunction.__call__", "TVMFFIJitCompiledFunctionWithKwargs.__call__"),
    reason="nvidia-cutlass-dsl has a copy of NVIDIA's runtime, which works only with its driver",
)


def launch_nothing(module: ModuleType) -> None:
    """Make compiled functions of CuTe DSL mark their tensors as unknown, and return.

    Their callers allocate the outputs: a function of CuTe DSL cannot allocate PyTorch's memory.
    """
    LAUNCHES.wrap(module, wrapped_by(_mark_written))


def _mark_written(
    _call: Callable[..., object],
    function: Any,  # noqa: ANN401 - CuTe DSL's
    *args: object,
    **kwargs: object,
) -> None:
    # "cutlass___call___NAME_object_at__", followed by the types of the arguments
    name = function.function_name.removeprefix("cutlass___call___").partition("_object_at_")[0]
    forget_written(f"CuTe DSL {name}", [*args, *kwargs.values()])


# -- vLLM's model runner reads back how many tokens its Triton kernels have sampled --

SAMPLING: Final = Patch(
    "vllm.v1.worker.gpu.model_runner",
    "GPUModelRunner.sample",
    reason="vLLM waits for ever for tokens that no kernel samples: a request samples one a step",
)


def sample_one_token(module: ModuleType) -> None:
    """Make each request of vLLM sample one token a step, and none within its prompt.

    A Triton kernel counts the tokens, and the scheduler waits until a request has all its tokens.
    Without speculative decoding a GPU has the same counts; with it, this rejects all drafts.
    """
    SAMPLING.wrap(module, wrapped_by(_sample))


def _sample(
    sample: Callable[..., tuple[Any, Any, Any]],
    runner: Any,  # noqa: ANN401 - vLLM's
    hidden: object,
    batch: Any,  # noqa: ANN401 - vLLM's
    *arguments: object,
) -> tuple[Any, Any, Any]:
    import torch

    output, sampled, rejected = sample(runner, hidden, batch, *arguments)
    requests = batch.idx_mapping_np
    computed = getattr(batch, "num_computed_prefill_tokens_np", None)  # vLLM before 0.20 has none
    if computed is None:
        computed = runner.req_states.num_computed_prefill_tokens[requests]
    ends = computed + batch.num_scheduled_tokens
    counts = ends >= runner.req_states.prefill_len.np[requests]
    logits = batch.cu_num_logits_np
    sampled.copy_(torch.from_numpy(counts))
    rejected.copy_(torch.from_numpy((logits[1:] - logits[:-1] - 1) * counts))
    return output, sampled, rejected


HOOKS: Final = {
    **{
        f"{COPIES.module}.{name.removesuffix('.__pyx_capi__')}": answer_as_virtual
        for name in COPIES.names
    },
    "jax_plugins.xla_cuda12": refuse_devices,
    "jax_plugins.xla_cuda13": refuse_devices,
    DRIVER.module: refuse_driver,
    JIT_MODULES.module: load_without_compiler,
    SGLANG_MODULES.module: load_without_nvcc,
    LAUNCHES.module: launch_nothing,
    SAMPLING.module: sample_one_token,
}
"""functions to call with a library's module once it is imported, by the module's name"""


@functools.cache
def install_hooks() -> None:
    """Register the functions of HOOKS for the imports of their modules."""
    for module, hook in HOOKS.items():
        IMPORTS.call_after(module, hook)
