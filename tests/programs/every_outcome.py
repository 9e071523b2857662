import pytest
import torch


def mib(n, device="cuda"):
    return torch.empty(int(n * 2**20), dtype=torch.uint8, device=device)


@pytest.fixture
def broken():
    raise ValueError("no such file")


@pytest.fixture
def untidy():
    yield
    raise ValueError("cannot be closed")


@pytest.mark.gpu_memory(batch_size=4)
def test_fits():
    mib(100)


@pytest.mark.gpu_memory(max_allocated_gib=0.1)
def test_too_much():
    mib(300)


@pytest.mark.gpu_memory
def test_wrong():
    mib(10)
    assert 1 + 1 == 3


@pytest.mark.gpu_memory
def test_without_its_fixture(broken):
    mib(10)


@pytest.mark.gpu_memory
def test_untidy(untidy):
    mib(10)


@pytest.mark.gpu_memory
@pytest.mark.xfail(reason="not yet")
def test_not_yet():
    mib(10)
    raise ValueError


@pytest.mark.gpu_memory
@pytest.mark.skip(reason="too slow")
def test_slow():
    mib(10)


@pytest.mark.gpu_memory(max_gib="many")
def test_misdeclared():
    mib(10)


def test_unmarked():
    assert False
