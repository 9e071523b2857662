"""Carries objects between ranks: PyTorch's ``send_object_list`` and ``recv_object_list``.

The results of ``send`` and ``recv`` are unknown on the virtual GPU. The bytes of a pickled object
have to be known, because pipeline stages exchange their shapes this way. So these bytes go through
the ranks' store.
"""

from __future__ import annotations

import inspect
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
"""functions of torch.distributed through which the functions in NAMES send and receive tensors"""
CARRIED: Final = Patch(
    "torch.distributed",
    *(*NAMES, *(f"distributed_c10d.{name}" for name in (*NAMES, *PRIMITIVES))),
    reason="ranks send each other objects through their store: a virtual GPU moves no bytes",
)


class _Messages(threading.local):
    """The message that this thread is sending or receiving."""

    def __init__(self) -> None:
        self.sent: list[bytes] | None = None
        """contents of the GPU tensors sent so far; None while no message is sent"""
        self.fetch: Callable[[], list[bytes]] | None = None
        """function that returns the received contents; None while no message is received"""
        self.received: list[bytes] | None = None


class ObjectMessages:
    """Carries objects between ranks that are processes on virtual GPUs."""

    def __init__(self, c10d: Any) -> None:
        """Prepare to wrap functions of ``torch.distributed.distributed_c10d`` (``c10d``)."""
        self._c10d = c10d
        self._here = _Messages()
        self._counts: Counter[tuple[str, int, int]] = Counter()

    def install(self, distributed: ModuleType) -> None:
        """Replace PyTorch's functions for the lifetime of the process."""
        CARRIED.wrap(distributed, self._carrying)

    def _carrying(self, function: Any) -> Any:
        name = function.__name__
        if name in PRIMITIVES:

            def move(first: Any, *args: Any, **options: Any) -> Any:
                result = function(first, *args, **options)
                self._moved([each.tensor for each in first] if name == PRIMITIVES[-1] else [first])
                return result

            return move
        call_of = inspect.signature(function).bind
        carry = self._send if name == NAMES[0] else self._receive
        return lambda *args, **options: carry(function, call_of(*args, **options))

    def _moved(self, tensors: Sequence[Any]) -> None:
        """Record the values of a message's sent tensors, or write the received ones."""
        here = self._here
        for tensor in tensors:
            if not tensor.is_cuda:
                continue  # another backend moves the values itself
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

    def _send(self, send: Any, call: inspect.BoundArguments) -> None:
        """Send a list of objects: put the bytes in the store."""
        sent: list[bytes] = []
        self._here.sent = sent
        try:
            send(*call.args, **call.kwargs)
        finally:
            self._here.sent = None
        if sent:
            named = call.arguments
            receiver = self._rank(named.get("group"), named.get("dst"), named.get("group_dst"))
            key = self._key(named.get("group"), self._c10d.get_rank(), receiver)
            self._c10d._get_default_store().set(key, msgspec.msgpack.encode(sent))

    def _receive(self, receive: Any, call: inspect.BoundArguments) -> Any:
        """Receive a list of objects: get the bytes from the store."""
        named = call.arguments

        def fetch() -> list[bytes]:
            store = self._c10d._get_default_store()
            sender = self._rank(named.get("group"), named.get("src"), named.get("group_src"))
            key = self._key(named.get("group"), sender, self._c10d.get_rank())
            contents = msgspec.msgpack.decode(store.get(key), type=list[bytes])
            with suppress(RuntimeError):  # some stores cannot delete keys
                store.delete_key(key)
            return contents

        self._here.fetch, self._here.received = fetch, None
        try:
            return receive(*call.args, **call.kwargs)
        finally:
            self._here.fetch = self._here.received = None

    def _rank(self, group: object, rank: int | None, group_rank: int | None) -> int:
        """Return the global rank of a rank given either globally or within a group."""
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
        """Return the store's key for the next message between two ranks."""
        name = str(getattr(group, "group_name", ""))
        self._counts[name, sender, receiver] += 1
        count = self._counts[name, sender, receiver]
        return f"gpumem/objects/{name}/{sender}/{receiver}/{count}"


def carry_objects(distributed: Any) -> None:
    """Carry objects between this process's rank and the other ranks."""
    c10d = getattr(distributed, "distributed_c10d", None)
    if c10d is not None and hasattr(c10d, "recv_object_list"):
        ObjectMessages(c10d).install(distributed)
