"""Paths of the virtual GPU's shared libraries, if the package was built with them.

devices/virtual/library.py loads them; this module only names them, and says why they are missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "libgpumem_cuda.so"
DRIVER = FOLDER / "libcuda.so.1"
NVML = FOLDER / "libnvidia-ml.so.1"
NVRTC = (FOLDER / "libnvrtc.so.12", FOLDER / "libnvrtc.so.13")
STUB = FOLDER / "libgpumem_stub.so"
"""library that is copied in place of CUDA libraries that are not installed"""
OPENED_BY_NAME = (DRIVER, NVML, *NVRTC)
"""libraries that other libraries open by SONAME; loaded first, so that no real driver is found"""
ALL = (LIBRARY, *OPENED_BY_NAME)
"""the libraries loaded into a process"""
LINKED = FOLDER / "libcuda.so"
"""a copy of the driver library under the name that linkers search for (``-lcuda``); wheels cannot
contain links"""
_STATUS = FOLDER / "build-status.txt"


class BuildProblem(NamedTuple):
    """Why the libraries are missing.

    Attributes:
        problem: the fault, one line.
        remedy: the next step, one line.
        details: the compiler's output, or "".
    """

    problem: str
    remedy: str
    details: str


def build_problem() -> BuildProblem | None:
    """Return why the virtual GPU is missing, as recorded by setup.py; None if it was built."""
    if all(path.exists() for path in (*ALL, LINKED, STUB)):
        return None
    if not _STATUS.exists():
        return BuildProblem(
            "its libraries have not been built",
            "in a source tree: python setup.py build_ext --inplace; else: pip install "
            "--force-reinstall --no-deps --no-cache-dir pytest-gpumem",
            "",
        )
    problem, remedy, *details = _STATUS.read_text(encoding="utf-8").splitlines()
    return BuildProblem(problem, remedy, "\n".join(details))
