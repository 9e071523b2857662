"""Skips of tests that need what ``gpumem light`` leaves out, and that say what it is."""

from importlib.util import find_spec
from pathlib import Path

import pytest

NVIDIA = Path(find_spec("torch").origin).parents[1] / "nvidia"
"""where NVIDIA's packages have their libraries"""
TRITON = (
    "needs Triton, without which Inductor compiles nothing for a GPU: pip install --no-deps "
    "triton, in the version that torch requires (gpumem light --triton prints it)"
)
CUDNN = (
    "needs cuDNN, which computes workspaces: pip install --no-deps nvidia-cudnn-cu13, in the "
    "version that torch requires (gpumem light --cudnn prints it)"
)
LIBRARIES = (
    "needs NVIDIA's packages beside torch: pip install torch, with all that it requires (this "
    "environment is without them, as gpumem light's, or this torch has the libraries inside)"
)


def has(library):
    """Return whether one of NVIDIA's packages brings a library: "libcudart"."""
    return any(NVIDIA.rglob(f"{library}.so.*"))


def need_triton():
    """Skip the test where there is no Triton."""
    if find_spec("triton") is None:
        pytest.skip(TRITON)


def need_cudnn():
    """Skip the test where there is no cuDNN."""
    if not has("libcudnn"):
        pytest.skip(CUDNN)


def need_libraries():
    """Skip the test where NVIDIA's other libraries are left out."""
    if not has("libcudart"):
        pytest.skip(LIBRARIES)
