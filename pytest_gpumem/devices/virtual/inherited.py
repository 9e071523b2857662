"""Sets up the virtual GPU in child processes: their environment, and patches of PyTorch.

The environment variables are set while the virtual GPU is visible. They make a process that starts
meanwhile preload the native library; this module does the rest.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.torch_import import IMPORTS
from pytest_gpumem.devices.variables import HOOK, PYTHON_PATH, prepend, set_variable
from pytest_gpumem.devices.virtual import INHERITED, VALUES, loaded, native
from pytest_gpumem.devices.virtual.missing_libraries import supply_missing_libraries
from pytest_gpumem.devices.virtual.quirks import install_hooks
from pytest_gpumem.devices.virtual.ranks.object_messages import carry_objects
from pytest_gpumem.notes import NoteKind, notes_of
from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from pytest_gpumem.devices.virtual import GuessRows
    from pytest_gpumem.devices.virtual.aspects import Aspects
    from pytest_gpumem.notes import Note

TRITON: Final = "TRITON_LIBCUDA_PATH"
COMPILER: Final = "LIBRARY_PATH"
NCCL: Final = "VLLM_NCCL_SO_PATH"
"""environment variable with the path of the NCCL library that vLLM loads with ctypes"""
PRELOAD: Final = "LD_PRELOAD"
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
INHERITED_VISIBLE: Final = "GPUMEM_INHERITED_VISIBLE"
"""environment variable that passes the session's value of VISIBLE, which refers to real GPUs, to
child processes: "=" and the value, or nothing if VISIBLE is unset. The native library ignores
VISIBLE there unless it has another value"""
LIBRARIES: Final = ":".join(map(str, native.ALL))
SHAPE_CHECK: Final = Patch(
    "torch.distributed",
    "_verify_params_across_processes",
    reason="DistributedDataParallel compares ranks' shapes by gathered figures, which are zeros",
)


@contextmanager
def adapted(description: str) -> Iterator[None]:
    """Adapt child processes, Triton and torch.distributed in the block.

    A process started in the block (by torchrun, or ``torch.multiprocessing`` with spawn) preloads
    the native library; ``description`` names its cards. ``CUDA_VISIBLE_DEVICES`` selects some of
    these cards if it is set in the block; a value set earlier does not.

    Triton links its launcher with the driver library, and searches the system's folders unless
    TRITON_LIBCUDA_PATH names another. Inductor links its C++ wrappers with ``-lcuda``, and so do
    older versions of Triton; compilers look for that library in LIBRARY_PATH. So both variables
    get the native library's folder.
    """
    with ExitStack() as stack:
        preload = os.environ.get(PRELOAD)
        set_variable(stack, PRELOAD, f"{LIBRARIES}:{preload}" if preload else LIBRARIES)
        set_variable(stack, INHERITED, description)
        visible = os.environ.get(VISIBLE)
        set_variable(stack, INHERITED_VISIBLE, "" if visible is None else f"={visible}")
        for name, path in ((TRITON, native.FOLDER), (NCCL, native.LIBRARY)):
            if name not in os.environ:
                set_variable(stack, name, str(path))
        linked = os.environ.get(COMPILER)  # after the user's folders: a real driver is preferred
        set_variable(stack, COMPILER, f"{linked}:{native.FOLDER}" if linked else str(native.FOLDER))
        skip_shape_check(stack)
        prepend(stack, PYTHON_PATH, HOOK)  # makes child processes skip the shape check too
        yield


def skip_shape_check(stack: ExitStack) -> None:
    """Skip DistributedDataParallel's comparison of all ranks' parameters until the stack closes.

    It compares gathered numbers, which newer versions of PyTorch copy with a kernel, so that they
    are zeros here.
    """
    SHAPE_CHECK.wrap(sys.modules.get(SHAPE_CHECK.module), lambda _: lambda *_args: None, stack)


class InheritedGpu:
    """Adapts this process when it imports torch, and again when it initializes CUDA."""

    def __init__(self) -> None:
        self._stack = ExitStack()  # never closed: the patches last as long as the process
        self._aspects: Aspects | None = None
        self._failure = ""
        """why this process computes no values; "" if it does"""
        self._stubs = supply_missing_libraries()
        install_hooks()  # now, because the import of torch imports cuda.bindings
        IMPORTS.call_after("torch", self._adapt)

    def _adapt(self, torch: ModuleType) -> None:
        skip_shape_check(self._stack)
        carry_objects(sys.modules.get("torch.distributed"))
        if torch.version.cuda:
            torch.cuda._lazy_call(self._begin)

    def _begin(self) -> None:
        from pytest_gpumem.devices.virtual.aspects import Aspects
        from pytest_gpumem.devices.virtual.library import NativeLibrary

        if loaded() is not None:
            return  # a pytest session or use_virtual_gpu() has loaded it, with its own Aspects
        try:
            library, torch = NativeLibrary(), sys.modules["torch"]
            library.set_kernel_architectures(torch)
            aspects = Aspects(library)
            aspects.read_versions(torch, self._stubs)
            aspects.install()
            aspects.values.initial = os.environ.get(VALUES, "off")  # type: ignore[assignment]
            self._stack.enter_context(aspects.values.running())
            aspects.begin()
            self._aspects = aspects
        except Exception as error:  # noqa: BLE001 - PyTorch would raise it at the use of CUDA
            self._failure = f"no values are computed: {type(error).__name__}: {error}"

    def report(self) -> tuple[GuessRows, list[Note]]:
        """Return the uncomputed values that this process branched on, and notes on its figures."""
        if self._aspects is None:
            return ((), ()), list(notes_of(NoteKind.VALUES, filter(None, [self._failure])))
        return self._aspects.report()

    def machine_device(self, index: int) -> int:
        """Return the machine's index of a device of this process."""
        from pytest_gpumem.devices.virtual.library import NativeLibrary

        return NativeLibrary().machine_device(index)
