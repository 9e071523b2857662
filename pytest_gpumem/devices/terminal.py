"""Standard error as it was before pytest captured it.

A native library that ends the process, or that is refused something, has to be heard then too.
"""

from __future__ import annotations

import os

_STANDARD_ERROR = 2
_saved: int | None = None


def save_stderr() -> None:
    """Keep a copy of standard error's file descriptor, once a process; pytest captures it later."""
    global _saved  # noqa: PLW0603 - a process has one standard error
    if _saved is None:
        try:
            _saved = os.dup(_STANDARD_ERROR)
        except OSError:  # it is closed, as a daemon's is
            _saved = _STANDARD_ERROR


def saved_stderr() -> int:
    """Return the copy, or standard error itself where none was made."""
    return _STANDARD_ERROR if _saved is None else _saved
