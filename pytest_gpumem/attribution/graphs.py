"""Memory that an autograd graph keeps: the tensors that its nodes saved for the backward.

Python's collector does not see them: nodes are C++ objects. Nothing is unpacked on the way, so no
hook of saved tensors runs, nor is anything checkpointed computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

MOST_NODES: Final = 100_000
"""nodes of one graph that are walked over"""


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
        yield from saved_tensors(node)
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if leaf is not None:
            yield leaf
            if leaf.grad is not None:
                yield leaf.grad
        pending.extend(successor for successor, _ in node.next_functions)


def saved_tensors(node: Any) -> Iterator[Tensor]:  # noqa: ANN401 - one of autograd's many types
    """Yield the tensors that a node of a graph has saved for its backward."""
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
            if isinstance(content, torch.Tensor):  # else a hook has packed it
                yield content
