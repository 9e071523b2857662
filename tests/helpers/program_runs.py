"""``gpumem run`` in a process, as a user types it."""

from __future__ import annotations

import subprocess
import sys

from helpers.warm import HANGS, warm_python


def gpumem_run(folder, *words, new=False):
    """Run ``gpumem run`` with words in a folder; return its status, and its text in one line."""
    python = sys.executable if new else warm_python()
    ended = subprocess.run(
        [python, "-m", "pytest_gpumem.cli.main", "run", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS,
    )
    return ended.returncode, " ".join((ended.stderr + ended.stdout).split())
