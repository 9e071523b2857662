"""numba.cuda, Numba's own and the package numba-cuda: refused by name on the virtual GPU.

It loads and launches kernels by the driver's functions, with ctypes or cuda.bindings, and checks
for none of them whether it exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from types import ModuleType

DRIVER: Final = Patch(
    "numba.cuda.cudadrv.driver",
    *("driver.is_initialized", "driver.initialization_error"),
    reason="numba.cuda is refused by name",
)
REFUSAL: Final = (
    "the virtual GPU does not support numba.cuda, because numba loads its kernels itself; "
    "guard the code with `if numba.cuda.is_available():`, or run this on a real GPU "
    "(--gpumem-device=cuda)"
)


def refuse_driver(module: ModuleType) -> None:
    """Have ``numba.cuda.is_available()`` return False, and each use raise CudaSupportError.

    Args:
        module: the one whose object ``driver`` calls CUDA's driver.
    """
    if hasattr(type(getattr(module, "driver", None)), "ensure_initialized"):
        DRIVER.put(module, dict(zip(DRIVER.names, (True, REFUSAL), strict=True)))


HOOKS: Final = {DRIVER.module: refuse_driver}
