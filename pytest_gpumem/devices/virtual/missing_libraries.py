"""Loads stubs for CUDA libraries that torch is linked with but that are not installed.

PyTorch's CUDA code calls the native library, and NVIDIA's own libraries stay unused: on the virtual
GPU they need not be installed (docs/how-to/light.md). The dynamic linker still requires a library
with each SONAME that torch names, and accepts any library loaded under that name. So before torch
is imported, a copy of an empty library, a *stub*, is loaded for each missing name.

A stub has no functions and no symbol versions. The dynamic linker accepts a library without
versions for any required version (GNU C library, elf/dl-version.c); functions resolve to the native
library, which is loaded earlier and globally.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.devices.torch_build import torch_folder
from pytest_gpumem.devices.virtual import native
from pytest_gpumem.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator

PLACEHOLDER: Final = b"libgpumem-stub-" + b"x" * 48
"""SONAME of the stub that setup.py builds; a copy has a missing library's SONAME in its place"""

STUBBED: Final = re.compile(
    r"lib(cudart|cublas|cublasLt|cudnn\w*|cufft|cufile|cupti|curand|cusolver|cusparse|cusparseLt|"
    r"nccl|nvrtc|nvshmem_host|nvToolsExt|nvJitLink)\.so\.\d+"
)
"""libraries whose functions the native library implements, or refuses by name"""

CUDNN: Final = "libcudnn.so."

OWN: Final = re.compile(r"lib(c10|caffe2|shm|torch)")
"""prefixes of torch's own libraries: their folder contains other libraries that nothing loads"""

_NEEDED, _HASH, _STRINGS, _SYMBOLS, _RPATH, _RUNPATH = 1, 4, 5, 6, 15, 29  # DT_NEEDED ... of elf.h
_GNU_HASH = 0x6FFFFEF5
_LOAD, _DYNAMIC = 1, 2  # PT_LOAD, PT_DYNAMIC


class Dependencies(NamedTuple):
    """The libraries that a shared object depends on.

    Attributes:
        names: SONAMEs of these libraries (``DT_NEEDED``).
        folders: the folders to look in (``DT_RPATH`` and ``DT_RUNPATH``), ``$ORIGIN`` replaced.
    """

    names: tuple[str, ...]
    folders: tuple[Path, ...]


class SharedObject:
    """The dynamic section of a 64-bit little-endian shared object (elf.h)."""

    def __init__(self, path: Path) -> None:
        """Parse the file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not such a shared object.
            struct.error: the file is damaged.
        """
        self.path = path
        with path.open("rb") as file:
            self._raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._raw[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no 64-bit shared object")
        (start,), (size, count) = self._read("<Q", 32), self._read("<HH", 54)
        segments = [self._read("<IIQQQQ", start + size * index) for index in range(count)]
        self._loaded = [segment for segment in segments if segment[0] == _LOAD]
        self._entries: list[tuple[int, int]] = []
        for kind, _, offset, _, _, length in segments:
            if kind == _DYNAMIC:
                content = self._raw[offset : offset + length // 16 * 16]
                self._entries += struct.iter_unpack("<qQ", content)

    def _read(self, form: str, offset: int) -> tuple[int, ...]:
        if offset > len(self._raw):
            raise ValueError(f"{self.path} is cut short")
        return struct.unpack_from(form, self._raw, offset)

    def _values(self, *tags: int) -> list[int]:
        return [value for tag, value in self._entries if tag in tags]

    def _place(self, address: int) -> int:
        for _, _, offset, start, _, size in self._loaded:
            if start <= address < start + size:
                return offset + address - start
        raise ValueError(f"{self.path}: its dynamic section points outside of the file")

    def _text(self, offset: int) -> bytes:
        (strings,) = self._values(_STRINGS)
        start = self._place(strings) + offset
        return self._raw[start : self._raw.find(b"\0", start)]

    def dependencies(self) -> Dependencies:
        """Return the libraries that this one needs."""
        origin = str(self.path.parent)
        paths = b":".join(map(self._text, self._values(_RPATH, _RUNPATH))).decode()
        folders = (folder for folder in paths.split(":") if folder)
        return Dependencies(
            tuple(self._text(value).decode() for value in self._values(_NEEDED)),
            tuple(
                Path(folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin))
                for folder in folders
            ),
        )

    def wanted_symbols(self) -> Iterator[bytes]:
        """Yield the undefined global symbols, which other libraries must define.

        They precede the first symbol in the GNU hash table, so the hundreds of thousands of symbols
        that torch defines are skipped.
        """
        symbols, tables = self._values(_SYMBOLS), self._values(_GNU_HASH) or self._values(_HASH)
        if not symbols or not tables:
            return
        start = self._place(symbols[0])
        (count,) = self._read("<I", self._place(tables[0]) + 4)
        content = self._raw[start : start + 24 * count]
        for name, info, _, section, _, _ in struct.iter_unpack("<IBBHQQ", content):
            if section == 0 and info >> 4 and name:  # undefined, and not local
                yield self._text(name)


def missing_libraries(folder: Path) -> list[str]:
    """Return the SONAMEs that torch's libraries in a folder need but that are not found, sorted.

    Another library in the folder counts only if one of torch's libraries needs it: wheels contain
    libgfortran, which nothing loads, without libquadmath, which libgfortran needs.

    As the dynamic linker does, this searches the folders that each library names, the libraries in
    the process, and the system's library folders. PyTorch also looks for NVIDIA's packages along
    ``sys.path``.
    """
    beside = {path.name: path for path in sorted(folder.glob("*.so*"))}
    needed_paths = [path for name, path in beside.items() if OWN.match(name)]
    present = {path.name for path in (*needed_paths, *native.ALL)}
    missing = set()
    for path in needed_paths:  # the loop appends to this list
        try:
            needed = SharedObject(path).dependencies()
        except (OSError, ValueError, struct.error):
            continue  # if the dynamic linker needs the file, it reports the fault itself
        for name in needed.names:
            if name in present or name in missing:
                continue
            if name in beside:
                needed_paths.append(beside[name])
                present.add(name)
            elif any((place / name).exists() for place in needed.folders) or _found_elsewhere(name):
                present.add(name)
            else:
                missing.add(name)
    return sorted(missing)


def _found_elsewhere(name: str) -> bool:
    for entry in sys.path:
        packages = Path(entry, "nvidia")
        if packages.is_dir() and any(packages.glob(f"*/lib*/{name}")):
            return True
    try:
        ctypes.CDLL(name)  # torch would load it too
    except OSError:
        return False
    return True


def supply_missing_libraries(folder: Path | None = None, stub: Path = native.STUB) -> list[str]:
    """Load a stub for each CUDA library that torch needs and that is not installed.

    The native library must be loaded already. If no library is missing, nothing is loaded.

    Args:
        folder: the folder of torch's libraries; None: that of the torch that would be imported.
        stub: the library to copy for each missing one.

    Returns:
        the SONAMEs of the stubs.

    Raises:
        DeviceError: torch needs a library that is not a known CUDA library, or a stub cannot be
            loaded.
    """
    torch = torch_folder()
    if folder is None and torch is not None:
        folder = torch / "lib"
    missing = missing_libraries(folder) if folder is not None else []
    unknown = [name for name in missing if not STUBBED.fullmatch(name)]
    if unknown and len(unknown) < len(missing):
        names = ", ".join(unknown)
        raise DeviceError(
            "torch",
            f"it needs {names}, which {'is' if len(unknown) == 1 else 'are'} not "
            "installed, and which the virtual GPU cannot replace",
            "install torch with all packages that it requires, and report this torch",
        )
    if not missing or unknown:  # no CUDA library is missing: torch's import error names the others
        return []
    content = stub.read_bytes()
    with tempfile.TemporaryDirectory(prefix="pytest-gpumem-") as scratch:
        for name in missing:
            path, soname = Path(scratch, name), os.fsencode(name).ljust(len(PLACEHOLDER), b"\0")
            path.write_bytes(content.replace(PLACEHOLDER, soname))
            try:
                ctypes.CDLL(str(path))
            except OSError as error:
                raise DeviceError(
                    f"{name}, which torch needs and which is not installed",
                    f"the stub in its place cannot be loaded: {error}",
                    "set TMPDIR to a folder that programs may run from, or install torch with "
                    "all packages that it requires",
                ) from error
    return missing
