"""An interpreter with torch in memory: its processes are forks of a warm process.

Importing torch takes two seconds, and few tests need a process that imports it itself. A test that
does runs ``sys.executable``: it depends on the order of imports, on missing modules, on variables
that are read while Python or torch are loaded, or on how an interpreter ends.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers.paths import HELPERS, ROOT, TESTS

SERVER = HELPERS / "warm_server.py"
HANGS = 900
"""seconds after which a process counts as hanging; high, so that no test fails on a busy machine"""


SHARED = "WARM_PYTHON"
"""variable with the interpreter's path, for the workers: all use the controller's warm process"""


@functools.cache
def warm_python() -> str:
    """Return the interpreter's path; the first call in a process starts the warm process."""
    if SHARED in os.environ:
        return os.environ[SHARED]
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    paths = [str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {name: value for name, value in os.environ.items() if name[:7] != "PYTEST_"}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    # Keep numpy's OpenBLAS and Inductor from starting threads: a process that forks must have none.
    environment |= {"OPENBLAS_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # as tests/conftest.py sets it
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, SERVER, folder],
            env=environment,
            stdin=subprocess.PIPE,  # never written to; the server ends when it is closed
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert server.stdin is not None
    assert server.stdout is not None
    atexit.register(server.wait)
    atexit.register(server.stdin.close)
    python = server.stdout.readline().decode().rstrip()
    server.stdout.close()
    if not python:
        raise RuntimeError((folder / "log").read_text(encoding="utf-8"))
    return python
