"""Find the memory that an autograd graph keeps: tensors that its nodes saved for the backward.

Python's collector does not see these tensors, as nodes are C++ objects. Nothing is unpacked on the
way, so no saved-tensor hook runs, and no checkpoint is recomputed.

Saved-tensor hooks keep objects of their own in place of a tensor: those of torch.utils.checkpoint
keep a ``_CheckpointFrame``, which keeps a node that saved the checkpoint's inputs.
"""

from __future__ import annotations

import functools
import threading
from contextlib import suppress
from types import CellType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from pytest_gpumem.patches import Patch
from pytest_gpumem.recording.plain_tensors import gradient_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

PUSHED: Final = Patch(
    "torch._C._autograd",
    "_push_saved_tensors_default_hooks",
    reason="what a graph keeps is read without the hooks that unpack it",
    versions="torch 2.6 to 2.9",
)
MAX_NODES: Final = 100_000
"""maximum number of nodes to visit in one graph"""
MAX_PACKED: Final = 500
"""maximum number of objects to visit among those that one saved tensor's hooks keep"""
MAX_DEPTH: Final = 8
"""maximum number of references to follow from a hook to the objects that it keeps"""


def graph_tensors(tensor: Tensor, visited: set[Any]) -> Iterator[Tensor]:
    """Yield the tensors that a tensor keeps alive through its graph or as its gradient.

    Nodes in ``visited`` are skipped; those of this graph are added to it.
    """
    gradient = gradient_of(tensor)
    if gradient is not None:
        yield gradient
    pending: list[Any] = [tensor.grad_fn]
    number = 0
    while pending and number < MAX_NODES:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        number += 1
        for saved in saved_objects(node, visited):
            if is_node(saved):
                pending.append(saved)
            else:
                yield saved
        leaf = getattr(node, "variable", None)  # only AccumulateGrad has it
        if leaf is not None:
            yield leaf
            gradient = gradient_of(leaf)
            if gradient is not None:
                yield gradient
        pending.extend(successor for successor, _ in node.next_functions)


def saved_objects(node: Any, visited: set[Any]) -> Iterator[Any]:  # noqa: ANN401 - one of autograd's many types
    """Yield the tensors that a node saved, and the nodes that hooks keep in their place.

    Hooks whose ids are in ``visited`` are skipped; those of this node are added to it.
    """
    import torch

    for name in dir(type(node)):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            saved = getattr(node, name)
        except RuntimeError:  # a backward has freed it
            continue
        entries = saved if isinstance(saved, (tuple, list)) else (saved,)
        if not hasattr(torch._C._autograd.SavedTensor, "data"):
            entries = HOOKS.saved_by(node, name.replace("_raw", "", 1))
        for entry in entries:
            content = getattr(entry, "data", None)
            if isinstance(content, torch.Tensor):
                yield content
                continue
            # Packed by a hook; all tensors of one checkpoint share one hook.
            hook = getattr(entry, "unpack_hook", None)
            yield from packed_objects([content, *[hook] * (id(hook) not in visited)])
            visited.add(id(hook))
    yield from packed_objects(getattr(node, "__dict__", {}).values())  # ctx of a Python Function


class Saved(NamedTuple):
    """A node's saved tensor, with the attributes of torch 2.10's ``SavedTensor``."""

    data: object
    """the tensor, or the object that a hook packed"""
    unpack_hook: Callable[[Any], Any] | None = None


class _Hooks:
    """Reads the saved tensors of nodes in torch 2.6 to 2.9, which have no attribute for them.

    Reading a saved tensor calls its unpack hook. A wrapped hook notes the packed object instead of
    unpacking it. Hooks set before the process's first measurement are not wrapped, so they unpack.
    """

    def __init__(self) -> None:
        self._reading = threading.local()
        self._is_installed = False
        self._no_tensor: Tensor | None = None

    def install(self) -> None:
        """Wrap the hooks that are set from now on; do nothing in newer versions of torch."""
        import torch

        autograd = torch._C._autograd
        if self._is_installed or hasattr(autograd.SavedTensor, "data"):
            return
        self._is_installed = True
        self._no_tensor = torch.empty(0, device="cpu")

        def readable(unpack: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def unpack_or_note(packed: object) -> object:
                packed_tensors: list[Saved] | None = getattr(self._reading, "packed_tensors", None)
                if packed_tensors is None:
                    return unpack(packed)
                packed_tensors.append(Saved(packed, unpack))
                return self._no_tensor

            return unpack_or_note

        PUSHED.wrap(autograd, lambda push: lambda pack, unpack: push(pack, readable(unpack)))

    def saved_by(self, node: Any, name: str) -> list[Saved]:  # noqa: ANN401 - one of autograd's many types
        """Return the tensors that a node saved under a name; [] if ``install`` was not called."""
        if not self._is_installed:
            return []
        packed_tensors: list[Saved] = []
        self._reading.packed_tensors = packed_tensors
        try:
            # A Python Function has "saved_tensors", a C++ node (StackBackward0) "_saved_tensors".
            saved = getattr(node, name if hasattr(type(node), name) else name[1:])
        except RuntimeError:  # the tensor was changed in place after the node saved it
            return packed_tensors
        finally:
            self._reading.packed_tensors = None
        return packed_tensors + [
            Saved(entry) for entry in (saved if isinstance(saved, tuple) else (saved,))
        ]


HOOKS: Final = _Hooks()


def packed_objects(roots: Iterable[object]) -> Iterator[Any]:
    """Yield the tensors and graph nodes that the objects of saved-tensor hooks keep."""
    import torch

    pending = [(value, 0) for value in roots]
    looked_at: set[int] = set()
    while pending and len(looked_at) < MAX_PACKED:
        value, depth = pending.pop()
        # not isinstance(value, ...): it reads __class__, which may run a user's code
        if id(value) in looked_at or issubclass(type(value), (ModuleType, type)):
            continue
        looked_at.add(id(value))
        if issubclass(type(value), torch.Tensor):
            tensor = cast("Tensor", value)
            yield tensor
            if tensor.grad_fn is not None:  # in older torch this node saved a checkpoint's inputs
                yield tensor.grad_fn
        elif is_node(value):
            yield value
        elif depth < MAX_DEPTH:
            with suppress(Exception):
                pending += [(part, depth + 1) for part in kept_parts(value)]


def is_node(value: object) -> bool:
    """Return whether an object is a node of an autograd graph."""
    return hasattr(type(value), "next_functions")


def kept_parts(value: object) -> Iterable[object]:
    """Return what an object keeps through its elements, attributes or closure."""
    parts: Iterable[object] = getattr(value, "__dict__", {}).values()
    if isinstance(value, (list, tuple, set)):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, FunctionType):
        parts = (*(value.__closure__ or ()), *(value.__defaults__ or ()))
    elif isinstance(value, MethodType):
        parts = (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
    elif hasattr(type(value), "unpack_hook"):
        # a SavedTensor, in which checkpoints of newer torch keep their inputs
        parts = (getattr(value, "data", None), getattr(value, "unpack_hook", None))
    elif isinstance(value, CellType):
        parts = ()
        with suppress(ValueError):  # an empty cell
            parts = (value.cell_contents,)
    return list(parts)
