"""Requests to PyTorch's allocator that a GPU may make besides, where time decides.

A run on the virtual GPU makes none of these requests. They are at the upper end of its range: the
replay of its requests makes them (:mod:`pytest_gpumem.testrun.workspace_replay`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.base import ExtraRequests

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_EXTRAS: Final = 100_000
"""requests that are kept of a run: more are not replayed"""


class ExtraLog:
    """The requests since a run began that a GPU may make besides, each with its reason."""

    def __init__(self) -> None:
        self._extras: list[ExtraRequests] = []
        self._size = 0
        self._reasons: dict[str, None] = {}

    def begin(self) -> None:
        """Forget those of the last run."""
        self._extras.clear()
        self._size = 0
        self._reasons.clear()

    def add(  # noqa: PLR0913 - all that such requests differ in
        self,
        reason: str,
        requests: Iterable[int],
        times: tuple[float, float],
        *,
        counted: bool,
        beside: tuple[int, ...] = (),
        instead: int = 0,
        since: float = 0,
    ) -> None:
        """Add requests on the current device and stream.

        Args:
            reason: the choice that is not known.
            requests: as :class:`ExtraRequests` has them, as all that follows.
            times: of the first request, and of the end.
            counted: whether they count for a peak allocated.
            beside: addresses of blocks with which they are held.
            instead: address of a block in whose place they are.
            since: the age of these.
        """
        import torch

        sizes = tuple(requests)
        if not any(sizes):
            return
        self._reasons[reason] = None
        self._size += len(sizes)
        if self._size > MAX_EXTRAS:
            return
        device = torch.cuda.current_device()
        stream = torch.cuda.current_stream(device).cuda_stream
        self._extras.append(
            ExtraRequests(*times, device, stream, sizes, reason, counted, beside, instead, since)
        )

    def used(self) -> list[ExtraRequests] | None:
        """Return them, in the order of their ends; None: they are too many."""
        return None if self._size > MAX_EXTRAS else list(self._extras)

    def count(self) -> int:
        """Return how many requests there are."""
        return self._size

    def reasons(self) -> list[str]:
        """Return the choices that are not known."""
        return list(self._reasons)
