"""Environment variables and torch.distributed, adapted to the virtual GPU while it is visible."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.variables import HOOK, PYTHON_PATH, prepend, set_variable
from pytest_gpumem.devices.virtual import INHERITED, native
from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Iterator

TRITON: Final = "TRITON_LIBCUDA_PATH"
COMPILER: Final = "LIBRARY_PATH"
PRELOAD: Final = "LD_PRELOAD"
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
INHERITED_VISIBLE: Final = "GPUMEM_INHERITED_VISIBLE"
"""tells child processes the value of VISIBLE that is about the machine's own GPUs: "=" and the
value, or nothing where that variable is not set"""
LIBRARIES: Final = ":".join(map(str, native.ALL))
SHAPE_CHECK: Final = Patch(
    "torch.distributed",
    "_verify_params_across_processes",
    reason="DistributedDataParallel compares ranks' shapes by gathered figures, which are zeros",
)


@contextmanager
def adapted(description: str) -> Iterator[None]:
    """Adapt child processes, Triton and torch.distributed, until the end of the block.

    A process started inside (``torch.multiprocessing`` with spawn, torchrun's) preloads the native
    library; ``description`` names its cards. A value of ``CUDA_VISIBLE_DEVICES`` that is set inside
    chooses from them, and the one of before does not.

    Triton links its launcher with the driver library, and looks for it among the system's unless a
    variable names its folder. Inductor links its C++ wrappers with ``-lcuda``, and so do older
    versions of Triton; compilers look for that in LIBRARY_PATH.
    """
    with ExitStack() as stack:
        preload = os.environ.get(PRELOAD)
        set_variable(stack, PRELOAD, f"{LIBRARIES}:{preload}" if preload else LIBRARIES)
        set_variable(stack, INHERITED, description)
        visible = os.environ.get(VISIBLE)
        set_variable(stack, INHERITED_VISIBLE, "" if visible is None else f"={visible}")
        if TRITON not in os.environ:
            set_variable(stack, TRITON, str(native.FOLDER))
        linked = os.environ.get(COMPILER)  # behind the user's: a real driver's library is preferred
        set_variable(stack, COMPILER, f"{linked}:{native.FOLDER}" if linked else str(native.FOLDER))
        skip_shape_check(stack)
        prepend(stack, PYTHON_PATH, HOOK)  # which has children skip it too
        yield


def skip_shape_check(stack: ExitStack) -> None:
    """Let DistributedDataParallel take every rank's parameters as the same until the stack ends.

    It compares them by gathered figures, which newer versions of PyTorch copy with a kernel, so
    that they are zeros here.
    """
    SHAPE_CHECK.wrap(sys.modules.get(SHAPE_CHECK.module), lambda _: lambda *_args: None, stack)
