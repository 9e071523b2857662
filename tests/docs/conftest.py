"""What tests of the documents share."""

import pytest


@pytest.fixture(scope="session")
def same_torch(virtual_gpu):
    """Figures belong to a version of torch, which the pages name."""
    # Before pytester takes note of the modules that are loaded: it would import them twice.
    __import__("torch._dynamo")
    if not virtual_gpu.__version__.startswith("2.15.0"):
        pytest.skip(f"the pages' figures are torch 2.15.0's, this is {virtual_gpu.__version__}")
