"""numba.cuda on the virtual GPU: not available, and refused by name where a program uses it.

It loads and launches kernels of its own by the driver's functions, with ctypes or cuda.bindings,
and checks none of them for being there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from types import ModuleType

NUMBA_DRIVER: Final = "numba.cuda.cudadrv.driver"
"""the module whose one object ``driver`` calls the driver, of Numba's own and of numba-cuda"""
REFUSAL: Final = (
    "the virtual GPU does not support numba.cuda, which loads kernels by itself; guard it with "
    "`if numba.cuda.is_available():`, or run this on a real GPU (--gpumem-device=cuda)"
)


def refuse_numba(module: ModuleType) -> None:
    """Have ``numba.cuda.is_available()`` return False, and each use raise CudaSupportError.

    Args:
        module: :data:`NUMBA_DRIVER`, just imported.
    """
    driver: Any = getattr(module, "driver", None)
    if hasattr(type(driver), "ensure_initialized"):
        driver.is_initialized, driver.initialization_error = True, REFUSAL
