"""Tell whether a process of this machine is running."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def is_running(pid: object) -> bool:
    """Return whether a process runs, and is no zombie; False for a value that is no process id.

    Without ``/proc``, zombies count as running; on Windows every process id counts as running.
    """
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return sys.platform == "win32" or _takes_signals(pid)  # on Windows signal 0 is Ctrl-C
    return status.rpartition(")")[2].split()[0] not in {"Z", "X"}


def _takes_signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's process
        return True
    except OSError:
        return False
    return True
