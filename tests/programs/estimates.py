import pytest
import torch


def transform():
    torch.fft.rfft(torch.zeros(16, 16384, device="cuda"))


@pytest.mark.gpu_memory
def test_transform():
    transform()


@pytest.mark.gpu_memory
def test_transform_again(gpu_memory):
    with gpu_memory.measure("part"):
        transform()


@pytest.mark.gpu_memory(max_gib=0.02)
def test_that_may_not_fit():
    torch.fft.rfft(torch.zeros(32, 16384, device="cuda"))


@pytest.mark.gpu_memory(max_leak_mib=8)
def test_that_is_run_once():
    transform()


@pytest.mark.gpu_memory
def test_recurrent():
    torch.nn.LSTM(256, 256, 2, device="cuda")(torch.zeros(64, 32, 256, device="cuda"))


@pytest.mark.gpu_memory
def test_solver():
    torch.linalg.cholesky(torch.eye(2048, device="cuda"))


@pytest.mark.gpu_memory
def test_loss():
    scores = torch.zeros(50, 16, 20, device="cuda").log_softmax(2)
    targets = torch.ones(16 * 20, dtype=torch.int32)
    torch.nn.functional.ctc_loss(scores, targets, [50] * 16, [20] * 16)


@pytest.mark.gpu_memory
def test_norm():
    net = torch.nn.BatchNorm2d(64).cuda().to(memory_format=torch.channels_last)
    x = torch.zeros(8, 64, 32, 32, device="cuda", dtype=torch.half)
    net(x.to(memory_format=torch.channels_last)).sum().backward()


def product():
    rows, values = torch.arange(2**16 + 1, device="cuda"), torch.ones(2**16, device="cuda")
    matrix = torch.sparse_csr_tensor(rows, rows[:-1], values, (2**16, 2**16))
    matrix @ torch.zeros(2**16, 8, device="cuda")


@pytest.mark.gpu_memory
def test_sparse():
    product()


@pytest.mark.gpu_memory(max_allocated_gib=0.008)
def test_sparse_limit():
    product()


@pytest.mark.gpu_memory
def test_plain():
    torch.zeros(256, 256, device="cuda")
