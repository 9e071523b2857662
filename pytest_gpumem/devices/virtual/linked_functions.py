"""The functions of CUDA's libraries that the installed torch links, compared with those answered.

A function that a new torch links, and that the native library has not, would run in NVIDIA's own
library, which finds no driver: "CUBLAS_STATUS_EXECUTION_FAILED".
"""

from __future__ import annotations

import mmap
import re
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator
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
_DYNSYM, _GNU_HASH = 11, 0x6FFFFFF6
"""SHT_DYNSYM and SHT_GNU_HASH of the ELF format"""


class LinkedFunctions(NamedTuple):
    """The functions of NVIDIA's that torch links.

    Attributes:
        total: how many there are.
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
    """Compare what torch's libraries want with what the native library has.

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


def wanted_functions(path: Path) -> Iterator[str]:
    """Yield NVIDIA's functions that a 64-bit little-endian library imports.

    Undefined symbols stand before the first one that the table of hashes knows, so that the
    hundreds of thousands that torch defines are not looked at.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        if raw[:6] != b"\x7fELF\x02\x01":
            return
        table, count = struct.unpack_from("<Q", raw, 40)[0], struct.unpack_from("<H", raw, 60)[0]
        sections = [struct.unpack_from("<IIQQQQIIQQ", raw, table + 64 * i) for i in range(count)]
        places = {section[1]: section for section in sections}
        if _DYNSYM not in places:
            return
        start, size, link = (places[_DYNSYM][index] for index in (4, 5, 6))
        if _GNU_HASH in places:  # a table of hashes begins with its number of buckets
            size = 24 * struct.unpack_from("<I", raw, places[_GNU_HASH][4] + 4)[0]
        names = sections[link][4]
        for name, info, _, section, _, _ in struct.iter_unpack(
            "<IBBHQQ", raw[start : start + size]
        ):
            if section == 0 and info >> 4 and name:  # undefined, and not local
                symbol = raw[names + name : raw.find(b"\0", names + name)]
                if NVIDIAS.match(symbol):
                    yield symbol.decode()
