"""Whether another process of this machine runs."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path


def is_running(pid: object) -> bool:
    """Return whether a process runs, and is no zombie; False for what is no process id.

    Without ``/proc``, zombies count as running; on Windows no process does.
    """
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        if sys.platform != "win32":  # where signal 0 is Ctrl-C
            with suppress(OSError):
                os.kill(pid, 0)
                return True
        return False
    return status.rpartition(")")[2].split()[0] not in {"Z", "X"}
