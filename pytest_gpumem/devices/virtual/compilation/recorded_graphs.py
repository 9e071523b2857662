"""Inductor's input graph, as plain data that its caches store with the compiled code.

AOTAutograd creates the graph: a list of operators without in-place changes, except copies to inputs
at the end. Inductor changes its graph while compiling, and does not store it.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

GRAPH: Final = "_gpumem_whole_graph"
"""attribute of compiled code with its graph: bytes, which the caches store with everything else"""
WITHOUT_CONSTANTS: Final = "_gpumem_graph"
"""the attribute for a graph with device constants that were unknown when it was compiled"""
MODULES_OF_FUNCTIONS: Final = {
    "_operator",
    "math",
    "builtins",
    "torch",
    "torch.utils._sympy.functions",
}
"""modules of functions that compute with sizes, or select one of several results"""
MAX_CONSTANT: Final = 64 << 10
"""bytes of the largest constant tensor that is stored"""


class Ref(NamedTuple):
    """A reference to a node among another node's arguments: its index in the graph."""

    place: int


class Form(NamedTuple):
    """Shape, dtype and strides of a tensor that a node returns."""

    shape: tuple[int, ...]
    dtype: Any
    """a ``torch.dtype``"""
    strides: tuple[int, ...] | None = None
    """strides in elements; None in a cache written by an earlier version of this package"""


class RecordedNode(NamedTuple):
    """A node of a graph."""

    kind: str
    """"input", "constant", "operator", "function", "output", or "unknown": not computed"""
    target: Any
    """an operator's full name, a function's module and name, a constant's value, or a description
    of what is unknown, if it is to be reported"""
    args: Any
    kwargs: Any
    forms: Any
    """the :class:`Form` of its result, or a list of them; None if a size is symbolic"""
    on_device: bool
    """whether it depends on a GPU tensor"""
    symbol: str
    """name of the size or number that it reads back; "" if it reads none"""


class UnrecordableError(Exception):
    """Raised for an argument that is not plain data."""


def recorded(graph_module: Any, values_of: Callable[[Any], Any]) -> bytes:
    """Return a serialized graph, which :func:`restored` reads.

    The graph is bytes, because a process without this package may read Inductor's caches.

    Args:
        graph_module: PyTorch's GraphModule.
        values_of: returns a host tensor with the values of a device tensor; None: unknown.
    """
    import torch

    places: dict[Any, int] = {}
    on_device: set[Any] = set()
    nodes = []
    for place, node in enumerate(graph_module.graph.nodes):
        value = node.meta.get("val")
        is_cuda = any(tensor.is_cuda for tensor in _tensors_of_value(value, torch))
        if is_cuda or not on_device.isdisjoint(node.all_input_nodes):
            on_device.add(node)
        kind, target = _target_of(node, graph_module, values_of, torch)
        try:
            args, kwargs = (_plain(part, places, torch) for part in (node.args, node.kwargs))
        except UnrecordableError as error:
            kind, target, args, kwargs = "unknown", str(error), (), {}
        places[node] = place
        forms, symbol = _forms_of(value, torch), _symbol_of(node, value)
        nodes.append(RecordedNode(kind, target, args, kwargs, forms, node in on_device, symbol))
    return pickle.dumps(nodes)


def restored(graph: bytes) -> list[RecordedNode]:
    """Return the nodes of a serialized graph, in order."""
    nodes: list[RecordedNode] = pickle.loads(graph)  # noqa: S301 - from Inductor's cache of code
    return nodes


def _symbol_of(node: Any, value: Any) -> str:
    """Return the name in Inductor's code of what a node reads back; "" if it reads nothing."""
    bindings: Mapping[Any, Any] = node.meta.get("unbacked_bindings") or {}
    for symbol, path in bindings.items():
        with suppress(Exception):  # the symbol may have been renamed
            for key in path:
                value = key.get(value)
            return str(value)
        return str(symbol)
    return ""


def _target_of(
    node: Any, graph_module: Any, values_of: Callable[[Any], Any], torch: ModuleType
) -> tuple[str, Any]:
    """Return a node's kind, and its target as plain data."""
    target = node.target
    if node.op in {"placeholder", "output"}:
        return {"placeholder": "input", "output": "output"}[node.op], ""
    if node.op == "get_attr":
        return _constant(target, graph_module, values_of, torch)
    if isinstance(target, torch._ops.OpOverload):
        return "operator", target.name()
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", str(target))
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "unknown", _name_of_kernel(node) or name
    is_function = node.op == "call_function" and module in MODULES_OF_FUNCTIONS
    return ("function", (module, name)) if is_function else ("unknown", name)


def _constant(
    target: str, graph_module: Any, values_of: Callable[[Any], Any], torch: ModuleType
) -> tuple[str, Any]:
    """Return the kind and the value of a graph's constant tensor."""
    constant: Any = graph_module
    for name in target.split("."):
        constant = getattr(constant, name, None)
    if not isinstance(constant, torch.Tensor):
        return "unknown", ""  # a subgraph
    values = None
    if type(constant) is torch.Tensor and constant.nbytes <= MAX_CONSTANT:
        values = values_of(constant) if constant.is_cuda else constant.detach()
    return ("unknown", "a constant of the code") if values is None else ("constant", values.clone())


def _name_of_kernel(node: Any) -> str:
    """Return the name of the Triton kernel that an operator launches; "" if none or unknown."""
    with suppress(Exception):  # PyTorch's private table, which other versions may lack
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        while not hasattr(kernel, "__name__"):
            kernel = kernel.fn
        return f"the Triton kernel {kernel.__name__}"
    return ""


def _plain(argument: Any, places: Mapping[Any, int], torch: ModuleType) -> Any:
    """Return an argument with references in place of nodes.

    Raises:
        UnrecordableError: it is not plain data.
    """
    if isinstance(argument, torch.fx.Node):
        return Ref(places[argument])
    if isinstance(argument, (list, tuple)):
        items = [_plain(item, places, torch) for item in argument]
        return items if isinstance(argument, list) else tuple(items)
    if isinstance(argument, dict):
        return {name: _plain(item, places, torch) for name, item in argument.items()}
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return slice(*(_plain(part, places, torch) for part in parts))
    plain = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)
    if argument is None or type(argument) in plain or isinstance(argument, torch.memory_format):
        return argument
    raise UnrecordableError(f"an argument of {type(argument).__name__}")


def _tensors_of_value(value: Any, torch: ModuleType) -> Sequence[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value if isinstance(value, (list, tuple)) else ()
    return [item for item in items if isinstance(item, torch.Tensor)]


def _forms_of(value: Any, torch: ModuleType) -> Any:
    """Return the forms of a node's tensors; None if a size is symbolic."""
    forms = []
    for tensor in _tensors_of_value(value, torch):
        if not all(type(size) is int for size in tensor.shape):
            return None
        strides = tuple(tensor.stride()) if tensor.layout is torch.strided else (None,)
        are_known = all(type(stride) is int for stride in strides)
        forms.append(Form(tuple(tensor.shape), tensor.dtype, strides if are_known else None))
    if isinstance(value, torch.Tensor):
        return forms[0]
    return forms if isinstance(value, (list, tuple)) else None
