"""The functions of CUDA's libraries that the installed torch links, compared with those answered.

A function that a new torch links, and that the native library has not, would run in NVIDIA's own
library, which finds no driver: "CUBLAS_STATUS_EXECUTION_FAILED".
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.devices.virtual.missing_libraries import SharedObject

if TYPE_CHECKING:
    import ctypes
    from pathlib import Path

# Names of the driver's, which no wheel brings, and of all the libraries above it. C++'s names of
# PyTorch's own functions begin with "_Z".
NVIDIAS: Final = re.compile(
    rb"(?:__)?(?:cu|cuda|cublas|cublasLt|cudnn|cufft|curand|cusolver|cusparse|cusparseLt|cupti|"
    rb"cuFile|nvml|nvrtc|nvJitLink|nccl)[A-Z]|nvshmem"
)
LIBRARIES: Final = ("libtorch_cuda*.so", "libc10_cuda.so", "libtorch_python.so", "libtorch_cpu.so")
"""torch's own files that link CUDA's"""
NEWEST_COMPARED: Final = (2, 15)
"""the newest torch that was looked at: all functions of its releases, and older, are answered"""
MAX_NAMED: Final = 5
"""functions that a sentence names"""


class LinkedFunctions(NamedTuple):
    """The functions of NVIDIA's that torch links.

    Attributes:
        total: their number.
        missing: the names of those that the native library does not answer, sorted.
    """

    total: int
    missing: tuple[str, ...]

    def sentence(self, version: str) -> str:
        """Return a sentence on the missing ones; "" where there are none.

        Args:
            version: torch's.
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


def is_compared(version: str) -> bool:
    """Return whether a version of torch is a release that was looked at when this was written."""
    release = re.fullmatch(r"(\d+)\.(\d+)\.\d+(\+cu\d+)?", version)
    return release is not None and (int(release[1]), int(release[2])) <= NEWEST_COMPARED


def compare(folder: Path, library: ctypes.CDLL) -> LinkedFunctions:
    """Compare the functions that torch's libraries want with the native library's.

    Args:
        folder: torch's ``lib``.
        library: the native one.

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
    """Return NVIDIA's functions that a library imports; none of a file that is no library."""
    try:
        return [
            symbol.decode()
            for symbol in SharedObject(path).wanted_symbols()
            if NVIDIAS.match(symbol)
        ]
    except (ValueError, struct.error):
        return []
