"""Looks into built archives: each wheel holds what its name says, and runs where its name says.

    python release/check.py dist/*.whl

A wheel for manylinux has every native library, of its machine, which wants no symbol of a C
library newer than its tag's. The wheel for any system has none, and says why.
"""

from __future__ import annotations

import re
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.elf import MACHINES, Needs, needs  # noqa: E402

NATIVE = "pytest_gpumem/devices/virtual/native"
LIBRARIES = (
    *("libgpumem_cuda.so", "libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"),
    *("libnvrtc.so.12", "libnvrtc.so.13", "libgpumem_stub.so"),
)
STATUS = f"{NATIVE}/build-status.txt"
MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_(\w+)")


def problems(wheel: Path) -> list[str]:
    """Return what is wrong with a wheel; nothing where it is as its name says."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        found = [f"{name} is missing" for name in ("pytest_gpumem/py.typed",) if name not in names]
        tag = MANYLINUX.search(wheel.name)
        if wheel.name.endswith("-py3-none-any.whl"):
            there = [name for name in LIBRARIES if f"{NATIVE}/{name}" in names]
            found += [f"{name} is of one platform" for name in there]
            return found if STATUS in names else [*found, f"{STATUS} is missing"]
        if tag is None:
            return [*found, "its platform is neither manylinux_X_Y nor any"]
        newest, machine = (int(tag[1]), int(tag[2])), tag[3]
        with tempfile.TemporaryDirectory() as folder:
            for name in LIBRARIES:
                if f"{NATIVE}/{name}" not in names:
                    found.append(f"{name} is missing")
                    continue
                its = needs(Path(archive.extract(f"{NATIVE}/{name}", folder)))
                found += [f"{name} {text}" for text in unmet(its, newest, machine)]
    return found


def unmet(its: Needs, newest: tuple[int, int], machine: str) -> list[str]:
    """Return what a library asks for that a system with this C library may not have."""
    found = []
    if its.machine != MACHINES[machine]:
        found.append(f"is of machine {its.machine}, not of {machine}")
    for version in sorted(its.versions):
        numbers = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version)
        if numbers is None or (int(numbers[1]), int(numbers[2])) > newest:
            found.append(f"asks for {version}")
    return found


def main() -> int:
    """Check the wheels that are named on the command line."""
    status = 0
    for path in map(Path, sys.argv[1:]):
        found = problems(path)
        status |= bool(found)
        print(f"{path.name}: {'; '.join(found) or 'as its name says'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
