"""Build the stand-in accelerator (programs/standin) once for all workers of a run of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version

import pytest
from filelock import FileLock
from packaging.version import Version

from helpers.paths import TESTS

STANDIN = "STANDIN"
"""variable with the accelerator's folder, in sessions whose tests run on it"""
SOURCES = TESTS / "programs" / "standin"
BUILD = """
import sys
from torch.utils.cpp_extension import load

load(
    "libstandin",
    [sys.argv[1]],
    build_directory=sys.argv[2],
    is_python_module=False,
    extra_cflags=["-O0"],  # built in half the time
    with_cuda=False,
)
"""
ENTRY_POINT = "[torch.backends]\nstandin = standin:autoload\n"
METADATA = "Metadata-Version: 2.1\nName: standin\nVersion: 1\n"


def built_standin(tmp_path_factory):
    """Return the folder of the stand-in's module; skip the test if it cannot be built."""
    if Version(version("torch")) < Version("2.10"):
        pytest.skip("the stand-in accelerator is written for torch 2.10 and newer")
    for tool in ("c++", "ninja"):
        if shutil.which(tool) is None:
            pytest.skip(f"the stand-in accelerator cannot be built here: there is no {tool}")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "standin"
    with FileLock(f"{folder}.lock"):
        if not (folder / "standin.py").exists():
            build(folder)
    return folder


def build(folder):
    """Build the stand-in into a folder with an entry point, by which torch imports it.

    The build runs in a process of its own, as PyTorch loads the library that it built.
    """
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, SOURCES / "standin.cpp", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    info = folder / "standin-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    (info / "METADATA").write_text(METADATA)
    shutil.copy(SOURCES / "standin.py", folder)
