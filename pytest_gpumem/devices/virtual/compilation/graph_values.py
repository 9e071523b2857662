"""Computes the values of compiled code by running its graph on the host.

The graph is computed before the code runs, because the code may free its inputs. Afterwards the
results are written to the code's outputs. As outside of compiled code, an operator is computed if
all its inputs are known and the budget allows it.
"""

from __future__ import annotations

import gc
import importlib
import math
import re
import weakref
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from pytest_gpumem.devices.virtual.compilation.recorded_graphs import (
    GRAPH,
    WITHOUT_CONSTANTS,
    Form,
    Ref,
    restored,
)
from pytest_gpumem.devices.virtual.library import LIMITS
from pytest_gpumem.devices.virtual.values.dispatch_keys import KEYS, operator_named
from pytest_gpumem.devices.virtual.values.host_computer import OneThread
from pytest_gpumem.devices.virtual.values.host_tensors import (
    HOST,
    PLAIN,
    is_plain,
    mapped,
    over_device_memory,
    tensors_in,
)
from pytest_gpumem.devices.virtual.values.interception import Interception
from pytest_gpumem.devices.virtual.values.operators import (
    COLLECTIVES,
    DATA_DEPENDENT,
    READS,
    HostCall,
    OperatorCall,
    traits_of,
    writes_nothing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.devices.virtual.compilation.recorded_graphs import RecordedNode
    from pytest_gpumem.devices.virtual.values.mode import ValueMode
    from pytest_gpumem.devices.virtual.values.operators import Traits

PROGRAM: Final = "_gpumem_program"
"""attribute of compiled code that stores its GraphProgram"""
NOT_KEPT: Final = "code from a cache that was written without its graph"
COPY: Final = "aten::copy_"
CHECKS: Final = ("_assert", "sym_constrain_range", "_check")
"""prefixes of operators that check values and return nothing"""
TO_HOST: Final = {"_to_copy", "device_put"}
"""operators that compiled code may use to copy to the host"""
BRANCHES: Final = {"cond", "while_loop"}
"""higher-order operators that read back a number and branch on it"""
AS_STRIDED: Final = "aten::as_strided"
VIEWS: Final = {"aten::view", "aten::_unsafe_view"}
"""operators that reshape a tensor, by name with overload"""
MAX_FORMS: Final = 64
"""maximum number of argument shapes for which an operator's result shapes are cached"""


class _Unknown:
    """Marks a value that is not computed."""


UNKNOWN: Final = _Unknown()


class Node:
    """A node of a graph, with everything about it that is known before it is computed."""

    __slots__ = (
        *("forms", "function", "is_view", "known_forms", "large", "node", "traits"),
        "unused_after",
    )

    def __init__(self, node: RecordedNode) -> None:
        self.node = node
        self.traits: Traits | None = None
        self.function: Callable[..., Any] | None = None
        self.is_view = False
        self.forms: Any = node.forms
        self.known_forms: dict[object, Any] = {}
        self.large = sum(map(_large, node.forms if isinstance(node.forms, list) else [node.forms]))
        """bytes of its large floating-point results"""
        self.unused_after: list[int] = []
        """indices of the nodes whose values no node after this one reads"""
        if node.kind == "function":
            module, name = node.target
            self.function = getattr(importlib.import_module(module), name)
        elif node.kind == "operator":
            traits = traits_of(operator_named(node.target))
            host = RANDOM.get(traits.op._schema.name)
            if host is not None:
                traits = traits._replace(host=host, random=True)
            elif traits.op._name in VIEWS:  # a view may fail if the input lacks the GPU's strides
                traits = traits._replace(host=torch.reshape)
            self.traits = traits
            self.is_view = writes_nothing(traits.op._schema)


class GraphProgram:
    """The graph of compiled code, analyzed to be computed on the host."""

    def __init__(self, nodes: Sequence[RecordedNode], source: str) -> None:
        """Analyze a graph.

        Args:
            nodes: the graph's nodes.
            source: Inductor's code, which reads numbers back in its own order.
        """
        self.nodes = [*map(Node, nodes)]
        self.inputs = [place for place, node in enumerate(nodes) if node.kind == "input"]
        outputs = nodes[-1].args[0] if nodes and nodes[-1].kind == "output" else ()
        self.outputs = [
            output.place if isinstance(output, Ref) else -1
            for output in (outputs if isinstance(outputs, (list, tuple)) else [outputs])
        ]
        self.changed: dict[int, int] = {}
        """for each input that the code writes: index of the node of its last value; -1: unknown"""
        self.roots: dict[int, int] = {place: place for place in self.inputs}
        """for each input, and for each view of one: index of the input"""
        self.is_complete = True
        """whether the graph contains everything that the code writes"""
        self._read()
        last: dict[int, int] = {}
        for place, each in enumerate(self.nodes):
            last |= dict.fromkeys(_refs_in((each.node.args, each.node.kwargs)), place)
        for used in last.keys() - {*self.outputs, *self.changed.values()}:
            self.nodes[last[used]].unused_after.append(used)
        names = re.findall(r"^\s*([a-z]+\d+) = ", source, re.MULTILINE)
        self.order = {symbol: place for place, symbol in reversed([*enumerate(names)])}
        """for each numbered variable of the code: place of its first assignment. The code reads
        sizes and numbers back in this order"""
        self.fruitless: set[tuple[object, ...]] = set()
        """combinations of known inputs and sizes for which no value could be computed"""
        self.unknown: set[str] = set()
        """names of operators that cannot be computed"""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle as None, so that Inductor's caches do not store the program."""
        return type(None), ()

    def _read(self) -> None:
        for place, node in enumerate(self.nodes):
            traits, args = node.traits, node.node.args
            if traits is None:
                continue
            if node.is_view and args and isinstance(args[0], Ref) and args[0].place in self.roots:
                self.roots[place] = self.roots[args[0].place]
            if not traits.written:
                continue
            target = args[0].place if args and isinstance(args[0], Ref) else -1
            if traits.op._schema.name == COPY and target in self.inputs:
                self.changed[target] = args[1].place if isinstance(args[1], Ref) else -1
            else:
                self.is_complete = False


class Read(NamedTuple):
    """Values that the compiled code will read back, with the operator that reads them."""

    operator: str
    arguments: list[Tensor]
    order: int
    """place of the read in the code (``GraphProgram.order``); -1: unknown"""

    @property
    def forms(self) -> list[tuple[torch.dtype, int]]:
        """The dtypes and element counts of the arguments."""
        return [(value.dtype, value.numel()) for value in self.arguments]


def call_with_values(
    mode: ValueMode, compiled: Any, call: Callable[[Any, Any], Any], inputs: Any
) -> Any:
    """Call compiled code, write the values computed from its graph, and return its results.

    Args:
        mode: computes the values.
        compiled: the compiled code.
        call: calls the code with the inputs.
        inputs: the code's inputs.
    """
    __tracebackhide__ = True
    if mode.running_here.compiled is not None or "cuda" not in compiled.device_types:
        return call(compiled, inputs)
    program = _program_of(mode, compiled)
    tensors = (value for value in inputs if isinstance(value, Tensor))
    if (
        program is None
        or not program.is_complete
        or len(inputs) != len(program.inputs)
        or not all(type(tensor) in PLAIN for tensor in tensors)
    ):
        return call(compiled, inputs)
    with _without_collections():
        code = CompiledCall(mode, program, inputs, compiled)
    with code:
        result = call(compiled, inputs)
    with _without_collections():
        code.write(result)
    return result


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable Python's garbage collector: the block's own objects would trigger it too early."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _program_of(mode: ValueMode, compiled: Any) -> GraphProgram | None:
    program: GraphProgram | None = getattr(compiled, PROGRAM, None)
    if program is None:
        graph = getattr(compiled, GRAPH, b"") or getattr(compiled, WITHOUT_CONSTANTS, b"")
        if not graph:
            mode.host.unknown.code.add(NOT_KEPT)
            return None
        with suppress(Exception):  # cached by another version of torch, or of this package
            program = GraphProgram(restored(graph), getattr(compiled, "source_code", ""))
            setattr(compiled, PROGRAM, program)
    return program


class CompiledCall:
    """A call of compiled code that is running."""

    def __init__(
        self, mode: ValueMode, program: GraphProgram, inputs: Sequence[Any], compiled: Any
    ) -> None:
        """Compute the graph; keep no reference to the inputs afterwards."""
        self._mode, self._program = mode, program
        self._reads: list[Read] = []
        self._results: dict[int, Any] = {}
        """values that the code returns or writes to inputs, by node index"""
        self._assumed = False
        """whether any input is assumed"""
        self._extents = [
            (tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
            for tensor in inputs
            if isinstance(tensor, Tensor) and tensor.is_cuda
        ]
        places = dict(zip(program.inputs, inputs, strict=True))
        written = {*program.changed} | {
            program.inputs[index] for index in getattr(compiled, "mutated_input_idxs", ())
        }
        self._written = {
            place: weakref.ref(places[place])
            for place in written
            if isinstance(places[place], Tensor)
        }
        self._returned = {
            place: weakref.ref(places[place])
            for place in program.outputs
            if place not in written and isinstance(places.get(place), Tensor)
        }
        """inputs that the code returns, unchanged or as copies in another layout"""
        self._addresses = {
            place: tensor.untyped_storage().data_ptr()
            for place, tensor in places.items()
            if isinstance(tensor, Tensor) and tensor.is_cuda
        }
        known_inputs = tuple(
            not isinstance(tensor, Tensor) or mode.host.could_be_known(tensor) for tensor in inputs
        )
        sizes = (value for value in inputs if not isinstance(value, Tensor))
        pattern = (mode.host.budget.ended, mode.host.full, *known_inputs, *sizes)
        if pattern in program.fruitless:
            mode.host.unknown.code |= program.unknown
            return
        device = next((t.get_device() for t in inputs if isinstance(t, Tensor) and t.is_cuda), 0)
        with ExitStack() as stack:
            for guard in (
                torch._C._AutoDispatchBelowAutograd(),
                torch._C._DisableAutocast(),
                torch._C._DisableTorchDispatch(),
                torch._C.DisableTorchFunction(),
                torch._C._ExcludeDispatchKeyGuard(KEYS),
                OneThread(mode.host.full),
            ):
                stack.enter_context(guard)
            computation = _Computation(mode, program, places, known_inputs, device)
            computation.run(self._results, self._reads)
            mode.host.budget.lose(computation.lost)
            self._assumed = computation.assumed
        mode.host.unknown.code |= program.unknown
        if not self._results and not self._reads:
            program.fruitless.add(pattern)

    # -- while the code runs --

    def __enter__(self) -> None:
        """Stop tracking which memory kernels write: ``write`` sets their results afterwards."""
        self._mode.count(1)
        Interception.functions.count_opened(1)
        self._mode.running_here.compiled = self._write_reads

    def __exit__(self, *error: object) -> None:
        """Track writes again; after an error, all memory that the code may write is unknown."""
        self._mode.running_here.compiled = None
        Interception.functions.count_opened(-1)
        self._mode.count(-1)
        if error[0] is not None:
            self._forget_written()

    def _write_reads(self, call: OperatorCall) -> bool:
        """Write the values that an inner operator reads back; return False if it reads none."""
        traits = call.traits
        if not (
            traits.reads_back or traits.data_dependent or (traits.copies and call.copies_to_host())
        ):
            return False
        tensors = [tensor for tensor in call.inputs() if tensor.is_cuda]
        if not tensors:
            return False
        forms = [(tensor.dtype, tensor.numel()) for tensor in tensors]
        reads = [read for read in self._reads if (read.operator, read.forms) == (call.name, forms)]
        values = None  # stays None if no read matches, or several in unknown order
        if len(reads) == 1 or (reads and all(read.order >= 0 for read in reads)):
            read = min(reads, key=lambda read: read.order)
            self._reads.remove(read)
            values = read.arguments
        for place, tensor in enumerate(tensors):
            if values is not None:
                self._mode.values.write(tensor, values[place].reshape(tensor.shape))
            elif not any(
                start <= tensor.data_ptr() < start + nbytes for start, nbytes in self._extents
            ):
                self._mode.values.forget(tensor)
        return True

    # -- once the code has run --

    def write(self, result: Any) -> None:
        """Write the values of the tensors that the code has returned or changed.

        Those tensors whose values were not computed become unknown.
        """
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch._C._DisableTorchDispatch(),
            torch._C.DisableTorchFunction(),
            torch._C._ExcludeDispatchKeyGuard(KEYS),
        ):
            self._forget_written()
            for place, written in self._written.items():
                tensor = written()
                if tensor is not None:
                    self._write(self._program.changed.get(place, -1), tensor)
            results = result if isinstance(result, (list, tuple)) else [result]
            for place, real in zip(self._program.outputs, results, strict=False):
                if isinstance(real, Tensor) and not self._shows_input(place, real):
                    self._write(self._program.changed.get(place, place), real)

    def _write(self, place: int, tensor: Tensor) -> None:
        values = self._mode.values
        value = self._results.get(place)
        if value is None:
            value = self._copied_input(place)
        is_device = tensor.is_cuda
        if not is_device and (place < 0 or not self._program.nodes[place].node.on_device):
            return  # CPU code has computed it
        if (
            isinstance(value, Tensor)
            and is_plain(tensor)
            and (value.shape, value.dtype) == (tensor.shape, tensor.dtype)
        ):
            values.write(tensor, value, assumed=self._assumed)
        elif is_device:
            values.forget(tensor)

    def _copied_input(self, place: int) -> Tensor | None:
        """Return the value of an input that the code returned; None if unknown or not an input."""
        returned = self._returned.get(place)
        tensor = returned() if returned is not None else None
        mode = self._mode
        if tensor is None or not (tensor.is_cuda and is_plain(tensor) and mode.host.reads(tensor)):
            return None
        self._assumed = self._assumed or mode.values.are_assumed([tensor])
        return over_device_memory(tensor)

    def _shows_input(self, place: int, real: Tensor) -> bool:
        """Return whether a result is a view of an input that the code does not change."""
        root = self._program.roots.get(place)
        return (
            root is not None
            and root not in self._written
            and self._addresses.get(root) == real.untyped_storage().data_ptr()
        )

    def _forget_written(self) -> None:
        for written in self._written.values():
            tensor = written()
            if tensor is not None and tensor.is_cuda:
                self._mode.values.forget(tensor)


class _Computation:
    """One computation of the graph on the host."""

    def __init__(
        self,
        mode: ValueMode,
        program: GraphProgram,
        inputs: dict[int, Any],
        known_inputs: Sequence[bool],
        device: int,
    ) -> None:
        self._mode, self._program, self._inputs, self._device = mode, program, inputs, device
        self._known = dict(zip(program.inputs, known_inputs, strict=True))
        self._values: dict[int, Any] = {}
        self.assumed = False
        """whether any input is assumed"""
        self.lost = 0
        """bytes of large floating-point results that are unknown"""
        self._borrowed: set[int] = set()
        """addresses of the input storages that were read"""

    def run(self, results: dict[int, Any], reads: list[Read]) -> None:
        """Compute all nodes.

        Args:
            results: receives the values that the code returns or writes.
            reads: receives the values that the code reads back.
        """
        program, values = self._program, self._values
        for place, node in enumerate(program.nodes):
            recorded = node.node
            if recorded.kind == "output":
                break
            self._note_read(node, reads)
            values[place] = self._value_of(node)
            if values[place] is UNKNOWN and not node.is_view:
                self.lost += node.large
            for unused in node.unused_after:
                values.pop(unused, None)
        for place in {*program.outputs, *program.changed.values()}:
            value = values.get(place, UNKNOWN)
            if place >= 0 and value is not UNKNOWN and place not in program.inputs:
                results[place] = self._copied_if_shared(value)
            elif place in program.inputs and place in program.changed.values():
                value = self._input_value(place)
                if value is not UNKNOWN:
                    results[place] = self._copied_if_shared(value)

    def _copied_if_shared(self, value: Any) -> Any:
        """Return a value, copied if it shares memory with an input, which the code may free."""
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self._borrowed:
            return value.clone()
        return value

    def _note_read(self, node: Node, reads: list[Read]) -> None:
        """Record the values that the code will read back from the device to run a node."""
        recorded = node.node
        if node.traits is not None:
            tensors = (recorded.args, recorded.kwargs)
            operator = node.traits.name
            if operator in TO_HOST and HOST in [*recorded.args, *recorded.kwargs.values()]:
                operator = "copy_"
            elif not (node.traits.reads_back or DATA_DEPENDENT & {*node.traits.op.tags}):
                return
        elif recorded.kind == "unknown" and recorded.target in BRANCHES:
            operator, tensors = READS, recorded.args[:1]
        else:
            return
        places = [place for place in _refs_in(tensors) if self._program.nodes[place].node.on_device]
        if not places:
            return
        values = [self._resolved(Ref(place)) for place in places]
        if all(isinstance(value, Tensor) for value in values):
            order = self._program.order.get(recorded.symbol, -1)
            reads.append(Read(operator, [*map(self._copied_if_shared, values)], order))

    def _value_of(self, node: Node) -> Any:
        recorded, traits = node.node, node.traits
        if recorded.kind not in {"operator", "function"}:
            if recorded.kind == "unknown" and recorded.target:
                self._program.unknown.add(recorded.target)
            return {"unknown": UNKNOWN, "constant": recorded.target}.get(recorded.kind)
        refs = _refs_in((recorded.args, recorded.kwargs))
        if traits is not None and traits.op._schema.name == COPY and refs[0] in self._inputs:
            target, source = self._inputs[refs[0]], self._resolved(recorded.args[1])
            is_known = isinstance(source, Tensor)
            return source.to(target.dtype).expand(target.shape) if is_known else UNKNOWN
        if traits is not None and traits.name.startswith(CHECKS):
            return None
        args, kwargs = (mapped(part, self._resolved) for part in (recorded.args, recorded.kwargs))
        result: Any = UNKNOWN
        if any(self._resolved(Ref(ref)) is UNKNOWN for ref in refs):
            pass
        elif traits is not None:
            result = self._computed(node, traits, args, kwargs)
        elif node.function is not None:
            with suppress(Exception):  # the size may be unknown
                result = node.function(*args, **kwargs)
        return result

    def _computed(self, node: Node, traits: Traits, args: Any, kwargs: Any) -> Any:
        """Return an operator's result.

        It is UNKNOWN if its cost exceeds the budget, or if the host cannot compute it.
        """
        mode = self._mode
        if traits.op.namespace in COLLECTIVES:
            self._program.unknown.add(traits.name)
            return UNKNOWN
        if traits.random:
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        call = OperatorCall(traits, args, kwargs)
        if not (node.is_view or self._affords(node, call)):
            return UNKNOWN
        result = None
        if traits.op._schema.name != AS_STRIDED or self._lies_as_on_a_gpu(node):
            result = mode.host.compute(call, HostCall(args, kwargs), self._device)
        if result is None:
            self._program.unknown.add(traits.name)
            return UNKNOWN
        return result[0] if node.is_view else _laid_out(result[0], node.forms)

    def _affords(self, node: Node, call: OperatorCall) -> bool:
        """Return whether an operator's cost is within the budget, and the host has memory."""
        mode, inputs = self._mode, call.inputs()
        like = self._like_results(node, call)
        outputs = tensors_in(like)
        if not all(map(mode.host.fits, outputs)):
            return False
        nbytes = sum(tensor.nbytes for tensor in inputs)
        return mode.host.budget.affords(call, inputs, outputs, like, nbytes)

    def _lies_as_on_a_gpu(self, node: Node) -> bool:
        """Return whether the strides of the tensor that ``as_strided`` views are known."""
        (source, *_) = _refs_in(node.node.args)
        while self._program.nodes[source].is_view:
            (source, *_) = _refs_in(self._program.nodes[source].node.args)
        forms = self._program.nodes[source].forms
        return source in self._inputs or (isinstance(forms, Form) and forms.strides is not None)

    def _like_results(self, node: Node, call: OperatorCall) -> Any:
        """Return meta tensors shaped like an operator's results; None if a shape is unknown."""
        if node.forms is not None:
            return mapped(
                node.forms, lambda form: torch.empty(form.shape, dtype=form.dtype, device="meta")
            )
        key = repr(
            mapped(
                (call.args, call.kwargs),
                lambda given: (given.shape, given.dtype) if isinstance(given, Tensor) else given,
            )
        )
        if key not in node.known_forms:
            if len(node.known_forms) >= MAX_FORMS:
                node.known_forms.clear()
            like = None
            with suppress(Exception):  # the size may depend on values
                like = call.op._op(*mapped(call.args, _on_meta), **mapped(call.kwargs, _on_meta))
            node.known_forms[key] = like
        return node.known_forms[key]

    def _resolved(self, argument: Any) -> Any:
        """Return the value of an argument; it may be UNKNOWN."""
        if isinstance(argument, Ref):
            if argument.place in self._known:
                return self._input_value(argument.place)
            return self._values[argument.place]
        if isinstance(argument, torch.device):
            return HOST
        return argument

    def _input_value(self, place: int) -> Any:
        if self._values.get(place) is None:
            self._values[place] = self._input_read(place)
        return self._values[place]

    def _input_read(self, place: int) -> Any:
        tensor = self._inputs[place]
        if not isinstance(tensor, Tensor):
            return tensor
        if not self._known[place] or not is_plain(tensor):
            return UNKNOWN
        if not tensor.is_cuda:
            return tensor
        mode = self._mode
        if not mode.host.reads(tensor):
            return UNKNOWN
        self.assumed = self.assumed or mode.values.are_assumed([tensor])
        host = over_device_memory(tensor)
        self._borrowed.add(host.untyped_storage().data_ptr())
        return host


def _large(form: Any) -> int:
    """Return the bytes of a large floating-point tensor; 0 for other tensors."""
    if not isinstance(form, Form) or not form.dtype.is_floating_point:
        return 0
    nbytes: int = math.prod(form.shape) * form.dtype.itemsize
    return nbytes if nbytes > LIMITS.small else 0


def _laid_out(value: Any, form: Any) -> Any:
    """Return results with the strides that they have on the GPU: views depend on strides."""
    if isinstance(value, (list, tuple)):
        if not isinstance(form, (list, tuple)) or len(form) != len(value):
            return value
        return [*map(_laid_out, value, form)]
    if (
        not isinstance(value, Tensor)
        or not isinstance(form, Form)
        or form.strides is None
        or value.shape != form.shape
        or all(
            size < 2 or there == here  # noqa: PLR2004 - the stride does not matter
            for size, there, here in zip(form.shape, form.strides, value.stride(), strict=True)
        )
    ):
        return value
    laid_out = torch.empty_strided(form.shape, form.strides, dtype=value.dtype, device=HOST)
    return laid_out.copy_(value)


def _refs_in(arguments: object) -> list[int]:
    """Return the indices of the nodes among arguments."""
    if isinstance(arguments, Ref):
        return [arguments.place]
    if isinstance(arguments, dict):
        return _refs_in([*arguments.values()])
    if isinstance(arguments, (list, tuple)):
        return [place for argument in arguments for place in _refs_in(argument)]
    if isinstance(arguments, slice):
        return _refs_in([arguments.start, arguments.stop, arguments.step])
    return []


def _on_meta(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        shape, strides = argument.shape, argument.stride()
        return torch.empty_strided(shape, strides, dtype=argument.dtype, device="meta")
    return torch.device("meta") if isinstance(argument, torch.device) else argument


# -- random numbers: not the GPU's, but repeatable for the same seed --


RANDOM: Final[dict[str, Callable[..., Any]]] = {
    "prims::inductor_random": lambda size, seed, kind, **_: getattr(torch, kind)(
        size, generator=torch.Generator().manual_seed(int(seed)), dtype=torch.float32
    ),
    "prims::inductor_randint": lambda low, high, size, seed: torch.randint(
        low, high, size, generator=torch.Generator().manual_seed(int(seed))
    ),
    "prims::inductor_lookup_seed": lambda seeds, index: seeds[index].clone(),  # torch 2.6: a view
}
"""Inductor's own random operators, as computed on the host"""
