import pytest
import torch


def mib(n, device="cuda"):
    return torch.empty(int(n * 2**20), dtype=torch.uint8, device=device)


@pytest.fixture(scope="module")
def data():
    mib(100)
    return mib(60)


@pytest.fixture(scope="module")
def model():
    mib(300)
    return mib(40)


@pytest.fixture(scope="module")
def trainer(request):
    first = mib(30)
    model = request.getfixturevalue("model")
    mib(90)
    return first, mib(20)


@pytest.mark.gpu_memory
def test_both(data, model):
    mib(10)


@pytest.mark.gpu_memory
def test_the_other_way(model, data):
    mib(10)


@pytest.mark.gpu_memory
def test_asks(request):
    kept = mib(50)
    request.getfixturevalue("model")
    mib(20)
    request.getfixturevalue("data")


@pytest.mark.gpu_memory
def test_asks_in_a_part(request, gpu_memory):
    mib(25)
    with gpu_memory.measure("part"):
        request.getfixturevalue("model")
    with gpu_memory.measure("end"):
        mib(5)


@pytest.mark.gpu_memory
def test_trainer(trainer):
    mib(10)


@pytest.mark.gpu_memory
def test_trainer_with_its_model(model, trainer):
    mib(10)


@pytest.mark.gpu_memory
def test_trainer_first(trainer, model):
    mib(10)


def test_unmarked(model, data):
    pass
