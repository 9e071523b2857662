"""numba.cuda, Numba's own and the package numba-cuda: refused by name on the virtual GPU.

It loads and launches kernels by the driver's functions, with ctypes or cuda.bindings, and checks
for none of them whether it exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from types import ModuleType

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
    driver: Any = getattr(module, "driver", None)
    if hasattr(type(driver), "ensure_initialized"):
        driver.is_initialized, driver.initialization_error = True, REFUSAL


HOOKS: Final = {"numba.cuda.cudadrv.driver": refuse_driver}
