"""Memory that an autograd graph keeps: the tensors that its nodes saved for the backward.

Python's collector does not see them: nodes are C++ objects. Nothing is unpacked on the way, so no
hook of saved tensors runs, nor is anything checkpointed computed again.

A hook of saved tensors keeps objects of its own in a tensor's place: those of a checkpoint keep, by
its frame, a node that saved the checkpoint's inputs.
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
"""nodes of one graph that are walked over"""
MAX_PACKED: Final = 500
"""objects that are walked over, of those that one saved tensor's hooks keep"""
MAX_DEPTH: Final = 8
"""steps from a hook to the objects that it keeps"""


def graph_tensors(tensor: Tensor, visited: set[Any]) -> Iterator[Tensor]:
    """Yield the tensors that a tensor keeps by its graph, or as its gradient.

    Nodes in ``visited`` are not walked over again; nodes of this graph are added to it.
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
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if leaf is not None:
            yield leaf
            gradient = gradient_of(leaf)
            if gradient is not None:
                yield gradient
        pending.extend(successor for successor, _ in node.next_functions)


def saved_objects(node: Any, visited: set[Any]) -> Iterator[Any]:  # noqa: ANN401 - one of autograd's many types
    """Yield the tensors that a node of a graph has saved, and nodes that hooks keep in their place.

    Hooks with ids in ``visited`` are left out; those of this node are added to it.
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
            # A hook has packed it; of one checkpoint all tensors have the same one.
            hook = getattr(entry, "unpack_hook", None)
            yield from packed_objects([content, *[hook] * (id(hook) not in visited)])
            visited.add(id(hook))
    yield from packed_objects(getattr(node, "__dict__", {}).values())  # of a Function's own ctx


class Saved(NamedTuple):
    """A saved tensor of a node, as a ``SavedTensor`` of torch 2.10 tells it."""

    data: object
    """the tensor, or an object that a hook has packed"""
    unpack_hook: Callable[[Any], Any] | None = None


class _Hooks:
    """Reads the saved tensors of nodes of torch 2.6 to 2.9, which have no attribute for them.

    It asks for the saved tensor, and the hooks of a graph tell the packed object instead of
    unpacking. Hooks that were set before the first measurement of the process unpack.
    """

    def __init__(self) -> None:
        self._reading = threading.local()
        self._is_installed = False
        self._no_tensor: Tensor | None = None

    def install(self) -> None:
        """Let hooks that are set from now on be readable; nothing with newer versions."""
        import torch

        autograd = torch._C._autograd
        if self._is_installed or hasattr(autograd.SavedTensor, "data"):
            return
        self._is_installed = True
        self._no_tensor = torch.empty(0, device="cpu")

        def readable(unpack: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def unpack_or_tell(packed: object) -> object:
                told: list[Saved] | None = getattr(self._reading, "told", None)
                if told is None:
                    return unpack(packed)
                told.append(Saved(packed, unpack))
                return self._no_tensor

            return unpack_or_tell

        PUSHED.wrap(autograd, lambda push: lambda pack, unpack: push(pack, readable(unpack)))

    def saved_by(self, node: Any, name: str) -> list[Saved]:  # noqa: ANN401 - one of autograd's many types
        """Return the tensors that a node has saved under a name."""
        if not self._is_installed:
            return []
        told: list[Saved] = []
        self._reading.told = told
        try:
            # "saved_tensors" is that of a Function of Python, "_saved_tensors" that of stack
            saved = getattr(node, name if hasattr(type(node), name) else name[1:])
        except RuntimeError:  # changed in place since
            return told
        finally:
            self._reading.told = None
        return told + [Saved(entry) for entry in (saved if isinstance(saved, tuple) else (saved,))]


HOOKS: Final = _Hooks()


def packed_objects(roots: Iterable[object]) -> Iterator[Any]:
    """Yield the tensors and the nodes of graphs that objects of hooks keep."""
    import torch

    pending = [(value, 0) for value in roots]
    looked_at: set[int] = set()
    while pending and len(looked_at) < MAX_PACKED:
        value, depth = pending.pop()
        # By the type alone: a user's own objects may do anything where they are asked themselves.
        if id(value) in looked_at or issubclass(type(value), (ModuleType, type)):
            continue
        looked_at.add(id(value))
        if issubclass(type(value), torch.Tensor):
            tensor = cast("Tensor", value)
            yield tensor
            if tensor.grad_fn is not None:  # of older checkpoints: it has saved their inputs
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
    """Return the objects that one keeps by its elements, its attributes or a function's closure."""
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
        # a saved tensor; newer checkpoints keep their inputs so
        parts = (getattr(value, "data", None), getattr(value, "unpack_hook", None))
    elif isinstance(value, CellType):
        parts = ()
        with suppress(ValueError):  # an empty one
            parts = (value.cell_contents,)
    return list(parts)
