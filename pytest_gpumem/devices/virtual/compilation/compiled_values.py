"""Values of ``torch.compile``'s code: its graphs are stored, and computed on the host.

Inductor's kernels do not run. What they compute is in Inductor's input graph, which is stored with
the compiled code, also in Inductor's caches. When the code is called, graph_values.py computes the
graph.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.virtual.compilation.recorded_graphs import (
    GRAPH,
    WITHOUT_CONSTANTS,
    recorded,
)
from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

COMPILER: Final = "torch._inductor.compile_fx"
"""PyTorch's module with the functions through which Inductor compiles each graph"""
COMPILES: Final = Patch(
    COMPILER,
    "fx_codegen_and_compile",  # its result is what Inductor's caches store
    reason="a graph is stored with its code, to be computed on the host",
)
LOADS: Final = Patch(
    COMPILER,
    "_compile_fx_inner",  # loads from a cache, or compiles
    reason="code from a cache gets its graph, if a process without this package has cached it",
)
CALLS: Final = Patch(
    "torch._inductor.output_code",
    "CompiledFxGraph.__call__",
    reason="the values of compiled code are computed as it is called",
)
MODE: Final = "pytest_gpumem.devices.virtual.values.mode"
"""the module of ValueMode, which is imported once values are computed"""


def current_mode() -> Any:
    """Return the mode that computes values; None if no values are computed."""
    module = sys.modules.get(MODE)
    return module.ValueMode.current if module is not None else None


def _compile(compiles: Any, graph: Any, *args: Any, **options: Any) -> Any:
    __tracebackhide__ = True
    kept = _recorded(graph)  # before compiling, which changes the graph
    compiled = compiles(graph, *args, **options)
    _keep(compiled, *kept)
    return compiled


def _load(loads: Any, graph: Any, *args: Any, **options: Any) -> Any:
    """Load or compile code; store its graph unless the code already has one with all constants."""
    __tracebackhide__ = True
    compiled = loads(graph, *args, **options)
    if not hasattr(compiled, GRAPH):
        _keep(compiled, *_recorded(graph))
    return compiled


def _recorded(graph: Any) -> tuple[str, bytes]:
    """Return the attribute to store a graph in, and the serialized graph; b"" after an error."""
    attribute = GRAPH

    def values_of(tensor: Any) -> Any:
        """Return the host values of a graph's constant tensor; None if unknown or assumed."""
        nonlocal attribute
        mode = current_mode()
        if mode is None or not mode.values.is_known(tensor) or mode.values.are_assumed([tensor]):
            attribute = WITHOUT_CONSTANTS
            return None
        from pytest_gpumem.devices.virtual.values.host_tensors import over_device_memory

        return over_device_memory(tensor.detach())

    nodes = b""
    with suppress(Exception):  # an unexpected graph: its values stay unknown
        nodes = recorded(graph, values_of)
    return attribute, nodes


def _keep(compiled: Any, attribute: str, graph: bytes) -> None:
    if hasattr(compiled, "current_callable"):  # a graph that computes nothing becomes a function
        with suppress(AttributeError):
            setattr(compiled, attribute, graph)


def _call(call: Any, compiled: Any, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    mode = current_mode()
    if mode is None or kwargs or len(args) != 1:
        return call(compiled, *args, **kwargs)
    from pytest_gpumem.devices.virtual.compilation.graph_values import call_with_values

    return call_with_values(mode, compiled, call, args[0])


WRAPPERS: Final = (
    (COMPILES, wrapped_by(_compile)),
    (LOADS, wrapped_by(_load)),
    (CALLS, wrapped_by(_call)),
)
"""the functions to wrap, with their wrappers"""


# -- constants that Inductor folds while compiling, and reads back from the device --


FOLDING: Final = Patch(
    "torch._inductor.constant_folding",
    "ConstantFolder.run",
    reason="Inductor reads the constants that it folds, so they are computed",
)


def with_constants(computing: Callable[[], AbstractContextManager[None]], run: Any) -> Any:
    """Wrap ``run`` to compute values while it folds constants, even if the test computes none.

    Args:
        computing: returns a context manager in which values are computed.
        run: folds the constants.
    """

    def computed(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = (node.meta.get("val") for node in self.module.graph.nodes)
        devices = (getattr(getattr(value, "device", None), "type", "") for value in values)
        with computing() if "cuda" in devices else nullcontext():
            return run(self, *args, **kwargs)

    return computed
