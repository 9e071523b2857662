"""An interpreter that has torch in memory already: its processes are forks of a warm process.

Importing torch takes two seconds, and a process that a test starts seldom has to do that itself.
Where it has to (what is loaded first, hidden, or imported at all; variables that are read while
Python or torch are loaded; how an interpreter ends), a test takes ``sys.executable``.
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
"""seconds after which a process is taken to hang: no test is to fail on a busy machine"""


SHARED = "WARM_PYTHON"
"""the variable by which the workers of a run have one warm process, their controller's"""


@functools.cache
def warm_python() -> str:
    """Return the path of the interpreter; the first call of a process starts the warm process."""
    if SHARED in os.environ:
        return os.environ[SHARED]
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    paths = [str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {name: value for name, value in os.environ.items() if name[:7] != "PYTEST_"}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    # numpy's OpenBLAS and Inductor start no threads then: a process that forks is to have none
    environment |= {"OPENBLAS_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # as tests/conftest.py sets it
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, SERVER, folder],
            env=environment,
            stdin=subprocess.PIPE,  # never written to: it ends with this process
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
