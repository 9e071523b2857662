"""Build a stub of the driver's libcuda.so.1, in which each function returns the same result.

The default result is the one that a driver returns before cuInit. As a program, this module writes
the library into a folder: ``python -m helpers.driver_stub FOLDER``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from helpers.elf import symbols
from pytest_gpumem.devices.virtual import native

NOT_INITIALIZED = 3
NO_DEVICE = 100
SYSTEM_DRIVER_MISMATCH = 803


def write_driver(folder, result=NOT_INITIALIZED, extra=""):
    """Write the library into a folder, with every function of the driver API that torch may use.

    ``extra`` is C code of functions that return something else.
    """
    given = (name for name in symbols(native.LIBRARY).given if re.match("cu[A-Z]", name))
    names = sorted(name for name in given if f" {name}(" not in extra)
    lines = [f"int {name}(void) {{ return {result}; }}" for name in names]
    source = Path(folder, "driver.c")
    source.write_text("\n".join([*lines, extra, ""]))
    compiler = shlex.split(os.environ.get("CC", "cc"))
    path = Path(folder, "libcuda.so.1")
    command = [*compiler, "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", path, source]
    subprocess.run(command, check=True)
    return path


if __name__ == "__main__":
    write_driver(sys.argv[1])
