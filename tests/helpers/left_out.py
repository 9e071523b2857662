"""Skip tests that need packages which ``gpumem light`` leaves out; the reasons name them."""

from importlib.util import find_spec
from pathlib import Path

import pytest

NVIDIA = Path(find_spec("torch").origin).parents[1] / "nvidia"
"""folder of the libraries in NVIDIA's packages"""
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
    """Return whether one of NVIDIA's packages contains a library, such as "libcudart"."""
    return any(NVIDIA.rglob(f"{library}.so.*"))


def need_triton():
    """Skip the test if Triton is not installed."""
    if find_spec("triton") is None:
        pytest.skip(TRITON)


def need_cudnn():
    """Skip the test if cuDNN is not installed."""
    if not has("libcudnn"):
        pytest.skip(CUDNN)


def need_libraries():
    """Skip the test if NVIDIA's other libraries are not installed."""
    if not has("libcudart"):
        pytest.skip(LIBRARIES)
