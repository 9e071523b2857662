"""Traits of operators, from their schemas: views, new tensors, arguments that are written."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from pytest_gpumem.devices.virtual.operator_functions import OperatorFlags
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
"""module of Triton that torch.utils.flop_counter imports, for a name that no formula needs: the
import takes a quarter of a second"""


def _formulas() -> Mapping[Any, Callable[..., int]]:
    """Return PyTorch's formulas; if their module would import Triton, load a copy without it."""
    log = logging.getLogger(COUNTER)  # hide its warning about missing Triton from users
    before, log.disabled = log.disabled, True
    try:
        has_triton = importlib.util.find_spec("triton") is not None
        if COUNTER in sys.modules or TRITON in sys.modules or not has_triton:
            module = importlib.import_module(COUNTER)
        else:
            spec = importlib.util.find_spec(COUNTER)
            assert spec is not None and spec.loader is not None  # noqa: S101, PT018 - in PyTorch
            module = importlib.util.module_from_spec(spec)
            sys.modules[TRITON] = None  # type: ignore[assignment] # makes its import fail
            try:
                spec.loader.exec_module(module)
            finally:
                del sys.modules[TRITON]
    finally:
        log.disabled = before
    registry: Mapping[Any, Callable[..., int]] = module.flop_registry
    return registry


FORMULAS: Final = _formulas()
"""PyTorch's own formulas for the floating-point operations of an operator"""
COLLECTIVES: Final = {"c10d", "_c10d_functional", "c10d_functional", "symm_mem"}
"""namespaces of collectives: the native library exchanges their known values between ranks"""
UNDECLARED: Final = dict.fromkeys(
    (
        *("native_batch_norm", "cudnn_batch_norm", "batch_norm_update_stats"),
        *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
    ),
    ("running_mean", "running_var"),
)
"""for each operator: arguments that it writes although its schema does not say so"""
DATA_DEPENDENT: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
CARRIED: Final = {"_cudnn_rnn_flatten_weight"}
"""operators that move values only by plain copies, which the native library performs"""
UNWRITTEN: Final = {"record_stream"}
"""operators that write nothing although their schema declares it"""
RETURNS_ARGUMENTS: Final = {"_cudnn_attention_forward"}
"""operators that return arguments unchanged, which their schema does not declare"""
OF_CONSTANTS: Final = {
    *("zeros", "ones", "full", "zeros_like", "ones_like", "full_like"),
    *("new_zeros", "new_ones", "new_full", "arange", "linspace", "eye"),
    *("where", "masked_fill", "triu", "tril"),
}
"""operators that return constants, or masks to add to attention scores: their large floating-point
results are deferred. Large results of other operators depend on weights or activations."""
OVERWRITES: Final = {
    *("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"),
    *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_"),
    "log_normal_",
}
"""in-place operators whose first argument's values do not matter"""
UNREAD: Final = {
    "_cudnn_rnn": ("weight_buf", "dropout_state"),
    "_cudnn_rnn_backward": ("weight_buf", "output", "dropout_state", "reserve"),
    "cudnn_batch_norm_backward": ("reserveSpace",),
    "batch_norm_backward": ("reserve",),
    "_flash_attention_backward": ("unused",),
    "_scaled_dot_product_cudnn_attention_backward": ("cum_seq_q", "cum_seq_k"),
}
"""for each CUDA operator: arguments that its equivalent does not read"""
TRUE_FOR: Final = {"all", "isclose", "isfinite"}
FALSE_FOR: Final = {"any", "isnan", "isinf", "logical_not"}
INDICES: Final = {
    *("argmax", "argmin", "argsort", "kthvalue", "max", "median", "min", "mode", "multinomial"),
    *("nanmedian", "sort", "topk"),
}
"""operators whose results include indices into their first argument"""
UNSCALES: Final = "_amp_foreach_non_finite_check_and_unscale_"
"""GradScaler's operator, which sets its second argument where a gradient is not finite"""
ASSUMED: Final = {*TRUE_FOR, *FALSE_FOR, *INDICES, "sum", "count_nonzero", UNSCALES}
"""operators whose results are assumed at once if their inputs are unknown; all other results stay
unknown until the program branches on them"""
RAISES: Final = {"_linalg_check_errors"}
"""operators that return nothing, but raise errors: the bytes that they read back are queued even if
the host has computed no result"""
COMPARING: Final = {"equal", "allclose"}
"""comparisons whose unknown result is assumed to be true, because most tests expect equality"""
COMPOSED: Final = {"_nested_tensor_from_mask", "_nested_tensor_from_mask_left_aligned"}
"""operators whose CUDA kernel calls other operators, and branches on their results: only these
inner operators are intercepted"""
READS: Final = "_local_scalar_dense"
"""the operator behind ``item()``: it copies a tensor's own bytes to the host"""
READERS: Final = {READS, "is_nonzero"}
"""operators that return the value of a tensor of one element; COPIES has others that read back"""
SORTING: Final = {"sort", "argsort", "topk", "kthvalue", "median", "mode", "_unique2", "unique_dim"}
"""operators that sort their first argument"""
NETWORKS: Final = {"_cudnn_rnn", "_cudnn_rnn_backward"}
"""recurrent operators, whose weights are multiplied with each element of the sequence"""
PRODUCTS: Final = {"mm", "addmm", "bmm", "baddbmm"}
"""operators with at most 2 * (n / 3) ** 1.5 operations for n matrix elements"""
SOLVING: Final = ("linalg", "_linalg", "cholesky", "lu_")
"""prefixes of operators that factorize matrices"""
OPENED: Final = {
    *("_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc"),
    "_nested_from_padded",
}
"""operators that create sparse and nested tensors from plain ones by calling other operators"""
COUNTED: Final = {"mm", "addmm", "addmm_", "_sparse_sparse_matmul", "add", "add_", "sub", "sub_"}
"""operators that query cuSPARSE for the number of nonzeros in a result of two sparse tensors"""
SELECTS: Final = {"index_select"}
"""operators that count the selected elements with their own kernels, and read the count back"""
UNOPENED: Final = ("_foreach", "_fused", "_amp_foreach")
"""prefixes of operators that take many tensors, none of them sparse, so that none is checked"""


class Traits(NamedTuple):
    """An operator's traits, above all which memory it writes."""

    op: OpOverload
    name: str
    """the operator's name without namespace and overload"""
    copies: bool
    """whether it copies bytes from one tensor to another, on the host or on the device, or fills a
    tensor with zeros"""
    allocates: bool
    """whether it returns memory without values"""
    random: bool
    reads_back: bool
    """whether it returns a tensor's bytes to the host"""
    data_dependent: bool
    """whether it reads back memory that it allocated itself, mostly for the size of its results"""
    written: tuple[tuple[int, str], ...]
    """index and name of the arguments that it writes"""
    unread: tuple[tuple[int, str], ...]
    """index and name of the arguments whose values do not matter"""
    tensors: tuple[int, ...]
    """indices of its tensor arguments"""
    takes_numbers: bool
    """whether PyTorch accepts numbers in place of tensors"""
    opened: bool
    """whether the operators that it calls are always intercepted too"""
    in_python: bool
    """whether its kernel is a Python function, which allocates memory only by calling operators"""
    may_open: bool
    """whether the operators that it calls are intercepted if an argument is sparse or nested"""
    carried: bool
    """whether it moves values only by plain copies, which the native library performs"""
    host: Callable[..., Any]
    """function that computes it on the CPU: its equivalent, or the operator itself"""
    formula: Callable[..., Any] | None
    """PyTorch's formula for its floating-point operations; None: PyTorch has none"""
    ways: OperatorFlags
    """flags for the native library, which computes most calls without Python"""


class OperatorCall:
    """One call of an operator, with cached lists of its tensors."""

    __slots__ = ("_inputs", "_unread", "_written", "args", "kwargs", "name", "op", "traits")

    def __init__(self, traits: Traits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.op, self.traits, self.args, self.kwargs = traits.op, traits, args, kwargs
        self.name = traits.name
        self._inputs: list[Tensor] | None = None
        self._written: list[Tensor] | None = None
        self._unread: list[Tensor] | None = None

    def without_arguments(self) -> OperatorCall:
        """Return a call of the same operator without arguments, which keeps no tensor alive."""
        return OperatorCall(self.traits, (), {})

    def inputs(self) -> list[Tensor]:
        """Return all tensors among the arguments."""
        if self._inputs is None:
            self._inputs = tensors_in(self.args)
            if self.kwargs:
                self._inputs += tensors_in([*self.kwargs.values()])
        return self._inputs

    def parts(self) -> list[Tensor]:
        """Return the inputs' strided tensors: of a sparse tensor, its indices and values."""
        return [part for tensor in self.inputs() for part in parts_of(tensor)]

    def written(self) -> list[Tensor]:
        """Return the tensors among the arguments that the operator writes."""
        if self._written is None:
            self._written = self._tensors_at(self.traits.written)
        return self._written

    def unread(self) -> list[Tensor]:
        """Return the tensors among the arguments whose values do not matter."""
        if self._unread is None:
            tensors = self._tensors_at(self.traits.unread)
            if tensors:  # a tensor that is copied to itself, or is also ``out``, is read
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
        """Return the arguments by name; ``share``: the part of unknown masks that is true."""
        arguments = Arguments(self.op._name, self.args, self.kwargs)
        arguments.share = share
        return arguments

    def in_order(self) -> list[Any]:
        """Return all arguments in the order of the schema, including defaults."""
        named = self.by_name()
        return [getattr(named, argument.name) for argument in self.op._schema.arguments]

    def copies_to_host(self) -> bool:
        """Return whether the call copies a CUDA tensor to a host tensor."""
        if self.op is torch.ops.aten.copy_.default:
            return bool(self.args[1].is_cuda and not self.args[0].is_cuda)
        if self.op is torch.ops.aten._to_copy.default:
            device = self.kwargs.get("device")
            return bool(self.args[0].is_cuda and device is not None and device.type == "cpu")
        return False

    def copies_floats_to_host(self) -> bool:
        """Return whether the call copies floats or complex numbers to the host."""
        source = self.args[1 if self.name == "copy_" else 0]
        is_number = source.is_floating_point() or source.is_complex()
        return is_number and self.copies_to_host()

    def copies_bytes_to(self, tensor: Tensor) -> bool:
        """Return whether the call fills a tensor by a plain copy, which the library has made."""
        if self.name not in {"copy_", "_to_copy", "clone"}:
            return False
        source = self.args[1 if self.name == "copy_" else 0]
        return bool(
            source.dtype == tensor.dtype
            and source.size() == tensor.size()  # size(), as a lazy module's parameter has no shape
            and source.stride() == tensor.stride()
            and torch.ops.aten.is_non_overlapping_and_dense.default(source)
        )


class HostCall(NamedTuple):
    """An operator's call to compute on the host."""

    args: Any
    """the operator's arguments as CPU tensors"""
    kwargs: Any
    copies: Sequence[tuple[Tensor, Tensor]] = ()
    """arguments that the operator writes, each with the CPU copy that is written in its place: the
    CUDA operator runs later, and may copy unknown bytes to the argument"""
    assumed: bool = False
    """whether any input is assumed"""
    result: tuple[Any] | None = None
    """the result, in a tuple, if it was computed before the CUDA operator ran; otherwise None"""


def on_host(
    call: OperatorCall,
    host_of: Callable[[Tensor], Tensor],
    generator: Callable[[torch.Generator], torch.Generator],
    *,
    assumed: bool,
) -> HostCall:
    """Return a call to compute on the host, with copies of the tensors that it writes.

    ``host_of`` returns the CPU tensor for a tensor, ``generator`` a CPU generator for a GPU's.
    """
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

    Such kernels are registered by ``torch.library.custom_op`` and ``torch.library.Library.impl``.
    An operator that also has a CPU kernel does not count: its values are computed by that kernel.
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
    of_shape = name.endswith("_like") or name.startswith("new_")  # shaped like the first argument
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
        ways=OperatorFlags(0),
    )
    return traits._replace(ways=_flags_of(traits))


def _flags_of(traits: Traits) -> OperatorFlags:
    """Return the native library's flags for an operator."""
    name, arguments = traits.name, traits.op._schema.arguments
    indexes = traits.op._schema.name in INDEXING
    is_data_dependent = traits.data_dependent and not indexes
    if traits.op.namespace != "aten" or is_data_dependent or traits.opened or traits.carried:
        return OperatorFlags(0)  # for example, an operator of another library may run Python code
    if name in RETURNS_ARGUMENTS:  # the library would mark these arguments as unknown
        return OperatorFlags(0)
    # These flags apply if the memory is known; unknown memory is zeroed by the library's memset or
    # ValueMode._is_filled.
    if name == "zero_":
        return (
            OperatorFlags.SHORT
            | OperatorFlags.COMPUTES
            | OperatorFlags.CHEAP
            | OperatorFlags.CHANGES
        )
    if traits.written and (
        traits.allocates
        or name in ASSUMED
        or any(arguments[place].kwarg_only for place, _ in traits.written)
    ):
        return OperatorFlags(0)
    ways = OperatorFlags.SHORT
    for is_so, way in (
        (name.endswith("_like") or name.startswith(("new_", "empty")), OperatorFlags.LIKE),
        (name in OF_CONSTANTS, OperatorFlags.CONSTANT),
        (traits.copies, OperatorFlags.COPIES),
        (name in ASSUMED, OperatorFlags.ASSUMED),
        (traits.reads_back, OperatorFlags.READS),
        (traits.allocates, OperatorFlags.ALLOCATES),
        (_depends_on_arguments_alone(traits), OperatorFlags.COMPUTES),
        (name in PRODUCTS or counts_elements(traits), OperatorFlags.CHEAP),
        (torch.Tag.pointwise not in traits.op.tags, OperatorFlags.THREADS),
        (indexes, OperatorFlags.INDEXES),
        (name in UNDECLARED, OperatorFlags.RETURNS),
        (name in CHANGES, OperatorFlags.SCATTERS),
    ):
        if is_so:
            ways |= way
    return ways


def counts_elements(traits: Traits) -> bool:
    """Return whether an operator's cost is OF_ELEMENT (budget.py) per element."""
    if traits.formula is not None or traits.random:
        return False
    return traits.name not in SORTING | NETWORKS and not traits.name.startswith(SOLVING)


def _depends_on_arguments_alone(traits: Traits) -> bool:
    """Return whether an operator's results depend on its arguments alone.

    Such an operator either returns new tensors, or writes to its arguments and returns those or
    nothing. Operators in UNDECLARED do both.
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
    # An operator with this kernel accepts lazily negated tensors, such as imaginary parts.
    return not torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "Negative")


def writes_nothing(schema: torch.FunctionSchema) -> bool:
    """Return whether an operator only returns views of its arguments, or no tensors."""
    if schema.name.partition("::")[2] in UNWRITTEN:
        return True
    tensors = [result for result in schema.returns if "Tensor" in str(result.type)]
    are_views = all(result.alias_info is not None for result in tensors)
    aliases = [argument.alias_info for argument in schema.arguments]
    return are_views and not any(alias is not None and alias.is_write for alias in aliases)


def register(
    names: Iterable[str], keys: Sequence[str], kernel_of: Callable[..., Callable[..., Any]]
) -> list[torch.library.Library]:
    """Register a kernel for each operator and dispatch key.

    Args:
        names: the operators' full names.
        keys: the dispatch keys.
        kernel_of: takes an operator's full name, a key and ``passes=``, and returns the kernel.
            ``passes`` means that there is nothing to compute: for views, for operators that consist
            of others (which are intercepted one by one), for collectives.

    Returns:
        the registrations, which last as long as these objects.
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
    """Return whether an in-place operator changes only which values a tensor views."""
    name, _, overload = full_name.partition(".")
    if not name.endswith("_") and not schema.name.startswith("aten::set_"):
        return False  # checked first: reading the tags takes as long as everything else
    tags = torch._C._get_operation_overload(name, overload)[2]
    return torch.Tag.inplace_view in tags and "::resize_" not in name
