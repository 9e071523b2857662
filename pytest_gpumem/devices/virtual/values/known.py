"""Tensors with known and with assumed values, and writing them into device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.devices.virtual.values.host_tensors import over_device_memory, span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from pytest_gpumem.devices.virtual.library import NativeLibrary


class KnownValues:
    """The values that the native library holds, and which of them were assumed.

    The library knows by address which bytes are known. Assumed bytes are known to it as well; the
    storages that they lie in are noted here, by address and size.
    """

    def __init__(
        self, library: NativeLibrary, put: Callable[[Tensor, Tensor], bool | None]
    ) -> None:
        self._library = library
        self._put = put
        self._assumed: dict[int, int] = {}
        self.refused = 0
        """bytes that were not written: the host has no room for them"""

    def drop_stale(self) -> None:
        """Drop the notes of assumed values that are no more."""
        self._assumed = {
            address: nbytes
            for address, nbytes in self._assumed.items()
            if self._library.is_known(address, nbytes)
        }
        self._library.tell_assumed(any=bool(self._assumed))

    def is_known(self, tensor: Tensor) -> bool:
        """Return whether all of a tensor's values are known or assumed; the host's are."""
        if not tensor.is_cuda:
            return True
        nbytes = span(tensor)
        return not nbytes or self._library.is_known(tensor.data_ptr(), nbytes)

    def write(
        self, tensor: Tensor, values: Tensor, *, assumed: bool = False, whole: bool = False
    ) -> bool:
        """Put values where a tensor lies; False: the host has no room, they are unknown now.

        Args:
            tensor: of the device, or of the host.
            values: of the host.
            assumed: whether they are.
            whole: whether nothing else of the tensor's storage is of use.
        """
        if not tensor.is_cuda:
            tensor.copy_(values)
            return True
        nbytes = span(tensor)
        if not nbytes:
            return True
        if not (assumed or self._assumed):
            is_written = self._put(tensor, values)
            if is_written is not None:
                self.refused += 0 if is_written else nbytes
                return is_written
        address = tensor.data_ptr()
        is_partial = nbytes != tensor.nbytes and not self._library.is_known(address, nbytes)
        if not self._library.open_for_writing(address, nbytes):
            self.refused += nbytes
            return False
        host = over_device_memory(tensor)
        if values.data_ptr() != host.data_ptr():
            for dim, stride in enumerate(host.stride()):
                if not stride and host.shape[dim] > 1:  # an expanded tensor: once is enough
                    host, values = host.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
            host.copy_(values)
        # Between the elements of a tensor with gaps lie others', which were unknown.
        assumed = assumed or (is_partial and not whole)
        if assumed or self._assumed:
            self._mark(tensor, assumed=assumed, whole=whole)
        return True

    def accept(self, tensor: Tensor) -> bool:
        """Take the bytes that lie where a tensor was allocated for its values: any will do.

        What writes a part of it, and then the next one, has all of it known.
        """
        nbytes = span(tensor)
        if nbytes and not self._library.open_for_writing(tensor.data_ptr(), nbytes):
            return False
        if self._assumed:
            self._mark(tensor, assumed=False)
        return True

    def forget(self, tensor: Tensor) -> None:
        """Make a tensor's values unknown."""
        self._library.forget(tensor.data_ptr(), span(tensor))

    def forget_range(self, start: int, end: int) -> None:
        """Make the values of some addresses unknown."""
        self._library.forget(start, end - start)

    def are_assumed(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether any of these tensors has assumed values."""
        if not self._assumed:
            return False
        for tensor in tensors:
            if tensor.is_cuda:
                storage = tensor.untyped_storage()
                if self._assumed.get(storage.data_ptr()) == storage.nbytes():
                    return True
        return False

    def _mark(self, tensor: Tensor, *, assumed: bool, whole: bool = False) -> None:
        storage = tensor.untyped_storage()
        if assumed:
            self._assumed[storage.data_ptr()] = storage.nbytes()
        elif whole or span(tensor) == storage.nbytes():
            self._assumed.pop(storage.data_ptr(), None)
        self._library.tell_assumed(any=bool(self._assumed))
