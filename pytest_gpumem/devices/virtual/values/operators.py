"""Traits of operators, from their schemas: views, new tensors, arguments that are written."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from pytest_gpumem.devices.virtual.operator_functions import Ways
from pytest_gpumem.devices.virtual.values import (  # noqa: F401 - they register equivalents
    attention,
    equivalents,
    normalization,
    recurrent,
)
from pytest_gpumem.devices.virtual.values.data_dependent import INDEXING
from pytest_gpumem.devices.virtual.values.few_nonzeros import CHANGES
from pytest_gpumem.devices.virtual.values.host_tensors import map_arguments, parts_of, tensors_in
from pytest_gpumem.devices.virtual.values.operator_table import COPIES, EQUIVALENTS, Arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from fractions import Fraction

    from torch import Tensor
    from torch._ops import OpOverload


COUNTER: Final = "torch.utils.flop_counter"
TRITON: Final = "triton.runtime.jit"
"""of which that module imports a name, with all of Triton: a quarter of a second, for no formula"""


def _formulas() -> Mapping[Any, Callable[..., int]]:
    """Return PyTorch's formulas, from a copy of their module where that would import Triton."""
    log = logging.getLogger(COUNTER)  # it warns that there is no Triton, and not users
    before, log.disabled = log.disabled, True
    try:
        has_triton = importlib.util.find_spec("triton") is not None
        if COUNTER in sys.modules or TRITON in sys.modules or not has_triton:
            module = importlib.import_module(COUNTER)
        else:
            spec = importlib.util.find_spec(COUNTER)
            assert spec is not None and spec.loader is not None  # noqa: S101, PT018 - PyTorch's own
            module = importlib.util.module_from_spec(spec)
            sys.modules[TRITON] = None  # type: ignore[assignment] # as of what cannot be imported
            try:
                spec.loader.exec_module(module)
            finally:
                del sys.modules[TRITON]
    finally:
        log.disabled = before
    registry: Mapping[Any, Callable[..., int]] = module.flop_registry
    return registry


FORMULAS: Final = _formulas()
"""how many operations an operator is, by PyTorch's own formulas"""
COLLECTIVES: Final = {"c10d", "_c10d_functional", "c10d_functional", "symm_mem"}
"""namespaces of operators that the native library carries out, where anything is known"""
UNDECLARED: Final = dict.fromkeys(
    (
        *("native_batch_norm", "cudnn_batch_norm", "batch_norm_update_stats"),
        *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
    ),
    ("running_mean", "running_var"),
)
"""arguments that an operator writes though its schema does not say so"""
DATA_DEPENDENT: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
CARRIED: Final = {"_cudnn_rnn_flatten_weight"}
"""operators that move values by plain copies, which the native library carries out"""
UNWRITTEN: Final = {"record_stream"}
"""operators that write nothing though their schema says so"""
RETURNS_ARGUMENTS: Final = {"_cudnn_attention_forward"}
"""operators that return arguments as they are, which their schema does not say"""
OF_CONSTANTS: Final = {
    *("zeros", "ones", "full", "zeros_like", "ones_like", "full_like"),
    *("new_zeros", "new_ones", "new_full", "arange", "linspace", "eye"),
    *("where", "masked_fill", "triu", "tril"),
}
"""operators whose large results are noted though they are floating-point numbers: constants, and
masks that are added to scores. Other operators' depend on weights or on activations."""
OVERWRITES: Final = {
    *("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"),
    *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_"),
    "log_normal_",
}
"""operators in place whose first argument's values do not matter"""
UNREAD: Final = {
    "_cudnn_rnn": ("weight_buf", "dropout_state"),
    "_cudnn_rnn_backward": ("weight_buf", "output", "dropout_state", "reserve"),
    "cudnn_batch_norm_backward": ("reserveSpace",),
    "batch_norm_backward": ("reserve",),
    "_flash_attention_backward": ("unused",),
    "_scaled_dot_product_cudnn_attention_backward": ("cum_seq_q", "cum_seq_k"),
}
"""arguments of CUDA's operators that their equivalents do not read"""
TRUE_FOR: Final = {"all", "isclose", "isfinite"}
FALSE_FOR: Final = {"any", "isnan", "isinf", "logical_not"}
INDICES: Final = {
    *("argmax", "argmin", "argsort", "kthvalue", "max", "median", "min", "mode", "multinomial"),
    *("nanmedian", "sort", "topk"),
}
"""operators with indices into their first argument among their results"""
UNSCALES: Final = "_amp_foreach_non_finite_check_and_unscale_"
"""GradScaler's operator, which sets its second argument where a gradient is not finite"""
ASSUMED: Final = {*TRUE_FOR, *FALSE_FOR, *INDICES, "sum", "count_nonzero", UNSCALES}
"""operators with results that are assumed at once, where nothing is known; all other results
are unknown until they decide"""
RAISES: Final = {"_linalg_check_errors"}
"""operators that raise the host's error, and need no result for that"""
COMPARING: Final = {"equal", "allclose"}
"""operators that take large tensors to be equal: that they are is what a test asks, mostly"""
COMPOSED: Final = {"_nested_tensor_from_mask", "_nested_tensor_from_mask_left_aligned"}
"""operators with a CUDA kernel that consists of other operators, and decides by their values"""
READS: Final = "_local_scalar_dense"
"""the operator behind ``item()``: it copies a tensor's own bytes to the host"""
READERS: Final = {READS, "is_nonzero"}
"""operators that return no tensor, but values; others are in COPIES"""
SORTING: Final = {"sort", "argsort", "topk", "kthvalue", "median", "mode", "_unique2", "unique_dim"}
"""operators that sort their first argument"""
NETWORKS: Final = {"_cudnn_rnn", "_cudnn_rnn_backward"}
"""recurrent ones, whose weights are multiplied with each element of the sequence"""
PRODUCTS: Final = {"mm", "addmm", "bmm", "baddbmm"}
"""operators that take 2 * (n / 3) ** 1.5 operations at most for n elements of matrices"""
SOLVING: Final = ("linalg", "_linalg", "cholesky", "lu_")
"""how operators begin that factorise matrices"""
OPENED: Final = {
    *("_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc"),
    "_nested_from_padded",
}
"""operators that make sparse and nested tensors of plain ones, by operators inside of them"""
COUNTED: Final = {"mm", "addmm", "addmm_", "_sparse_sparse_matmul", "add", "add_", "sub", "sub_"}
"""operators that ask cuSPARSE how many nonzeros a result of two sparse tensors has"""
SELECTS: Final = {"index_select"}
"""operators that count their selection by kernels of their own, and read the count"""
UNOPENED: Final = ("_foreach", "_fused", "_amp_foreach")
"""how operators begin that take many tensors, and no sparse ones"""


class Traits(NamedTuple):
    """An operator's traits: above all the memory that it writes."""

    op: OpOverload
    name: str
    """without its namespace and overload"""
    copies: bool
    """it copies bytes from one tensor to another, of the host or of the device"""
    allocates: bool
    """it returns memory with no values in it"""
    random: bool
    reads_back: bool
    """it returns a tensor's bytes to the host"""
    data_dependent: bool
    """it reads memory of its own back, mostly for the size of its results"""
    written: tuple[tuple[int, str], ...]
    """place and name of the arguments that it writes"""
    unread: tuple[tuple[int, str], ...]
    """of the arguments with values that do not matter"""
    tensors: tuple[int, ...]
    """places of the tensors among its arguments"""
    takes_numbers: bool
    """PyTorch takes numbers in their place"""
    opened: bool
    """the operators inside of it are seen, whatever its arguments are"""
    in_python: bool
    """it is opened as a function of Python's: what operators inside read is no memory of its own"""
    may_open: bool
    """they are where an argument is sparse or nested"""
    carried: bool
    """it moves values by plain copies, which the native library carries out"""
    host: Callable[..., Any]
    """computes it on the CPU: its equivalent, or itself"""
    formula: Callable[..., Any] | None
    """PyTorch's, for its floating-point operations"""
    ways: Ways
    """for the native library, which hands most calls to no code of Python's"""


class OperatorCall:
    """One call of an operator, with all that is asked of it more than once."""

    __slots__ = ("_inputs", "_unread", "_written", "args", "kwargs", "name", "op", "traits")

    def __init__(self, traits: Traits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.op, self.traits, self.args, self.kwargs = traits.op, traits, args, kwargs
        self.name = traits.name
        self._inputs: list[Tensor] | None = None
        self._written: list[Tensor] | None = None
        self._unread: list[Tensor] | None = None

    def without_arguments(self) -> OperatorCall:
        """Return a call of the same operator that keeps no tensor alive."""
        return OperatorCall(self.traits, (), {})

    def inputs(self) -> list[Tensor]:
        """Return all tensors among the arguments."""
        if self._inputs is None:
            self._inputs = tensors_in(self.args)
            if self.kwargs:
                self._inputs += tensors_in([*self.kwargs.values()])
        return self._inputs

    def parts(self) -> list[Tensor]:
        """Return the tensors with memory that these consist of."""
        return [part for tensor in self.inputs() for part in parts_of(tensor)]

    def written(self) -> list[Tensor]:
        """Return the tensors among the arguments that the operator writes."""
        if self._written is None:
            self._written = self._tensors_at(self.traits.written)
        return self._written

    def unread(self) -> list[Tensor]:
        """Return the tensors among the arguments with values that do not matter."""
        if self._unread is None:
            tensors = self._tensors_at(self.traits.unread)
            if tensors:  # one that is copied to itself, or is ``out`` as well, is read
                count = Counter(map(id, self.inputs()))
                tensors = [tensor for tensor in tensors if count[id(tensor)] == 1]
            self._unread = tensors
        return self._unread

    def _tensors_at(self, places: Sequence[tuple[int, str]]) -> list[Tensor]:
        if not places:
            return []
        args, kwargs = self.args, self.kwargs
        return tensors_in(
            [args[place] if place < len(args) else kwargs.get(name) for place, name in places]
        )

    def by_name(self, share: float | Fraction | None = None) -> Arguments:
        """Return the arguments by their names; with them the share of a mask that is true."""
        arguments = Arguments(self.op._name, self.args, self.kwargs)
        arguments.share = share
        return arguments

    def in_order(self) -> list[Any]:
        """Return all arguments in the order of the schema, defaults too."""
        named = self.by_name()
        return [getattr(named, argument.name) for argument in self.op._schema.arguments]

    def copies_to_host(self) -> bool:
        """Return whether it copies a CUDA tensor into a tensor of the host."""
        if self.op is torch.ops.aten.copy_.default:
            return bool(self.args[1].is_cuda and not self.args[0].is_cuda)
        if self.op is torch.ops.aten._to_copy.default:
            device = self.kwargs.get("device")
            return bool(self.args[0].is_cuda and device is not None and device.type == "cpu")
        return False

    def copies_floats_to_host(self) -> bool:
        """Return whether it copies real or complex numbers to the host: no sizes, nor masks."""
        source = self.args[1 if self.name == "copy_" else 0]
        is_number = source.is_floating_point() or source.is_complex()
        return is_number and self.copies_to_host()

    def copies_bytes_to(self, tensor: Tensor) -> bool:
        """Return whether it fills a tensor by a plain copy, which the library did."""
        if self.name not in {"copy_", "_to_copy", "clone"}:
            return False
        source = self.args[1 if self.name == "copy_" else 0]
        return bool(
            source.dtype == tensor.dtype
            and source.size() == tensor.size()  # a lazy module's parameter has no shape
            and source.stride() == tensor.stride()
            and torch.ops.aten.is_non_overlapping_and_dense.default(source)
        )


class HostCall(NamedTuple):
    """A call of an operator that is computed on the host."""

    args: Any
    """the operator's arguments as CPU tensors"""
    kwargs: Any
    copies: Sequence[tuple[Tensor, Tensor]] = ()
    """arguments that the operator writes, and the CPU tensors that are written in their place: the
    CUDA operator may yet copy unknown bytes there"""
    assumed: bool = False
    """whether any of its inputs was assumed"""
    result: tuple[Any] | None = None
    """where it had to be computed before the CUDA operator ran"""


def on_host(
    call: OperatorCall,
    host_of: Callable[[Tensor], Tensor],
    generator: Callable[[torch.Generator], torch.Generator],
    *,
    assumed: bool,
) -> HostCall:
    """Return a call with the CPU's tensors that a function gives, and generators of another."""
    written = set(map(id, call.written()))
    copies: dict[int, tuple[Tensor, Tensor]] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in written:
            return host_of(tensor)
        return copies.setdefault(id(tensor), (tensor, host_of(tensor).clone()))[1]

    args = map_arguments(call.args, copied, generator)
    kwargs = map_arguments(call.kwargs, copied, generator) if call.kwargs else {}
    return HostCall(args, kwargs, [*copies.values()], assumed)


def is_in_python(op: OpOverload) -> bool:
    """Return whether the operator's CUDA kernel is a Python function.

    Such are those of ``torch.library.custom_op`` and ``torch.library.Library.impl``, but for
    operators with another kernel for the CPU, which computes their values.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if op.namespace in {"aten", "prims", *COLLECTIVES} or has_kernel(op.name(), "CPU"):
        return False
    registered: set[str] = getattr(torch.library, "_impls", set())
    name = op.name().replace("::", "/")
    return any(f"{name}/{key}" in registered for key in ("CUDA", "CompositeExplicitAutograd"))


@functools.cache
def traits_of(op: OpOverload) -> Traits:
    """Return an operator's traits."""
    schema, tags = op._schema, set(op.tags)
    name = schema.name.partition("::")[2]
    undeclared = UNDECLARED.get(name, ())
    written = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.name in undeclared
        or (argument.alias_info is not None and argument.alias_info.is_write)
    )
    overwrites, in_python = name in OVERWRITES, is_in_python(op)
    data_dependent = (bool(DATA_DEPENDENT & tags) or schema.name in COPIES) and name != READS
    of_shape = name.endswith("_like") or name.startswith("new_")  # of the first argument's
    unread = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.name in UNREAD.get(name, ())
        or (of_shape and not place)
        or ((place, argument.name) in written and (argument.kwarg_only or overwrites))
    )
    traits = Traits(
        op=op,
        name=name,
        copies=name in {"copy_", "_to_copy", "clone", "zero_"},
        allocates=name.startswith(("empty", "new_empty")) or name == "resize_",
        random=torch.Tag.nondeterministic_seeded in tags,
        reads_back=name == READS,
        data_dependent=data_dependent,
        written=written,
        unread=unread,
        tensors=tuple(
            place
            for place, argument in enumerate(schema.arguments)
            if str(argument.type) == "Tensor"
        ),
        takes_numbers=torch._C._should_allow_numbers_as_tensors(name),
        opened=name in OPENED or in_python,
        in_python=in_python,
        may_open=not name.startswith(UNOPENED),
        carried=name in CARRIED,
        host=EQUIVALENTS.get(op._name, op._op),
        formula=FORMULAS.get(op._overloadpacket),
        ways=Ways(0),
    )
    return traits._replace(ways=_ways_of(traits))


def _ways_of(traits: Traits) -> Ways:
    """Return the native library's note on an operator."""
    name, arguments = traits.name, traits.op._schema.arguments
    indexes = traits.op._schema.name in INDEXING
    is_data_dependent = traits.data_dependent and not indexes
    if traits.op.namespace != "aten" or is_data_dependent or traits.opened or traits.carried:
        return Ways(0)  # an operator of another library may run Python's code of its own
    if name in RETURNS_ARGUMENTS:  # the library would make them unknown
        return Ways(0)
    if name == "zero_":  # of unknown memory the library fills it, or Python's code says when
        return Ways.SHORT | Ways.COMPUTES | Ways.CHEAP | Ways.CHANGES
    if traits.written and (
        traits.allocates
        or name in ASSUMED
        or any(arguments[place].kwarg_only for place, _ in traits.written)
    ):
        return Ways(0)
    ways = Ways.SHORT
    for is_so, way in (
        (name.endswith("_like") or name.startswith(("new_", "empty")), Ways.LIKE),
        (name in OF_CONSTANTS, Ways.CONSTANT),
        (traits.copies, Ways.COPIES),
        (name in ASSUMED, Ways.ASSUMED),
        (traits.reads_back, Ways.READS),
        (traits.allocates, Ways.ALLOCATES),
        (_is_of_arguments_alone(traits), Ways.COMPUTES),
        (name in PRODUCTS or counts_elements(traits), Ways.CHEAP),
        (torch.Tag.pointwise not in traits.op.tags, Ways.THREADS),
        (indexes, Ways.INDEXES),
        (name in UNDECLARED, Ways.RETURNS),
        (name in CHANGES, Ways.SCATTERS),
    ):
        if is_so:
            ways |= way
    return ways


def counts_elements(traits: Traits) -> bool:
    """Return whether an operator's cost grows with its elements alone (OF_ELEMENT of budget.py)."""
    if traits.formula is not None or traits.random:
        return False
    return traits.name not in SORTING | NETWORKS and not traits.name.startswith(SOLVING)


def _is_of_arguments_alone(traits: Traits) -> bool:
    """Return whether what an operator returns, or writes, depends on its arguments alone.

    It returns new tensors, or it writes tensors, and returns these or nothing. Those of UNDECLARED
    do both.
    """
    if traits.copies or traits.allocates or traits.random or traits.reads_back:
        return False
    schema, full_name = traits.op._schema, traits.op._name
    if traits.written and traits.name not in UNDECLARED:
        if any(
            returned.alias_info is None or not returned.alias_info.is_write
            for returned in schema.returns
        ):
            return False
    elif {str(returned.type) for returned in schema.returns} != {"Tensor"}:
        return False
    # With such a kernel it takes tensors whose bytes have other signs, as imaginary parts may be.
    return not torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "Negative")


def writes_nothing(schema: torch.FunctionSchema) -> bool:
    """Return whether an operator's results are views of its arguments, or no tensors."""
    if schema.name.partition("::")[2] in UNWRITTEN:
        return True
    tensors = [result for result in schema.returns if "Tensor" in str(result.type)]
    are_views = all(result.alias_info is not None for result in tensors)
    aliases = [argument.alias_info for argument in schema.arguments]
    return are_views and not any(alias is not None and alias.is_write for alias in aliases)


def register(
    names: Iterable[str], keys: Sequence[str], kernel_of: Callable[..., Callable[..., Any]]
) -> list[torch.library.Library]:
    """Give operators a kernel for each of some dispatch keys.

    Args:
        names: the operators' full names.
        keys: the dispatch keys.
        kernel_of: takes an operator's full name, a key and ``passes=``, and returns the kernel.
            ``passes`` says that there is nothing to compute: of views, of operators that consist of
            others (which are seen by themselves), of collectives.

    Returns:
        the registrations: they hold as long as they are kept.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    libraries: dict[str, torch.library.Library] = {}
    for full_name in names:
        namespace, _, operator = full_name.partition("::")
        name, _, overload = operator.partition(".")
        try:
            schema = torch._C._get_schema(f"{namespace}::{name}", overload)
        except RuntimeError:  # an operator without a schema
            continue
        composite = has_kernel(full_name, "CompositeImplicitAutograd")
        composite = (composite and not has_kernel(full_name, "CUDA")) or name in COMPOSED
        passive = writes_nothing(schema) and not (name in READERS or schema.name in COPIES)
        passes = composite or passive or namespace in COLLECTIVES or _moves_views(full_name, schema)
        if namespace not in libraries:
            libraries[namespace] = torch.library.Library(namespace, "IMPL")
        for key in keys:
            libraries[namespace].impl(operator, kernel_of(full_name, key, passes=passes), key)
    return list(libraries.values())


def _moves_views(full_name: str, schema: torch.FunctionSchema) -> bool:
    """Return whether an operator in place changes no values, but which of them a tensor shows."""
    name, _, overload = full_name.partition(".")
    if not name.endswith("_") and not schema.name.startswith("aten::set_"):
        return False  # to ask for tags takes as long as all the rest
    tags = torch._C._get_operation_overload(name, overload)[2]
    return torch.Tag.inplace_view in tags and "::resize_" not in name
