"""Skip tests that need what older versions of PyTorch lack."""

import pytest
import torch

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
"""PyTorch's version: (2, 15)"""


def require(owner, name):
    """Skip the test if this torch lacks a function or an overload."""
    if not hasattr(owner, name):
        pytest.skip(f"torch {torch.__version__} has no {getattr(owner, '__name__', owner)}.{name}")


def require_kernel(operator, key):
    """Skip the test if this torch has no kernel, registered or composite, for a dispatch key."""
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator, key):
        pytest.skip(f"torch {torch.__version__} has no kernel of {operator} for {key}")


def require_release(major, minor, lacking):
    """Skip the test with an older torch; ``lacking`` names what it lacks."""
    if (major, minor) > RELEASE:
        pytest.skip(f"torch {torch.__version__} has not, as {major}.{minor} has: {lacking}")
