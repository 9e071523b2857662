"""SIGTERM ends a session that writes files as Ctrl-C does, so that finished tests are not lost."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

STATUS: Final = 128 + signal.SIGTERM
"""the exit status, as a shell has it of a process that the signal ended"""


def end_session_on_sigterm(config: pytest.Config) -> None:
    """Let SIGTERM end pytest's loop until the session is unconfigured; a second one kills.

    A handler of a program that calls pytest stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
        config.add_cleanup(_leave_alone)


def _leave_alone() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    _leave_alone()
    pytest.exit("SIGTERM", returncode=STATUS)
