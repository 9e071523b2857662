"""Special treatment of single libraries: a module for each of them.

A module with ``HOOKS`` has a row in :data:`HOOKED`: each of its functions is called, on the virtual
GPU, with a module of the library once that is imported. Others are asked where the matter comes up.
"""

from __future__ import annotations

from typing import Final

from pytest_gpumem.devices.torch_import import IMPORTS
from pytest_gpumem.devices.virtual.quirks import cuda_bindings, jax, numba_cuda

HOOKED: Final = (cuda_bindings, jax, numba_cuda)


def install_hooks() -> None:
    """Wait for the imports of these libraries, in a process with a virtual GPU."""
    for library in HOOKED:
        for module, hook in library.HOOKS.items():
            IMPORTS.call_after(module, hook)
