import pytest
import torch


def mib(n, device="cuda"):
    return torch.empty(int(n * 2**20), dtype=torch.uint8, device=device)


@pytest.fixture(scope="session")
def weights():
    temporary = mib(200)
    return mib(50)


@pytest.fixture(scope="module")
def model(weights):
    return mib(20), torch.zeros(1000, 1000, device="cuda") @ torch.zeros(1000, 1000, device="cuda")


@pytest.fixture(scope="class")
def data():
    return mib(11)


@pytest.mark.gpu_memory
class TestIt:
    def test_weights(self, weights):
        mib(10)

    def test_model(self, model):
        mib(300)

    def test_data(self, model, data):
        mib(30)

    def test_none(self):
        mib(30)

    def test_dynamic(self, request):
        request.getfixturevalue("weights")
        mib(300)


@pytest.mark.gpu_memory(devices=2)
def test_two(model):
    mib(5, "cuda:1")


class TestClass:
    @classmethod
    def setup_class(cls):
        cls.kept = mib(64)

    @pytest.mark.gpu_memory
    def test_first(self):
        mib(7)

    @pytest.mark.gpu_memory
    def test_second(self):
        mib(7)
