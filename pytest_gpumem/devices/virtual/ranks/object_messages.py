"""Objects that ranks send to each other: ``send_object_list`` and ``recv_object_list`` of PyTorch.

What ``send`` and ``recv`` bring is unknown on the virtual GPU. A pickled object has to be known: by
such ones the stages of a pipeline tell each other shapes. Its bytes go by the ranks' store.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pytest_gpumem.errors import DeviceError
from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

NAMES: Final = ("send_object_list", "recv_object_list")
PRIMITIVES: Final = ("send", "recv", "batch_isend_irecv")
"""functions of torch.distributed that these two move tensors by"""
CARRIED: Final = Patch(
    "torch.distributed",
    *(*NAMES, *(f"distributed_c10d.{name}" for name in (*NAMES, *PRIMITIVES))),
    reason="ranks send each other objects by their store: a virtual GPU moves no bytes",
)


class _Messages(threading.local):
    """The message that this thread sends or receives."""

    def __init__(self) -> None:
        self.sent: list[bytes] | None = None
        """contents of the tensors on a GPU that were sent, while one is sent"""
        self.fetch: Callable[[], list[bytes]] | None = None
        """returns those that are received, while one is"""
        self.received: list[bytes] | None = None


class ObjectMessages:
    """Carries objects between ranks that are processes on virtual GPUs."""

    def __init__(self, c10d: Any) -> None:  # noqa: ANN401 - a module
        """Make it.

        Args:
            c10d: ``torch.distributed.distributed_c10d``.
        """
        self._c10d = c10d
        self._plain: dict[str, Any] = {name: getattr(c10d, name) for name in (*NAMES, *PRIMITIVES)}
        self._here = _Messages()
        self._counts: Counter[tuple[str, int, int]] = Counter()

    def install(self, distributed: ModuleType) -> None:
        """Take the places of PyTorch's functions, as long as the process lives."""
        own = {name: getattr(self, name.rpartition(".")[2]) for name in CARRIED.names}
        CARRIED.put(distributed, own)

    def send(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - PyTorch's
        """Stand in for ``torch.distributed.send``."""
        result = self._plain["send"](tensor, *args, **kwargs)
        self._moved([tensor])
        return result

    def recv(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - PyTorch's
        """Stand in for ``torch.distributed.recv``."""
        result = self._plain["recv"](tensor, *args, **kwargs)
        self._moved([tensor])
        return result

    def batch_isend_irecv(self, operations: Sequence[Any]) -> Any:  # noqa: ANN401 - PyTorch's
        """Stand in for ``torch.distributed.batch_isend_irecv``."""
        result = self._plain["batch_isend_irecv"](operations)
        self._moved([operation.tensor for operation in operations])
        return result

    def _moved(self, tensors: Sequence[Any]) -> None:
        """Note what tensors of a message hold that was sent, or write what was received."""
        here = self._here
        for tensor in tensors:
            if not tensor.is_cuda:
                continue  # another backend's, which moves the values by itself
            if here.sent is not None:
                here.sent.append(tensor.cpu().numpy().tobytes())
            elif here.fetch is not None:
                import torch

                if here.received is None:
                    here.received = here.fetch()
                content = bytearray(here.received.pop(0))
                if len(content) != tensor.nbytes:
                    raise DeviceError(
                        "torch.distributed.recv_object_list",
                        "the object's size is a value on the GPU, and no values are computed",
                        "compute values: --values=auto, or --gpumem-values=auto",
                    )
                tensor.copy_(torch.frombuffer(content, dtype=tensor.dtype))

    def send_object_list(
        self,
        object_list: Sequence[object],
        dst: int | None = None,
        group: Any = None,  # noqa: ANN401 - a process group
        device: Any = None,  # noqa: ANN401 - a device
        group_dst: int | None = None,
        **options: Any,  # noqa: ANN401 - of newer versions
    ) -> None:
        """Stand in for ``torch.distributed.send_object_list``."""
        if group_dst is not None:
            options["group_dst"] = group_dst
        sent: list[bytes] = []
        self._here.sent = sent
        try:
            self._plain["send_object_list"](object_list, dst, group, device, **options)
        finally:
            self._here.sent = None
        if sent:
            key = self._key(group, self._c10d.get_rank(), self._rank(group, dst, group_dst))
            self._c10d._get_default_store().set(key, msgspec.msgpack.encode(sent))

    def recv_object_list(
        self,
        object_list: list[object],
        src: int | None = None,
        group: Any = None,  # noqa: ANN401 - a process group
        device: Any = None,  # noqa: ANN401 - a device
        group_src: int | None = None,
        **options: Any,  # noqa: ANN401 - of newer versions
    ) -> Any:  # noqa: ANN401 - a rank
        """Stand in for ``torch.distributed.recv_object_list``."""
        if group_src is not None:
            options["group_src"] = group_src

        def fetch() -> list[bytes]:
            store = self._c10d._get_default_store()
            key = self._key(group, self._rank(group, src, group_src), self._c10d.get_rank())
            contents = msgspec.msgpack.decode(store.get(key), type=list[bytes])
            with suppress(RuntimeError):  # a store that deletes no key
                store.delete_key(key)
            return contents

        self._here.fetch, self._here.received = fetch, None
        try:
            return self._plain["recv_object_list"](object_list, src, group, device, **options)
        finally:
            self._here.fetch = self._here.received = None

    def _rank(self, group: object, rank: int | None, group_rank: int | None) -> int:
        """Return the rank in the whole world that a program has named either way."""
        if group_rank is not None and group is not None:
            return int(self._c10d.get_global_rank(group, group_rank))
        named = group_rank if rank is None else rank
        if named is None:
            raise DeviceError(
                "recv_object_list without src",
                "the virtual GPU receives objects only from a named rank",
                "write src= with the rank that sends",
            )
        return named

    def _key(self, group: object, sender: int, receiver: int) -> str:
        """Return the store's key of the next message between two ranks."""
        name = str(getattr(group, "group_name", ""))
        self._counts[name, sender, receiver] += 1
        count = self._counts[name, sender, receiver]
        return f"gpumem/objects/{name}/{sender}/{receiver}/{count}"


def carry_objects(distributed: Any) -> None:  # noqa: ANN401 - a module
    """Carry objects between this process's rank and the other ranks."""
    c10d = getattr(distributed, "distributed_c10d", None)
    if c10d is not None and hasattr(c10d, "recv_object_list"):
        ObjectMessages(c10d).install(distributed)
