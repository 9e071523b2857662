"""Frameworks with CUDA kernels of their own, which are refused by name on the virtual GPU.

numba.cuda loads and launches kernels by the driver's functions, with ctypes or cuda.bindings, and
checks for none of them whether it exists. JAX asks NVIDIA's CUPTI for its version, which without a
true driver calls itself until the process crashes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from types import ModuleType

NUMBA_DRIVER: Final = "numba.cuda.cudadrv.driver"
"""the module whose one object ``driver`` calls the driver, of Numba's own and of numba-cuda"""
NUMBA_REFUSAL: Final = (
    "the virtual GPU does not support numba.cuda, which loads kernels by itself; guard it with "
    "`if numba.cuda.is_available():`, or run this on a real GPU (--gpumem-device=cuda)"
)
JAX_PLUGINS: Final = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
"""the modules with an ``initialize`` that gives JAX its CUDA devices"""
JAX_REFUSAL: Final = (
    "the virtual GPU does not support JAX's CUDA devices, whose kernels JAX loads by itself; "
    "set JAX_PLATFORMS=cpu, or run this on a real GPU (--gpumem-device=cuda)"
)


def refuse_numba(module: ModuleType) -> None:
    """Have ``numba.cuda.is_available()`` return False, and each use raise CudaSupportError.

    Args:
        module: :data:`NUMBA_DRIVER`, just imported.
    """
    driver: Any = getattr(module, "driver", None)
    if hasattr(type(driver), "ensure_initialized"):
        driver.is_initialized, driver.initialization_error = True, NUMBA_REFUSAL


def refuse_jax(module: ModuleType) -> None:
    """Have JAX log the refusal, and go on with its other devices, as where a plugin is broken.

    Args:
        module: one of :data:`JAX_PLUGINS`, just imported.
    """

    def initialize() -> NoReturn:
        raise RuntimeError(JAX_REFUSAL)

    module.initialize = initialize  # type: ignore[attr-defined]
