"""NVIDIA's driver is asked through its library: stubs of it answer here."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import patch

import pytest
from helpers.driver_stub import SYSTEM_DRIVER_MISMATCH, write_driver
from helpers.paths import ROOT
from helpers.virtual_gpu import run_python, virtual_card

from pytest_gpumem.devices import driver, select
from pytest_gpumem.devices.driver import VisibleGpus, visible_gpus

ONE_GPU = """
#include <string.h>
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "T4", size); return device; }
"""


@pytest.fixture
def answer(tmp_path):
    """What is told of a stub of the driver's library."""

    def tell(result, extra=""):
        write_driver(tmp_path, result, extra)
        return visible_gpus({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})

    return tell


def test_a_gpu_is_told_by_the_driver_s_library_whatever_files_there_are(answer):
    assert answer(0, ONE_GPU) == VisibleGpus(expected=True, names=(b"T4".hex(),))


@pytest.mark.parametrize("result", driver.NO_GPU)
def test_a_library_without_a_gpu_is_no_gpu(answer, result):
    assert answer(result) == VisibleGpus()


def test_no_library_and_no_device_are_no_gpu(answer):
    assert visible_gpus({}) == VisibleGpus()
    no_devices = "int cuInit(int f) { return f; } int cuDeviceGetCount(int *n) { return *n = 0; }"
    assert answer(0, no_devices) == VisibleGpus()


@pytest.mark.parametrize("extra", ["", "int cuInit(void) { __builtin_trap(); }"])
def test_a_driver_that_cannot_begin_has_a_gpu_whose_error_pytorch_tells(answer, extra):
    assert answer(SYSTEM_DRIVER_MISMATCH, extra) == VisibleGpus(expected=True)


def test_a_driver_that_does_not_answer_has_a_gpu_and_a_python_that_does_not_start_has_none():
    slow = subprocess.TimeoutExpired("x", 1)
    for error, expected in ((slow, VisibleGpus(expected=True)), (OSError(), VisibleGpus())):
        with patch.object(driver.subprocess, "run", side_effect=error):
            assert visible_gpus() == expected


def test_the_process_that_asks_needs_nothing_but_python(tmp_path):
    """No package of the user's, no sitecustomize: scripts of the project run the file as well."""
    write_driver(tmp_path, 0, ONE_GPU)
    file = ROOT / "pytest_gpumem/devices/driver.py"
    environment = {"LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-I", "-S", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [b"T4".hex()]
    assert subprocess.run(command, env={}, check=False).returncode == 1


def test_cuda_itself_is_asked_in_another_process():
    with virtual_card("T4", 3):  # processes started meanwhile find three of them
        names = [bytes.fromhex(name).decode() for name in visible_gpus().names]
    assert names == ["Tesla T4"] * 3


def test_a_hidden_gpu_is_not_expected_and_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(select, "visible_gpus", pytest.fail)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert not select.real_gpu_expected()


def test_the_version_is_nvml_s_and_unknown_without_it(tmp_path, monkeypatch):
    source = tmp_path / "nvml.c"
    source.write_text(
        "#include <string.h>\nint nvmlInit_v2(void) { return 0; }\nint nvmlShutdown(void) "
        "{ return 0; }\nint nvmlSystemGetDriverVersion(char *text, unsigned size) "
        '{ strncpy(text, "580.159.03", size); return 0; }\n'
    )
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    code = "from pytest_gpumem.devices import driver; print(driver.nvidia_version())"
    assert run_python(code, LD_LIBRARY_PATH=str(tmp_path)).stdout == "580.159.03\n"
    assert run_python(code, LD_LIBRARY_PATH="").stdout == "unknown\n"
    monkeypatch.setattr(driver, "nvidia_version", lambda: "580.159.03")
    assert driver.version("cuda") == "580.159.03"
    assert driver.version("virtual") == "virtual"
