"""CUDA libraries that torch is linked with, and that are not installed."""

import ctypes
import re
import subprocess
import sys

import pytest
from helpers.driver_stub import SYSTEM_DRIVER_MISMATCH, write_driver
from helpers.left_out import need_cudnn, need_libraries
from helpers.light import SITE, light_environment
from helpers.paths import ROOT
from helpers.warm import HANGS, warm_python

from pytest_gpumem.devices.virtual import native
from pytest_gpumem.devices.virtual.device import obstacle
from pytest_gpumem.devices.virtual.missing_libraries import (
    PLACEHOLDER,
    STUBBED,
    SharedObject,
    missing_libraries,
    supply_missing_libraries,
)
from pytest_gpumem.errors import DeviceError

TORCH = SITE / "torch/lib"
NEEDED = b"libgpumem_cuda.so"  # of each shell of the native library


def dependencies(path):
    return SharedObject(path).dependencies()


def library_that_needs(folder, soname, name="libtorch_part.so"):
    """Write a library that needs another one, and nothing else."""
    content = native.DRIVER.read_bytes()
    assert len(soname) == len(NEEDED)
    assert content.count(NEEDED) == 1
    path = folder / name
    path.write_bytes(content.replace(NEEDED, soname.encode()))
    return path


def test_what_a_library_needs_and_where_is_read_from_its_file():
    assert dependencies(native.DRIVER).names[0] == native.LIBRARY.name
    assert dependencies(native.DRIVER).folders == (native.FOLDER,)


def test_torch_s_own_libraries_are_read():
    names = dependencies(TORCH / "libc10_cuda.so").names
    assert {"libc10.so", "libc.so.6"} <= set(names)
    assert any(STUBBED.fullmatch(name) for name in names)


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + b"\xff" * 58, b"text" * 99]
)
def test_a_damaged_library_is_left_to_the_dynamic_linker(tmp_path, content):
    (tmp_path / "libtorch_cuda.so").write_bytes(content)
    assert missing_libraries(tmp_path) == []


def test_what_lies_beside_or_with_the_system_or_in_nvidia_s_packages_is_not_missing(
    tmp_path, monkeypatch
):
    library_that_needs(tmp_path, "libcublas.so.9999")
    assert missing_libraries(tmp_path) == ["libcublas.so.9999"]
    packages = tmp_path / "site/nvidia/cu13/lib"
    packages.mkdir(parents=True)
    (packages / "libcublas.so.9999").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    assert missing_libraries(tmp_path) == []
    monkeypatch.undo()
    (tmp_path / "libcublas.so.9999").touch()
    assert missing_libraries(tmp_path) == []


def test_a_library_beside_torch_s_counts_if_one_of_them_needs_it(tmp_path):
    """torch 2.15 brings libgfortran, which needs libquadmath: slim images have none."""
    library_that_needs(tmp_path, "libquadmath.so.99", name="libgfortran.so.55")
    library_that_needs(tmp_path, "libcublas.so.9995")
    assert missing_libraries(tmp_path) == ["libcublas.so.9995"]
    library_that_needs(tmp_path, "libgfortran.so.55", name="libtorch_other.so")
    assert missing_libraries(tmp_path) == ["libcublas.so.9995", "libquadmath.so.99"]


def test_a_stub_bears_the_name_and_leads_to_the_native_library_s_functions(tmp_path):
    path = library_that_needs(tmp_path, "libcublas.so.9998")
    with pytest.raises(OSError, match=r"libcublas\.so\.9998"):
        ctypes.CDLL(str(path))
    assert supply_missing_libraries(tmp_path) == ["libcublas.so.9998"]
    assert supply_missing_libraries(tmp_path) == []  # it is there now
    assert ctypes.CDLL(str(path)).cublasCreate_v2


def test_a_library_that_nothing_stands_in_for_is_named(tmp_path):
    library_that_needs(tmp_path, "libcublas.so.9997")
    library_that_needs(tmp_path, "libcuthing.so.999", name="libtorch_other.so")
    with pytest.raises(DeviceError, match=r"libcuthing\.so\.999, which is not installed"):
        supply_missing_libraries(tmp_path)


def test_the_dynamic_linker_says_what_a_torch_lacks_that_has_its_cuda_libraries(tmp_path):
    library_that_needs(tmp_path, "libmpithing.so.99")
    assert supply_missing_libraries(tmp_path) == []


def test_a_stub_that_cannot_be_loaded_names_the_library_and_the_variable(tmp_path):
    library_that_needs(tmp_path, "libcublas.so.9996")
    stub = tmp_path / "stub.so"
    stub.write_bytes(b"no library")
    with pytest.raises(DeviceError, match=r"libcublas\.so\.9996.*set TMPDIR"):
        supply_missing_libraries(tmp_path, stub)


def test_the_stub_has_room_for_every_name_that_torch_needs():
    assert native.STUB.read_bytes().count(PLACEHOLDER) == 1
    names = {name for path in TORCH.glob("*.so*") for name in dependencies(path).names}
    cuda = {name for name in names if STUBBED.fullmatch(name)}
    assert {"libcudnn.so.9", "libnccl.so.2"} <= cuda
    assert max(map(len, cuda)) < len(PLACEHOLDER)


def test_where_linux_is_not_the_reason_names_the_page_with_a_container(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    problem, remedy = obstacle()
    assert problem == "it needs Linux, and this system is darwin"
    assert "/how-to/light.html#on-a-mac-or-on-windows" in remedy
    page = (ROOT / "docs/how-to/light.md").read_text(encoding="utf-8")
    assert "\n## On a Mac, or on Windows\n" in page


# Whole environments

STEPS = """
import os, subprocess, sys
import pytest, torch

@pytest.mark.gpu_memory(card="T4", batch_size=32)
def test_transformer(gpu_memory):
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True).cuda()
    layer(torch.randn(gpu_memory.batch_size, 256, 1024, device="cuda")).sum().backward()

@pytest.mark.gpu_memory(card="H100")
def test_convolution():
    images = torch.randn(8, 64, 56, 56, device="cuda")
    torch.nn.Conv2d(64, 64, 3).cuda()(images).sum().backward()

@pytest.mark.gpu_memory(card="H100")
def test_libraries():
    matrix = torch.eye(64, device="cuda")
    torch.linalg.solve(matrix, matrix)
    torch.fft.rfft(matrix)
    matrix.to_sparse_coo() @ matrix

@pytest.mark.gpu_memory(card="T4")
def test_child():
    program = "import torch; print(torch.ones(3, device='cuda').sum().item())"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "3.0\\n"
"""
WITH_CUDNN = [f"--deselect=test_steps.py::test_{name}" for name in ("compiled", "child")]
"""what an environment without any of NVIDIA's packages shows as well"""
COMPILED = """

@pytest.mark.gpu_memory(card="T4")
def test_compiled():
    torch.compile(torch.nn.Linear(64, 64).cuda())(torch.ones(8, 64, device="cuda"))
"""
FIGURES = """
def pytest_gpumem_judged(item, result):
    peak, notes = result.measurement.peaks[0], " ".join(result.measurement.note_texts)
    with open("peaks", "a") as file:
        print(item.name, peak.allocated, peak.reserved, notes, sep="|", file=file)
"""


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """Return the peaks and notes of STEPS in an environment, and what its session prints."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_steps.py").write_text(STEPS + COMPILED, encoding="utf-8")
    (folder / "conftest.py").write_text(FIGURES, encoding="utf-8")

    def of(python, *arguments):
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:logging"]
        process = subprocess.run(
            [*command, "-p", "no:randomly", "--gpumem-device=virtual", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=HANGS,
            check=False,
        )
        rows = [line.split("|") for line in (folder / "peaks").read_text("utf-8").splitlines()]
        (folder / "peaks").unlink()
        return {name: (peak, notes) for name, *peak, notes in rows}, process.stdout + process.stderr

    return of


@pytest.fixture(scope="module")
def with_all(figures):
    need_libraries()
    return figures(warm_python(), *WITH_CUDNN)


@pytest.fixture(scope="module")
def with_cudnn(figures, tmp_path_factory):
    need_cudnn()
    return figures(light_environment(tmp_path_factory.mktemp("cudnn"), cudnn=True), *WITH_CUDNN)


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """The Python of an environment without NVIDIA's packages, which no test changes."""
    return light_environment(tmp_path_factory.mktemp("none"))


@pytest.fixture(scope="module")
def with_none(figures, light):
    return figures(light, "-n1")


def test_with_cudnn_s_package_alone_all_figures_are_the_same(with_all, with_cudnn):
    assert len(with_all[0]) == STEPS.count("def test_") - 1
    assert with_cudnn[0] == with_all[0]


def test_without_cudnn_all_but_convolutions_have_the_same_figures(with_all, with_none):
    peaks, expected = dict(with_none[0]), dict(with_all[0])
    assert peaks.pop("test_child")[0] == ["1024", "2097152"]  # of the part of its own process
    _, notes = peaks.pop("test_convolution")
    expected.pop("test_convolution")
    assert peaks == expected
    assert "cuDNN is not installed (pip install --no-deps nvidia-cudnn-cu" in notes


def test_compiling_without_triton_says_what_to_install(with_none):
    assert "Triton, which is not installed; pip install --no-deps triton" in with_none[1]
    assert "4 passed" in with_none[1]
    assert "triton not found" not in with_none[1]  # PyTorch's own words, of a module that is ours


PROGRAM = """
import subprocess, sys

ASKS = "import torch; print(torch.cuda.get_device_name(), len(torch.ones(7, device='cuda')))"
exec(ASKS)
sys.stdout.flush()
subprocess.run([sys.executable, "-c", ASKS], check=True)
"""
LOADS = "import pytest_gpumem\npytest_gpumem.use_virtual_gpu('T4')\n"


@pytest.mark.parametrize(
    ("text", "command"),
    [(PROGRAM, ["-m", "pytest_gpumem", "run", "--card=T4"]), (LOADS + PROGRAM, [])],
    ids=["gpumem run", "use_virtual_gpu"],
)
def test_programs_and_their_child_processes_have_the_virtual_gpu(light, tmp_path, text, command):
    (tmp_path / "step.py").write_text(text, encoding="utf-8")
    process = subprocess.run(
        [light, *command, "step.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert process.stdout == "Tesla T4 7\n" * 2, process.stdout + process.stderr
    assert process.returncode == 0


def session(python, folder, *arguments):
    """Run pytest in a folder, and return what it prints, in one line."""
    process = subprocess.run(
        [python, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    return process.returncode, " ".join((process.stdout + process.stderr).split())


def test_a_torch_that_needs_a_library_of_another_name_ends_with_a_sentence_that_names_it(tmp_path):
    """torch's own files in copy, and in one of them cudart has a name that no CUDA has had."""
    python = light_environment(tmp_path / "env")
    (library,) = (tmp_path / "env").glob("lib/python*/site-packages/torch/lib/libc10_cuda.so")
    (cudart,) = (n for n in dependencies(library).names if n.startswith("libcudart.so."))
    content = library.read_bytes()
    library.unlink()
    library.write_bytes(content.replace(cudart.encode(), cudart.replace("rt.", "rs.").encode()))
    (tmp_path / "test_steps.py").write_text(STEPS, encoding="utf-8")
    status, output = session(python, tmp_path, "--gpumem-device=virtual")
    assert status != 0
    renamed = cudart.replace("rt.", "rs.")
    assert f"torch: it needs {renamed}, which is not installed, and which the virtual" in output
    assert "cannot open shared object file" in output  # the dynamic linker's own words, above
    assert "install torch with all packages that it requires, and report this torch" in output


# A machine with a real GPU, as the plugin sees it: a file of the driver's is there.

DRIVER_IS_THERE = """
import ctypes
from pathlib import Path

cdll = ctypes.CDLL.__init__

def noting(self, name, *arguments, **options):
    with open("opened", "a") as file:
        print(name, file=file)
    cdll(self, name, *arguments, **options)

ctypes.CDLL.__init__ = noting

def pytest_unconfigure():
    lines = Path("/proc/self/maps").read_text().splitlines()
    Path("maps").write_text("\\n".join(line.split()[-1] for line in lines))
"""


@pytest.mark.parametrize("is_light", [False, True], ids=["all packages", "light"])
def test_with_a_driver_of_a_real_gpu_nothing_of_the_virtual_one_is_loaded(
    light, tmp_path, is_light, monkeypatch
):
    write_driver(tmp_path, SYSTEM_DRIVER_MISMATCH)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (tmp_path / "driver_is_there.py").write_text(DRIVER_IS_THERE, encoding="utf-8")
    (tmp_path / "test_steps.py").write_text(STEPS, encoding="utf-8")
    if not is_light:
        need_libraries()
    python = light if is_light else sys.executable
    _, output = session(python, tmp_path, "-p", "driver_is_there", "-k", "transformer")
    opened = (tmp_path / "opened").read_text("utf-8") if (tmp_path / "opened").exists() else ""
    loaded = (tmp_path / "maps").read_text("utf-8").splitlines()
    assert not any("gpumem" in name for name in (*opened.splitlines(), *loaded))
    if is_light:  # the dynamic linker's own words, or torch's, as without the plugin
        linker = r"ImportError: lib\w+\.so\.\d+: cannot open shared object file"
        assert re.search(rf"{linker}|ValueError: lib\w+\.so\S+ not found in the system", output)
    else:
        assert "sees no GPU here" in output  # the real device was asked
        cudart = {name for name in loaded if "libcudart.so" in name}
        assert cudart
        assert all(f"{SITE}/nvidia" in name for name in cudart)
