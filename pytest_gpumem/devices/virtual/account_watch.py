"""The memory in use on virtual devices while a step runs, from the native library's accounts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.devices.memory_use import UseWatch
from pytest_gpumem.devices.virtual.ranks.unwaited_collectives import UNWAITED
from pytest_gpumem.measurement import MIN_OUTSIDE, DeviceUse
from pytest_gpumem.notes import Note, NoteKind, notes_of
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.devices.virtual.library import NativeLibrary


class AccountWatch(UseWatch):
    """Reads the virtual GPU's accounts, which are exact and cheap to read."""

    source = "the virtual GPU's account"

    def __init__(self, library: NativeLibrary, context: int, devices: range) -> None:
        super().__init__(devices)
        self._library = library
        self._context = context

    def used(self, device: int) -> int:
        """Return the bytes charged to the device's account, plus those of the CUDA context."""
        return self._context + self._library.account(device).charged

    def start(self, reserved: Sequence[int]) -> None:
        """See :meth:`UseWatch.start`."""
        for device in self.devices:
            self._library.forget_peak(device)
        super().start(reserved)

    def look(self, reserved: Sequence[int], peaks: Sequence[int]) -> None:
        """See :meth:`UseWatch.look`.

        The account's peak and PyTorch's may be at different times, so their difference is a lower
        bound of the memory outside PyTorch's allocator.
        """
        for device, own, peak in zip(self.devices, reserved, peaks, strict=True):
            account = self._library.account(device)
            most = self._context + max(account.peak_charged - peak, account.charged - own)
            self._outside[device] = max(self._outside[device], most - self._besides[device])
        self.forget()

    def notes(self, use: Sequence[DeviceUse], name: str, peak: int) -> list[Note]:
        """See :meth:`UseWatch.notes`; adds notes on outside memory and on unwaited collectives."""
        notes = super().notes(use, name, peak)
        outside = max((device.outside for device in use), default=0)
        if outside >= MIN_OUTSIDE:
            sentence = (
                f"at least {format_size(outside)} of {name}'s memory were allocated outside "
                "PyTorch's allocator: this memory is in no peak, and must fit too"
            )
            notes.append(Note(NoteKind.OUTSIDE, sentence))
        return [*notes, *notes_of(NoteKind.STILL_HELD, UNWAITED.notes(peak))]

    def release(self) -> None:
        """Free the tensors of unwaited collectives, as the next collective would."""
        UNWAITED.clear()

    def _read(self) -> None:
        for device in self.devices:
            highest = self._context + self._library.account(device).peak_charged
            self._peaks[device] = max(self._peaks[device], highest)

    def forget(self) -> None:
        """See :meth:`UseWatch.forget`."""
        self._read()
        for device in self.devices:
            self._library.forget_peak(device)
