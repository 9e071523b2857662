"""A machine whose real GPU is too small, or has too few beside it, for what a test asks."""

from __future__ import annotations

import pytest

TESTS = """
    @pytest.mark.gpu_memory(devices=2)
    def test_two(): ...

    @pytest.mark.gpu_memory
    def test_one(): ...
"""

CONFTEST = """
    from pytest_gpumem.devices import select
    from pytest_gpumem.devices.virtual import device
    from pytest_gpumem.errors import TooSmallError

    class OneGpu(device.VirtualDevice):
        def open(self, card, count):
            if count > 1:
                raise TooSmallError("devices=2", "this machine shows 1 GPU", "request fewer GPUs")
            return super().open(card, count)

    def pytest_configure(config):
        loaded = device.VirtualDevice.loaded()
        loaded.__class__ = OneGpu

    def pytest_unconfigure(config):
        device.VirtualDevice.loaded().__class__ = device.VirtualDevice
"""


@pytest.mark.parametrize(
    ("device", "outcome"), [("auto", {"skipped": 1}), ("virtual", {"errors": 1})]
)
def test_it_is_skipped_under_auto_and_an_error_where_the_device_was_demanded(
    suite, device, outcome
):
    suite.write("conftest.py", CONFTEST)
    ended = suite.run(f"--gpumem-device={device}", "-rs", source=TESTS)
    assert ended.outcomes == {"passed": 1, **outcome}
    assert "devices=2: this machine shows 1 GPU; request fewer GPUs" in ended.flat


def test_an_option_skips_it_on_a_demanded_device_too(suite):
    suite.write("conftest.py", CONFTEST)
    ended = suite.run("--gpumem-device=virtual", "--gpumem-skip-too-large", source=TESTS)
    assert ended.outcomes == {"passed": 1, "skipped": 1}
    assert "1 skipped by --gpumem-skip-too-large: this machine shows 1 GPU" in ended.flat
