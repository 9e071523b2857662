"""Lists the functions of NVIDIA's libraries that the virtual GPU refuses by name.

    python release/refused_exports.py SITE-PACKAGES... > \
        pytest_gpumem/devices/virtual/native/libraries/refused_exports.txt

Each argument is the ``site-packages`` of an environment with the wheels of NVIDIA: of CUDA 12, of
CUDA 13. A function is listed that a header declares with a status as its result, that a library
gives, and that the virtual GPU's own library has no other answer for. cuDNN's functions and those
of cuBLASLt are left out: an installed cuDNN, which is asked for its plans, calls them.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.elf import symbols  # noqa: E402 - of this source tree

NATIVE: Final = ROOT / "pytest_gpumem/devices/virtual/native"
STATUSES: Final = {
    "cudaError_t": 801,
    "cublasStatus_t": 15,
    "cufftResult": 16,
    "cusolverStatus_t": 9,
    "cusparseStatus_t": 10,
    "curandStatus_t": 999,
    "ncclResult_t": 3,
}
"""types of status, and each one's "not supported", or "internal error" where it has none"""
HEADERS: Final = (
    *("cuda_runtime_api.h", "cublas_api.h", "cublas_v2.h", "cublasXt.h", "cufft.h", "cufftXt.h"),
    *("cusparse.h", "cusolverDn.h", "cusolverMg.h", "cusolverRf.h", "cusolverSp.h"),
    *("curand.h", "nccl.h"),
)
LIBRARIES: Final = re.compile(
    r"lib(cudart|cublas|cufft|cusparse|cusolver|cusolverMg|curand|nccl)\.so"
)
DECLARATION: Final = re.compile(rf"\b({'|'.join(STATUSES)})\b[\s\w]*?\b(p?[a-z]+[A-Z]\w+)\s*\(")
HEAD: Final = """\
# Functions that NVIDIA's libraries give to programs, and that no torch of today links. The virtual
# GPU refuses each that no C file answers, with the "not supported" status of its library: an error
# names the function. Otherwise a call would end in NVIDIA's own library, without a driver. A line
# has a status, then functions; setup.py makes C of them. Made by release/refused_exports.py of
# NVIDIA's headers.
"""


def declared(folder: Path) -> dict[str, int]:
    """Return the functions that headers in a folder declare, with their status."""
    functions: dict[str, int] = {}
    for path in sorted(folder.rglob("*.h")):
        if path.name in HEADERS:
            text = path.read_text(encoding="utf-8", errors="replace")
            text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
            functions |= {name: STATUSES[kind] for kind, name in DECLARATION.findall(text)}
    return functions


def answered() -> set[str]:
    """Return the functions that the library answers in another way, or that its other list has."""
    libraries = NATIVE / "libraries"
    listed = set((libraries / "refused_functions.txt").read_text(encoding="utf-8").split())
    library = symbols(NATIVE / "libgpumem_cuda.so")
    return (library.given - library.weak) | listed


def main(folders: list[str]) -> None:
    """Print the list."""
    functions: dict[str, int] = {}
    given: set[str] = set()
    for folder in map(Path, folders):
        functions |= declared(folder / "nvidia")
        for path in (folder / "nvidia").rglob("*.so*"):
            if LIBRARIES.match(path.name):
                given |= symbols(path).given
    refused = sorted(given & functions.keys() - answered())
    print(HEAD, end="")
    for status in sorted(set(STATUSES.values())):
        words = " ".join(name for name in refused if functions[name] == status)
        head = f"{status} "
        for line in textwrap.wrap(words, 110, initial_indent=head, subsequent_indent=head):
            print(line)


main(sys.argv[1:])
