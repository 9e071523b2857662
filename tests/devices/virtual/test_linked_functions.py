"""The functions of CUDA that torch links, compared with those that the virtual GPU answers."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.native_sources import compiler
from helpers.virtual_gpu import child, virtual_device
from packaging.version import Version

from pytest_gpumem.devices.virtual import native
from pytest_gpumem.devices.virtual.linked_functions import (
    NEWEST_CHECKED,
    LinkedFunctions,
    compare,
    has_checked_functions,
    wanted_functions,
)

LINKS = """
int cublasSgemm_v2(void), cublasSfancy(void), ncclFutureGather(void), cudaFreshAsync(void);
int unrelated(void);
int cudaOwn(void) { return 0; }
int use(void) {
    return cublasSgemm_v2() + cublasSfancy() + ncclFutureGather() + cudaFreshAsync() + unrelated();
}
"""


@pytest.fixture
def folder(tmp_path):
    """The libraries of a torch that links functions which nobody knows."""
    source = tmp_path / "links.c"
    source.write_text(LINKS)
    library = tmp_path / "libtorch_cuda.so"
    subprocess.run([*compiler(), "-shared", "-fPIC", source, "-o", library], check=True)
    (tmp_path / "libc10_cuda.so").write_bytes(b"no library")
    return tmp_path


def test_what_a_library_wants_of_nvidias_is_found(folder):
    wanted = ["cublasSfancy", "cublasSgemm_v2", "cudaFreshAsync", "ncclFutureGather"]
    assert sorted(wanted_functions(folder / "libtorch_cuda.so")) == wanted
    assert list(wanted_functions(folder / "libc10_cuda.so")) == []


def test_functions_that_are_not_answered_are_named(folder):
    linked = compare(folder, ctypes.CDLL(str(native.LIBRARY)))
    assert linked == (4, ("cublasSfancy", "cudaFreshAsync", "ncclFutureGather"))
    assert linked.sentence("2.99.0") == (
        "torch 2.99.0 links CUDA functions that this virtual GPU does not have "
        "(cublasSfancy, cudaFreshAsync, ncclFutureGather): a step that calls such a "
        "function fails inside NVIDIA's libraries (upgrade pytest-gpumem, or use an older "
        "torch)"
    )
    many = LinkedFunctions(9, tuple("abcdefg"))
    assert "(a, b, c, d, e and 2 more)" in many.sentence("2.99.0")
    assert LinkedFunctions(9, ()).sentence("2.99.0") == ""


def test_all_functions_of_the_installed_torch_are_answered():
    linked = virtual_device().linked_functions()
    assert linked.total > 400
    assert linked.missing == ()
    installed = Version(torch.__version__)
    assert (installed.major, installed.minor) <= NEWEST_CHECKED


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.6.0", True),
        ("2.15.0+cu132", True),
        ("2.16.0", False),
        ("3.0.0+cu140", False),
        ("2.15.0.dev20261101+cu132", False),
        ("2.15.0a0+git1234", False),
    ],
)
def test_which_versions_need_no_look(version, expected):
    assert has_checked_functions(version) is expected


def test_a_newer_torch_with_unknown_functions_is_told_in_the_notes(folder):
    program = f"""
    import pytest_gpumem
    from pathlib import Path
    from pytest_gpumem.devices.virtual import device, linked_functions
    linked_functions.NEWEST_CHECKED = (2, 5)
    plain = device.NativeLibrary.linked_functions
    folders = []
    def linked(self, folder):
        folders.append(folder)
        return plain(self, Path({str(folder)!r}))
    device.NativeLibrary.linked_functions = linked
    pytest_gpumem.use_virtual_gpu("T4")
    import torch
    assert folders == [Path(torch.__file__).parent / "lib"]
    print(device.VirtualDevice.loaded().notes(Path())[0])
    """
    expected = compare(folder, ctypes.CDLL(str(native.LIBRARY))).sentence(torch.__version__)
    assert child(program, card=None).strip() == expected


def test_other_functions_of_nvidias_are_refused_by_name():
    program = """
    import ctypes
    import torch
    from pytest_gpumem.devices.virtual.device import VirtualDevice
    print(ctypes.CDLL(None).cusparseSpVV(), VirtualDevice.loaded().trouble())
    """
    assert Path(native.LIBRARY).exists()
    expected = "10 the virtual GPU does not support cusparseSpVV, which the step called"
    assert child(program, warm=True).strip() == expected
