"""The origin of a child process's peaks: recorded from its first use of CUDA, told at its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_gpumem.explain.attributor import Attributor
from pytest_gpumem.measurement import Peak
from pytest_gpumem.recording.recorder import Recorder
from pytest_gpumem.recording.recording import Span, now

if TYPE_CHECKING:
    from collections.abc import Mapping


class RecordedChild:
    """Records this process for its parent, which asks where the process's peaks come from."""

    def __init__(self, root: str) -> None:
        """Begin, once CUDA is initialised; files are named as seen from ``root``."""
        self._root, self._owner, self._began = Path(root), os.getpid(), now()
        self._recorder = Recorder()
        self._recorder.start()

    def attributions(self, peaks: Mapping[int, Peak]) -> dict[int, Any]:
        """End the recording; return the attribution of each device's peak, as plain data.

        A device has none if the recording does not show its peak; a fork of the process has none.
        """
        if os.getpid() != self._owner:
            return {}
        recording = self._recorder.stop()
        if recording.overflowed:
            return {}
        attributor, span = Attributor(recording, self._root), Span(self._began, now())
        return {
            index: msgspec.to_builtins(explained[0])
            for index, peak in peaks.items()
            if (explained := attributor.explained(index, peak, Peak(0, 0), [span], timeline=False))
        }
