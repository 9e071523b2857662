"""What the tests of the meter share."""

import os
import sys

import pytest
from helpers.standin import STANDIN
from helpers.virtual_gpu import CARD_80GIB, virtual_card

from pytest_gpumem.devices.accelerator import AcceleratorDevice


@pytest.fixture
def device():
    """Two devices of 80 GiB."""
    with virtual_card(CARD_80GIB, count=2) as device:
        yield device


@pytest.fixture(params=["standin" if STANDIN in os.environ else "virtual"])
def any_device(request):
    """Two devices: of the virtual GPU, or of the stand-in in a session that is for it."""
    if request.param == "virtual":
        with virtual_card(CARD_80GIB, count=2) as device:
            yield device
        return
    sys.path.insert(0, os.environ[STANDIN])
    import torch  # noqa: F401 - imports the stand-in too

    device = AcceleratorDevice()
    yield device
    device.close()
