"""Launches beyond a card's limits are refused as CUDA does, by ctypes alone."""

import ctypes

import pytest
from helpers.virtual_gpu import private_library

INVALID_VALUE, INVALID_CONFIGURATION = 1, 9
NONE = ctypes.c_void_p()
SHARED = 64 << 10
"""bytes that a block of a T4 may have at most"""


class Dim3(ctypes.Structure):
    """``dim3``."""

    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class Config(ctypes.Structure):
    """The leading fields of ``cudaLaunchConfig_t``."""

    _fields_ = (("grid", Dim3), ("block", Dim3), ("shared", ctypes.c_size_t))


@pytest.fixture
def library(tmp_path):
    return private_library(tmp_path, "T4")


LAUNCHES = [
    ((1, 1, 1), (1, 1, 1), 0, 0),
    ((2**31 - 1, 65535, 65535), (1024, 1, 1), SHARED, 0),
    ((1, 1, 1), (4, 4, 64), 0, 0),
    ((0, 1, 1), (0, 1, 1), 0, 0),  # sizes that were read back are zeros
    ((2**31, 1, 1), (1, 1, 1), 0, INVALID_CONFIGURATION),
    ((1, 65536, 1), (1, 1, 1), 0, INVALID_CONFIGURATION),
    ((1, 1, 65536), (1, 1, 1), 0, INVALID_CONFIGURATION),
    ((1, 1, 1), (1025, 1, 1), 0, INVALID_CONFIGURATION),
    ((1, 1, 1), (1, 1, 65), 0, INVALID_CONFIGURATION),
    ((1, 1, 1), (32, 32, 2), 0, INVALID_CONFIGURATION),
    ((1, 1, 1), (1, 1, 1), SHARED + 1, INVALID_VALUE),
]


@pytest.mark.parametrize(("grid", "block", "shared", "status"), LAUNCHES)
def test_a_launch_is_held_to_the_cards_limits(library, grid, block, shared, status):
    size = ctypes.c_size_t(shared)
    for name in ("cudaLaunchKernel", "__cudaLaunchKernel", "cudaLaunchCooperativeKernel"):
        assert library.call(name, NONE, Dim3(*grid), Dim3(*block), NONE, size, NONE) == status
        assert library.call("cudaGetLastError") == status  # what PyTorch asks behind each launch
    config = Config(Dim3(*grid), Dim3(*block), shared)
    assert library.call("cudaLaunchKernelExC", ctypes.byref(config), NONE, NONE) == status


@pytest.mark.parametrize(("grid", "block", "shared", "status"), LAUNCHES)
def test_the_driver_says_invalid_value(library, grid, block, shared, status):
    status = min(status, INVALID_VALUE)
    numbers = [ctypes.c_uint(number) for number in (*grid, *block, shared)]
    assert library.call("cuLaunchKernel", NONE, *numbers, NONE, NONE, NONE) == status
    assert library.call("cuLaunchCooperativeKernel", NONE, *numbers, NONE, NONE) == status
    config = (ctypes.c_uint * 16)(*grid, *block, shared)
    assert library.call("cuLaunchKernelEx", config, NONE, NONE, NONE) == status


def test_a_launch_without_a_configuration_is_refused(library):
    assert library.call("cudaLaunchKernelExC", NONE, NONE, NONE) == INVALID_VALUE
    assert library.call("cuLaunchKernelEx", NONE, NONE, NONE, NONE) == INVALID_VALUE
