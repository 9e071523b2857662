"""Memory that an autograd graph keeps: the tensors that its nodes saved for the backward.

Python's collector does not see them: nodes are C++ objects. Nothing is unpacked on the way, so no
hook of saved tensors runs, nor is anything checkpointed computed again.

A hook of saved tensors keeps objects of its own in a tensor's place: those of a checkpoint keep, by
its frame, a node that saved the checkpoint's inputs.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from types import CellType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

MOST_NODES: Final = 100_000
"""nodes of one graph that are walked over"""
MOST_PACKED: Final = 500
"""objects that are walked over, of those that one saved tensor's hooks keep"""
DEEPEST: Final = 8
"""steps from a hook to what it keeps"""


def graph_tensors(tensor: Tensor, visited: set[Any]) -> Iterator[Tensor]:
    """Yield the tensors that a tensor keeps by its graph, or as its gradient.

    Args:
        tensor: with a graph or without.
        visited: nodes that are not walked over again; nodes of this graph are added.
    """
    if tensor.is_leaf:
        if tensor.grad is not None:
            yield tensor.grad
        return
    pending: list[Any] = [tensor.grad_fn]
    number = 0
    while pending and number < MOST_NODES:
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
            if leaf.grad is not None:
                yield leaf.grad
        pending.extend(successor for successor, _ in node.next_functions)


def saved_objects(node: Any, visited: set[Any]) -> Iterator[Any]:  # noqa: ANN401 - one of autograd's many types
    """Yield the tensors that a node of a graph has saved, and nodes that hooks keep in their place.

    Args:
        node: of a graph.
        visited: ids of hooks that are not looked at again; those of this node are added.
    """
    import torch

    for name in dir(type(node)):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            saved = getattr(node, name)
        except RuntimeError:  # a backward has freed it
            continue
        for entry in saved if isinstance(saved, (tuple, list)) else (saved,):
            content = getattr(entry, "data", None)
            if isinstance(content, torch.Tensor):
                yield content
                continue
            # A hook has packed it; of one checkpoint all tensors have the same one.
            hook = getattr(entry, "unpack_hook", None)
            yield from packed_objects([content, *[hook] * (id(hook) not in visited)])
            visited.add(id(hook))


def packed_objects(kept: Iterable[object]) -> Iterator[Any]:
    """Yield the tensors and the nodes of graphs that objects of hooks keep."""
    import torch

    pending = [(value, 0) for value in kept]
    looked_at: set[int] = set()
    while pending and len(looked_at) < MOST_PACKED:
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
        elif depth < DEEPEST:
            with suppress(Exception):
                pending += [(part, depth + 1) for part in parts_of(value)]


def is_node(value: object) -> bool:
    """Return whether an object is a node of an autograd graph."""
    return hasattr(type(value), "next_functions")


def parts_of(value: object) -> Iterable[object]:
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
