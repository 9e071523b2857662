"""What the tests of baselines share: a folder, and its store."""

import pytest

from pytest_gpumem.baselines.store import BaselineStore


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "baselines"


@pytest.fixture
def store(directory):
    return BaselineStore(directory)
