"""The virtual GPU where a driver's libcuda.so.1 can be found: on GPU machines, in CUDA containers.

cuBLASLt opens it by name during the import of torch.
"""

from __future__ import annotations

import os
import sys

import pytest
from helpers.driver_stub import write_driver
from helpers.light import light_environment
from helpers.pages import blocks
from helpers.paths import TESTS
from helpers.verifying import verify
from helpers.virtual_gpu import run_python

(STEP,) = blocks("README.md", "python")
PRODUCT = """
import torch
x = torch.ones(1024, 1024, device="cuda")
assert (x @ x).shape == x.shape
print(torch.cuda.get_device_name())
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A driver whose functions all return CUDA_ERROR_NOT_INITIALIZED."""
    return write_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def beside(monkeypatch, driver):
    """The driver's folder, which processes find."""
    others = os.environ.get("LD_LIBRARY_PATH", "")
    folders = os.pathsep.join(filter(None, [str(driver.parent), others]))
    monkeypatch.setenv("LD_LIBRARY_PATH", folders)


def test_readme_s_test_is_measured_beside_a_driver(suite, beside):
    """A driver that shows no GPU does not make auto choose a real one."""
    session = suite.run_apart("--gpumem-update-baselines", source=STEP)
    assert session.outcomes == {"passed": 1}, session.out
    assert list(suite.baselines()) == ["virtual-T4/test_it.json"]


def test_workers_beside_a_driver_predict_a_gpu_s_session(suite, beside, monkeypatch):
    suite.run("--gpumem-update-baselines", source=STEP)
    session = suite.run_apart("-n", "1", "-v", "--gpumem-device=virtual")
    assert session.verdicts() == {"test_step": "ok"}, session.out
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "gpu"))
    monkeypatch.setenv("GPUMEM_FAKE_GPU", "T4")
    stand_in = ("-p", "fake_gpu", "--gpumem-device=cuda")
    session = suite.run_apart(*stand_in, "--gpumem-against=virtual:T4", "-v")
    assert session.verdicts() == {"test_step": "ok"}, session.out
    assert "1 of 1 compared with those of virtual-T4" in session.flat


def test_gpumem_verify_predicts_beside_a_driver(beside, tmp_path):
    done = verify(tmp_path, card="T4")
    assert done.returncode == 0, done.stderr
    assert "allocated: equal to the byte in 4 of 4 steps\n" in done.stdout


def test_gpumem_run_and_its_children_have_the_virtual_gpu_beside_a_driver(suite, beside):
    suite.write("product.py", PRODUCT)
    suite.write(
        "program.py",
        "import subprocess, sys\n"
        "import torch\n"
        "torch.ones(1, device='cuda')\n"
        "subprocess.run([sys.executable, 'product.py'], check=True)\n",
    )
    command = (sys.executable, "-m", "pytest_gpumem", "run", "--card", "T4", "program.py")
    done = suite.pytester.run(*command)
    assert done.ret == 0
    assert "Tesla T4" in done.outlines


def test_use_virtual_gpu_works_beside_a_driver_and_other_preloaded_libraries(beside):
    code = f"""
    import pytest_gpumem
    pytest_gpumem.use_virtual_gpu("T4")
    exec({PRODUCT!r})
    """
    done = run_python(code, LD_PRELOAD="libm.so.6")
    assert done.stdout == "Tesla T4\n", done.stderr


def test_an_environment_without_nvidia_s_libraries_works_beside_a_driver(suite, beside, tmp_path):
    python = light_environment(tmp_path / "light")
    session = suite.run_apart(source=STEP, python=python)
    assert session.outcomes == {"passed": 1}, session.out


def test_a_driver_that_is_in_the_process_already_is_refused_in_a_sentence(driver):
    """PyTorch would look its functions up by that name, and CUDA would not begin."""
    code = "import pytest_gpumem; pytest_gpumem.use_virtual_gpu('T4')"
    done = run_python(code, LD_PRELOAD=str(driver))
    assert done.returncode == 1
    assert "a driver's libcuda.so.1 was loaded into this process before" in done.stderr
    assert "leave libcuda.so.1 out of LD_PRELOAD" in done.stderr
