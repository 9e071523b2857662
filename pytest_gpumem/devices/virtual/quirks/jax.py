"""JAX: its CUDA devices are refused by name on the virtual GPU.

It asks NVIDIA's CUPTI for its version, which without a true driver calls itself until the process
crashes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from types import ModuleType

DEVICES: Final = Patch(
    "jax_plugins",
    *("xla_cuda12.initialize", "xla_cuda13.initialize"),
    reason="JAX's CUDA devices are refused by name",
)
REFUSAL: Final = (
    "the virtual GPU does not support JAX's CUDA devices, because JAX loads its kernels "
    "itself; set JAX_PLATFORMS=cpu, or run this on a real GPU (--gpumem-device=cuda)"
)


def refuse_devices(plugin: ModuleType) -> None:
    """Have JAX log the refusal, and go on with its other devices, as where a plugin is broken.

    Args:
        plugin: a module whose ``initialize`` gives JAX its CUDA devices.
    """

    def initialize() -> NoReturn:
        raise RuntimeError(REFUSAL)

    DEVICES.on(plugin, "initialize", initialize)


HOOKS: Final = {"jax_plugins.xla_cuda12": refuse_devices, "jax_plugins.xla_cuda13": refuse_devices}
