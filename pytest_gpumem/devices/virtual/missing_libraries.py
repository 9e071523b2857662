"""Stands in for the CUDA libraries that torch is linked with and that are not installed.

PyTorch's CUDA code asks the native library, and NVIDIA's own libraries stay unused: on the virtual
GPU they need not be installed (docs/how-to/light.md). The dynamic linker wants a library of each
name all the same. It takes any that is loaded under the name, its SONAME, so each missing name is
given to a copy of an empty library, a *stub*, before torch is imported.

A stub has no functions and no symbol versions. The dynamic linker accepts a library without
versions for any version that is wanted (GNU C library, elf/dl-version.c); functions are the native
library's, which is loaded before and globally.
"""

from __future__ import annotations

import ctypes
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
    from collections.abc import Iterable, Iterator

PLACEHOLDER: Final = b"libgpumem-stub-" + b"x" * 48
"""the SONAME of the stub that setup.py builds; copies bear another in its place"""

STUBBED: Final = re.compile(
    r"lib(cudart|cublas|cublasLt|cudnn\w*|cufft|cufile|cupti|curand|cusolver|cusparse|cusparseLt|"
    r"nccl|nvrtc|nvshmem_host|nvToolsExt|nvJitLink)\.so\.\d+"
)
"""the libraries whose functions the native library answers, or refuses by name"""

CUDNN: Final = "libcudnn.so."

OWN: Final = re.compile(r"lib(c10|caffe2|shm|torch)")
"""how the names of torch's own libraries begin; of others beside them, some are used by none"""

_NEEDED, _STRINGS, _SONAME, _RPATH, _RUNPATH = 1, 5, 14, 15, 29  # DT_NEEDED ... of elf.h
_LOAD, _DYNAMIC = 1, 2  # PT_LOAD, PT_DYNAMIC


class Dependencies(NamedTuple):
    """The libraries that a shared object needs.

    Attributes:
        names: their SONAMEs (``DT_NEEDED``).
        folders: the folders to look in (``DT_RPATH`` and ``DT_RUNPATH``), ``$ORIGIN`` replaced.
    """

    names: tuple[str, ...]
    folders: tuple[Path, ...]


def read_dependencies(path: Path) -> Dependencies:
    """Read the dynamic section of a 64-bit little-endian shared object (elf.h).

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file.
    """
    with path.open("rb") as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01" or len(header) < 64:  # noqa: PLR2004 - sizeof(Elf64_Ehdr)
            raise ValueError(f"{path} is no 64-bit shared object")
        (segments_at,) = struct.unpack_from("<Q", header, 32)
        entry_size, count = struct.unpack_from("<HH", header, 54)
        file.seek(segments_at)
        table = file.read(entry_size * count)
        segments: list[tuple[int, int, int, int]] = []
        """type, offset, address, and size in the file"""
        for at in range(0, len(table) - entry_size + 1, entry_size):
            kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", table, at)
            segments.append((kind, offset, address, size))

        def at_address(address: int) -> int:
            for kind, offset, start, size in segments:
                if kind == _LOAD and start <= address < start + size:
                    return offset + address - start
            raise ValueError(f"{path}: its dynamic section points outside of the file")

        entries: list[tuple[int, int]] = []
        for kind, offset, _address, size in segments:
            if kind == _DYNAMIC:
                file.seek(offset)
                entries += struct.iter_unpack("<qQ", file.read(size // 16 * 16))
        strings = next((value for tag, value in entries if tag == _STRINGS), None)

        def text(offset: int) -> str:
            assert strings is not None  # noqa: S101 - for the type checker
            file.seek(at_address(strings) + offset)
            return file.read(4096).split(b"\0", 1)[0].decode()

        if strings is None:
            return Dependencies((), ())
        names = tuple(text(value) for tag, value in entries if tag == _NEEDED)
        paths = [text(value) for tag, value in entries if tag in {_RPATH, _RUNPATH}]
    origin = str(path.parent)
    folders = (folder for joined in paths for folder in joined.split(":") if folder)
    return Dependencies(
        names,
        tuple(
            Path(folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin))
            for folder in folders
        ),
    )


def missing_libraries(folder: Path) -> list[str]:
    """Return the SONAMEs that torch's libraries in a folder need and that cannot be found, sorted.

    A library beside them counts if one of them needs it: wheels bring libgfortran, which nothing
    loads, without libquadmath, which it needs.

    Looked for as the dynamic linker does: in the folders that each library names, in the process,
    and where the system has its libraries. PyTorch also looks for NVIDIA's packages along
    ``sys.path``.
    """
    beside = {path.name: path for path in sorted(folder.glob("*.so*"))}
    needed_paths = [path for name, path in beside.items() if OWN.match(name)]
    present = {path.name for path in (*needed_paths, *native.ALL)}
    missing = set()
    for path in needed_paths:  # which grows
        try:
            needed = read_dependencies(path)
        except (OSError, ValueError, struct.error):
            continue  # the dynamic linker will say it in its own words, if it needs the file
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
        ctypes.CDLL(name)  # torch would have loaded it as well
    except OSError:
        return False
    return True


def supply_missing_libraries(folder: Path | None = None) -> list[str]:
    """Load a stub for each CUDA library that torch needs and that is not installed.

    The native library has to be loaded already. Where all libraries are there nothing is loaded.

    Args:
        folder: torch's libraries; None: those of the torch that would be imported.

    Returns:
        the SONAMEs that stubs bear.

    Raises:
        DeviceError: torch needs a library that is no CUDA library known here, or a stub cannot be
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
    if not missing or unknown:  # a torch that nothing can help says it in its own words
        return []
    for name, path in _stubs(missing):
        try:
            ctypes.CDLL(str(path))
        except OSError as error:  # noqa: PERF203 - names the library
            raise DeviceError(
                f"{name}, which torch needs and which is not installed",
                f"the stub in its place cannot be loaded: {error}",
                "set TMPDIR to a folder that programs may run from, or install torch with "
                "all packages that it requires",
            ) from error
    return missing


def _stubs(names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Write a stub for each name, which is deleted once the caller has loaded it."""
    stub = native.STUB.read_bytes()
    with tempfile.TemporaryDirectory(prefix="pytest-gpumem-") as scratch:
        for name in names:
            path = Path(scratch, name)
            path.write_bytes(
                stub.replace(PLACEHOLDER, os.fsencode(name).ljust(len(PLACEHOLDER), b"\0"))
            )
            yield name, path
