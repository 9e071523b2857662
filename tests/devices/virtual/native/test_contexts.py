"""Contexts, the driver's initialisation and the devices of events, by ctypes alone."""

import ctypes

import pytest
from helpers.virtual_gpu import MIB, child, private_library

NOT_INITIALIZED, INVALID_HANDLE = 3, 400


@pytest.fixture
def library(tmp_path):
    return private_library(tmp_path, count=2)


def is_active(library, device):
    flags, active = ctypes.c_uint(), ctypes.c_int(-1)
    status = library.call(
        "cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active)
    )
    return active.value if status == 0 else f"status {status}"


def test_the_driver_answers_nothing_before_it_is_initialised(library):
    """As PyTorch's test_lazy_init asks: importing torch must not initialise it."""
    count, device = ctypes.c_int(-1), ctypes.c_int(-1)
    assert library.call("cuDeviceGetCount", ctypes.byref(count)) == NOT_INITIALIZED
    assert library.call("cuDeviceGet", ctypes.byref(device), 0) == NOT_INITIALIZED
    assert (count.value, device.value) == (-1, -1)
    assert is_active(library, 0) == f"status {NOT_INITIALIZED}"
    assert library.call("cuInit", 0) == 0
    assert library.call("cuDeviceGetCount", ctypes.byref(count)) == 0
    assert count.value == 2
    assert is_active(library, 0) == 0


def test_the_runtime_initialises_the_driver_too(library):
    count = ctypes.c_int()
    assert library.call("cudaGetDeviceCount", ctypes.byref(count)) == 0
    assert is_active(library, 0) == 0


def test_the_first_use_of_a_device_makes_its_context(library):
    handle = ctypes.c_void_p()
    assert library.malloc(MIB)[0] == 0
    assert (is_active(library, 0), is_active(library, 1)) == (1, 0)
    assert library.call("cudaSetDevice", 1) == 0
    assert is_active(library, 1) == 1
    library.forget_contexts()
    assert (is_active(library, 0), is_active(library, 1)) == (0, 0)
    assert library.call("cudaStreamCreate", ctypes.byref(handle)) == 0
    assert (is_active(library, 0), is_active(library, 1)) == (0, 1)


def event_of(library, device):
    assert library.call("cudaSetDevice", device) == 0
    event = ctypes.c_void_p()
    assert library.call("cudaEventCreate", ctypes.byref(event)) == 0
    return event


def test_events_of_two_devices_have_no_time_between_them(library):
    events, milliseconds = [], ctypes.c_float()
    for device in (0, 1):
        events.append(event_of(library, device))
        assert library.call("cudaEventRecord", events[-1], None) == 0
    elapsed = ctypes.byref(milliseconds), *events
    assert library.call("cudaEventElapsedTime", *elapsed) == INVALID_HANDLE
    assert library.call("cudaEventElapsedTime", elapsed[0], events[0], events[0]) == 0


def test_an_event_is_recorded_on_its_own_device(library):
    event = event_of(library, 0)
    stream = ctypes.c_void_p()
    assert library.call("cudaStreamCreate", ctypes.byref(stream)) == 0
    assert library.call("cudaSetDevice", 1) == 0
    assert library.call("cudaEventRecord", event, None) == INVALID_HANDLE
    assert library.call("cudaEventRecord", event, stream) == 0


def test_a_program_begins_without_a_context():
    program = """
    import torch
    print(*(torch._C._cuda_hasPrimaryContext(index) for index in range(2)))
    x = torch.ones(3, device="cuda:1")
    print(*(torch._C._cuda_hasPrimaryContext(index) for index in range(2)))
    """
    assert child(program, devices=2, warm=True).split("\n")[:2] == ["False False", "False True"]
