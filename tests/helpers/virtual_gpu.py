"""Open the virtual GPU, use its native library directly, and run programs on virtual GPUs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest

from helpers.paths import ROOT, TESTS
from helpers.warm import HANGS, warm_python
from pytest_gpumem.devices.autograd_threads import await_autograd
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.select import real_gpu_expected
from pytest_gpumem.devices.virtual import native
from pytest_gpumem.devices.virtual.device import VirtualDevice, obstacle
from pytest_gpumem.devices.virtual.library import NativeLibrary
from pytest_gpumem.meter.allocator import settle
from pytest_gpumem.meter.peaks import NOTHING
from pytest_gpumem.meter.reading import current, peak_in
from pytest_gpumem.recording.allocator_view import VIEW

MIB = 1 << 20
GIB = 1 << 30
PAGE = 2 * MIB
"""bytes: the unit in which cudaMalloc takes memory from a device"""

CARD_80GIB = replace(
    CARDS["H100"], name="80 GiB", total_memory=80 * GIB, capability=(9, 0), sm_count=132, context=0
)
"""the device of the figures in virtual-gpu.md"""


class Values(NamedTuple):
    """The values in device memory, in bytes."""

    known: int
    """bytes with the value that a real GPU would have there"""
    backed: int
    """bytes of pages that may use host memory"""


def values_of(library):
    """Return how many bytes of device memory are known, and how many use host memory."""
    return Values(*library._figures("values", 2))


def small_card(memory, context=0):
    """Return a card with ``memory`` bytes."""
    return replace(CARDS["T4"], name="small", total_memory=memory, context=context)


def virtual_device():
    """Return this process's virtual GPU; skip if there can be none, fail if it was not loaded."""
    device = VirtualDevice.loaded()
    if device is None:
        reason = obstacle()
        if reason is not None:
            pytest.skip(f"no virtual GPU here: {': '.join(reason)}")
        if real_gpu_expected():
            pytest.skip("this session measures on a real GPU: give --gpumem-device=virtual")
        pytest.fail("the plugin did not load the virtual GPU")
    return device


def tensor(size, index=0):
    """Return a tensor of ``size`` bytes."""
    import torch

    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}")


def highest(device):
    """Return a device's peaks since they were last reset."""
    return peak_in(VIEW.stats(device))


def sizes_of(held):
    """Return the allocated and reserved bytes of a Held, for tests that concern no other figure."""
    return held.allocated, held.reserved


LEFT = "an earlier test of this process left memory behind"


def settle_all(count):
    """Settle the devices after autograd's threads have released the last backward pass.

    A thread may keep references after the test has ended: FSDP's callback refers to the module.
    """
    await_autograd()
    settle(count)


@contextmanager
def virtual_card(card="H100", count=1):
    """Open the virtual GPU as a card (a name or a Card), and settle it; hide it at the end."""
    device = virtual_device()
    device.open(CARDS[card] if isinstance(card, str) else card, count)
    try:
        settle_all(count)
        assert [current(index) for index in range(count)] == [NOTHING] * count, LEFT
        yield device
        settle_all(count)
    finally:
        device.close()


def child(code, *, card="H100", args=(), devices=1, warm=False, **environment):
    """Run a program on a virtual GPU of its own; return its standard output.

    With ``card=None`` the program itself must load a virtual GPU. For ``warm`` see warm.py.
    """
    head = ""
    if card is not None:
        head = f"import pytest_gpumem\npytest_gpumem.use_virtual_gpu({card!r}, devices={devices})\n"
    done = run_python(head + textwrap.dedent(code), *args, warm=warm, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_python(code, *args, warm=False, **environment):
    """Run Python code in a new process, which can import this package and the tests' helpers."""
    process = _process(code, args, environment, python=warm_python() if warm else sys.executable)
    return subprocess.run(**process, capture_output=True, timeout=HANGS, check=False)


def start_python(code, *args, **environment):
    """Start Python code in a new process, whose output can be read while it runs."""
    process = _process(code, args, environment, python=sys.executable)
    return subprocess.Popen(**process, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _process(code, args, environment, *, python):
    places = [str(ROOT), str(TESTS)]
    paths = [*places, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "args": [python, "-c", textwrap.dedent(code), *args],
        "env": {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        "text": True,
    }


class PrivateLibrary(NativeLibrary):
    """A copy of the native library with its own state, to which no other library is linked."""

    def __init__(self, folder):
        path = Path(folder) / "libprivate.so"
        path.write_bytes(native.LIBRARY.read_bytes())
        mode = os.RTLD_LOCAL | os.RTLD_DEEPBIND  # its functions call only each other
        with patch.object(ctypes, "RTLD_GLOBAL", mode):
            super().__init__(path)

    def call(self, name, *args):
        """Call a CUDA function; return its status."""
        return getattr(self._lib, name)(*args)

    def text(self, name, *args):
        """Call a function that returns a string."""
        function = self._lib[name]
        function.restype = ctypes.c_char_p
        return function(*args).decode()

    def malloc(self, size):
        """Return (status, address) of cudaMalloc."""
        address = ctypes.c_void_p()
        status = self.call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        return status, address.value or 0

    def free(self, address):
        """Return cudaFree's status."""
        return self.call("cudaFree", ctypes.c_void_p(address))

    def number(self, name, *args, kind=ctypes.c_int):
        """Call a function that writes a number through its first argument; return the number."""
        value = kind()
        status = self.call(name, ctypes.byref(value), *args)
        assert status == 0, f"{name}: {status}"
        return value.value

    def memory_info(self):
        """Return (free, total) of cudaMemGetInfo."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert self.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value, total.value


def private_library(folder, card="T4", count=1):
    """Return a private library that shows ``count`` devices; skip if it was not built."""
    problem = native.build_problem()
    if problem is not None:
        pytest.skip(f"no virtual GPU here: {problem.problem}")
    library = PrivateLibrary(folder)
    library.set_card(CARDS[card] if isinstance(card, str) else card)
    library.show(count)
    return library
