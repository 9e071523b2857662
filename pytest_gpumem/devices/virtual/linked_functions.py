"""Checks that the native library implements the CUDA functions that the installed torch links.

If a new torch links a function that the native library lacks, NVIDIA's own library runs it, finds
no driver, and fails: "CUBLAS_STATUS_EXECUTION_FAILED".
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.devices.virtual.missing_libraries import SharedObject

if TYPE_CHECKING:
    import ctypes
    from pathlib import Path

# Functions of the driver, which no wheel contains, and of all the libraries above it. PyTorch's own
# C++ functions do not match: their mangled names begin with "_Z".
NVIDIAS: Final = re.compile(
    rb"(?:__)?(?:cu|cuda|cublas|cublasLt|cudnn|cufft|curand|cusolver|cusparse|cusparseLt|cupti|"
    rb"cuFile|nvml|nvrtc|nvJitLink|nccl)[A-Z]|nvshmem"
)
LIBRARIES: Final = ("libtorch_cuda*.so", "libc10_cuda.so", "libtorch_python.so", "libtorch_cpu.so")
"""torch's own files that link CUDA's libraries"""
NEWEST_CHECKED: Final = (2, 15)
"""newest version of torch that was checked: all CUDA functions that its releases and older releases
link are implemented"""
MAX_NAMED: Final = 5
"""maximum number of functions that a sentence names"""


class LinkedFunctions(NamedTuple):
    """NVIDIA's functions that torch links.

    Attributes:
        total: number of these functions.
        missing: sorted names of the functions that the native library does not implement.
    """

    total: int
    missing: tuple[str, ...]

    def sentence(self, version: str) -> str:
        """Return a sentence on the missing functions; "" if there are none.

        Args:
            version: torch's version.
        """
        if not self.missing:
            return ""
        unnamed = len(self.missing) - MAX_NAMED
        also = f" and {unnamed} more" if unnamed > 0 else ""
        return (
            f"torch {version} links CUDA functions that this virtual GPU does not have "
            f"({', '.join(self.missing[:MAX_NAMED])}{also}): a step that calls such a "
            "function fails inside NVIDIA's libraries (upgrade pytest-gpumem, or use an "
            "older torch)"
        )


def has_checked_functions(version: str) -> bool:
    """Return whether the functions that this version of torch links were checked in advance."""
    release = re.fullmatch(r"(\d+)\.(\d+)\.\d+(\+cu\d+)?", version)
    return release is not None and (int(release[1]), int(release[2])) <= NEWEST_CHECKED


def compare(folder: Path, library: ctypes.CDLL) -> LinkedFunctions:
    """Return NVIDIA's functions that torch's libraries import, and those that are missing.

    Args:
        folder: torch's ``lib``.
        library: the native library.

    Raises:
        OSError: one of torch's libraries cannot be read.
    """
    names: set[str] = set()
    for pattern in LIBRARIES:
        for path in sorted(folder.glob(pattern)):
            names.update(wanted_functions(path))
    return LinkedFunctions(
        len(names), tuple(sorted(name for name in names if not hasattr(library, name)))
    )


def wanted_functions(path: Path) -> list[str]:
    """Return NVIDIA's functions that a library imports; none if the file is not a library."""
    try:
        return [
            symbol.decode()
            for symbol in SharedObject(path).wanted_symbols()
            if NVIDIAS.match(symbol)
        ]
    except (ValueError, struct.error):
        return []
