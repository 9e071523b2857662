"""The size of the workspace that PyTorch gives cuBLAS for a matrix product."""

from __future__ import annotations

from pytest_gpumem.sizes import KIB


def cublas_workspace(capability: tuple[int, int]) -> int:
    """Return the bytes that PyTorch takes for a card, without CUBLAS_WORKSPACE_CONFIG.

    As getChosenWorkspaceSize, aten/src/ATen/cuda/CublasHandlePool.cpp: 4096 * 8 * 1024 and 4096 *
    1024 * 2 + 16 * 1024 * 8 there; a B200 got the larger one when this was written.
    """
    return 4096 * 8 * KIB if capability[0] in {9, 10} else 4096 * 2 * KIB + 16 * 8 * KIB


def chosen_workspace() -> int:
    """Return the bytes that PyTorch takes on the current device."""
    import torch

    ask = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
    return int(ask()) if ask else cublas_workspace(torch.cuda.get_device_capability())
