import unittest

import pytest
import torch


def mib(n, device="cuda"):
    return torch.empty(int(n * 2**20), dtype=torch.uint8, device=device)


HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
at_import = mib(3, DEVICE)


def step():
    kept = mib(60, DEVICE)
    return mib(40, DEVICE), kept


def test_unmarked():
    assert torch.cuda.is_available() == HAS_GPU
    step()


@pytest.mark.skipif(not HAS_GPU, reason="test requires CUDA")
@pytest.mark.gpu_memory
def test_condition():
    step()


@pytest.mark.gpu_memory
@unittest.skipUnless(HAS_GPU, "test requires CUDA")
class TestCase(unittest.TestCase):
    def test_method(self):
        step()


@pytest.mark.gpu_memory
class TestOther(unittest.TestCase):
    @unittest.skipUnless(HAS_GPU, "test requires CUDA")
    def test_decorated(self):
        step()


@pytest.mark.gpu_memory
def test_device():
    step()


@pytest.mark.gpu_memory(card="T4")
def test_card(gpu_memory):
    assert gpu_memory.card == "T4"
    step()


def test_after():
    assert torch.cuda.is_available() == HAS_GPU
    if HAS_GPU:
        assert torch.cuda.get_device_properties(0).total_memory > 70 * 2**30
