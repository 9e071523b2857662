"""Every function of NVIDIA's that the installed torch links is in the native library."""

import importlib.util
import re
from pathlib import Path

import pytest
from helpers.elf import symbols
from helpers.left_out import NVIDIA, need_libraries

from pytest_gpumem.devices.virtual import native

# Names of the driver (cuInit), which no wheel brings, and of all the libraries above it.
NVIDIAS = re.compile(r"(?:__)?(?:cu|cuda|cublas|cublasLt|cudnn|cufft|curand|cupti|nvml|nvrtc)[A-Z]")


def torch_folder():
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec else None


@pytest.fixture(scope="module")
def torch_wants():
    """Names that torch's own libraries want of others, and those wheels of NVIDIA's that it has."""
    folder = torch_folder()
    if folder is None:
        pytest.skip("torch is not installed")
    files = [*(folder / "lib").glob("*.so*"), *folder.glob("_C*.so")]
    tables = [symbols(path) for path in files]
    wanted = frozenset().union(*(table.wanted for table in tables))
    given = frozenset().union(*(table.given for table in tables))
    return wanted - given


@pytest.fixture(scope="module")
def ours():
    if native.build_problem() is not None:
        pytest.skip("the native library was not built")
    return symbols(native.LIBRARY).given


def test_the_reader_finds_what_is_known_to_be_there(torch_wants, ours):
    known = {"cudaMalloc", "cublasSgemm_v2", "cudnnCreate"}
    assert known <= torch_wants
    assert known <= ours
    assert "malloc" in torch_wants
    assert "malloc" not in ours


def test_all_that_is_named_as_nvidias_functions_are_is_answered(torch_wants, ours):
    wanted = {name for name in torch_wants if NVIDIAS.match(name)}
    assert len(wanted) > 400
    assert sorted(wanted - ours) == []


def test_all_that_nvidias_wheels_give_to_torch_is_answered(torch_wants, ours):
    """Whatever its name: NCCL's, cuSPARSELt's, nvJitLink's, NVSHMEM's."""
    need_libraries()
    files = [path for path in NVIDIA.rglob("*.so*") if path.is_file()]
    given = frozenset().union(*(symbols(path).given for path in files))
    wanted = {name for name in torch_wants & given if not name.startswith("_Z")}  # C alone
    assert len(wanted) > 400
    assert sorted(wanted - ours) == []


def test_the_shells_lend_their_names_to_the_one_library():
    """Whoever opens libcuda.so.1 gets the main library, not a copy with a state of its own."""
    for shell in (native.DRIVER, native.NVML):
        assert b"libgpumem_cuda.so" in shell.read_bytes()
        assert not {name for name in symbols(shell).given if NVIDIAS.match(name)}
