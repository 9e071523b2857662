"""Clearing the frames of a traceback, whose local variables keep a failed step's tensors alive."""

from __future__ import annotations

import traceback


def clear(error: BaseException | None) -> None:
    """Clear the frames of an error and of all that it was raised from or in the course of."""
    seen: set[int] = set()
    pending = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        pending += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
