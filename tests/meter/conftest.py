"""What the tests of the meter share."""

import pytest
from helpers.virtual_gpu import CARD_80GIB, virtual_card


@pytest.fixture
def device():
    """Two devices of 80 GiB."""
    with virtual_card(CARD_80GIB, count=2) as device:
        yield device
