"""Matrix products that ``torch.compile`` pads where a GPU is faster so: here none is padded.

PyTorch times a product of odd sizes as it is, and with operands that are padded to whole vectors.
A GPU's answer is not known here. What padding takes is at the upper end of a step's range: what
PyTorch takes to time both, and padded copies beside the operands and the result. A copy of the
result is there as long as the product runs. Copies of a forward pass's operands may be saved for
the backward pass: in the place of an operand that nothing else needs, else beside it, as long as
the operand or the result stays. In a backward pass one kernel may copy for two products: copies are
there from the product before. The kernels that copy are timed as well.

PyTorch asks while it compiles, and compiled code comes from a cache in a later run. So the products
that it asked of are kept with the code of the forward pass, which is compiled next.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from threading import local
from time import time_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import ref

from pytest_gpumem.devices.virtual.compilation.compiled_values import CALLS, COMPILER
from pytest_gpumem.devices.virtual.compilation.kernel_timing import TIMED, flushed, is_shown, timed
from pytest_gpumem.devices.virtual.cublas_workspace import chosen_workspace
from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.devices.virtual.extra_requests import ExtraLog

KEYS: Final = Patch(
    "torch._inductor.fx_passes.pad_mm",
    "should_pad_bench_key",
    reason="Inductor asks of each matrix product whether padding it is faster",
)
ANSWERS: Final = Patch(
    KEYS.module, "get_cached_should_pad", reason="no product is padded: a GPU's answer is not known"
)
COMPILED: Final = Patch(
    COMPILER,
    *("fx_codegen_and_compile", "_compile_fx_inner"),
    reason="the products that a GPU may pad are kept with the code",
)
CODE_CALLS: Final = Patch(
    CALLS.module,
    *CALLS.names,
    reason="a run whose code has products that a GPU may pad has a range of peaks",
)
MULTIPLICATIONS: Final = Patch(
    "torch._inductor.select_algorithm",
    # the last two arguments of each are the operands
    *(f"extern_kernels.{name}" for name in ("mm", "addmm", "bias_addmm", "bmm", "baddbmm")),
    reason="copies that a GPU may pad are there while the product runs",
)
PRODUCTS: Final = "_gpumem_products"
"""the attribute of compiled code with the products that were asked of, as plain data"""
PADDED: Final = "matrix products that torch.compile pads where a GPU is faster so"
NOT_PADDED: Final = (
    "torch.compile pads the operands of a matrix product if a GPU is faster with padding: the "
    "virtual GPU pads none, so the memory of padded copies is not predicted"
)


class Product(NamedTuple):
    """A product that a GPU may pad: of matrices, or of batches of them."""

    sizes: tuple[int | None, ...]
    """rows, inner size and columns, after that of the batch if there is one; None: it varies"""
    likely: tuple[int, ...]
    """the same, with the size that PyTorch times in the place of one that varies"""
    more: tuple[int, int, int]
    """by how much rows, inner size and columns are padded"""
    itemsize: int
    bias: int
    """bytes of what is added; 0: nothing is"""
    padded_before: tuple[bool, bool]
    """whether PyTorch takes each operand to be padded by what computes it: not in the timed call"""
    stay: tuple[bool, bool]
    """whether each operand is needed for more than products: a copy does not take its place"""

    def is_of(self, sizes: tuple[int, ...], itemsize: int) -> bool:
        """Return whether a call is of this product."""
        return (
            itemsize == self.itemsize
            and len(sizes) == len(self.sizes)
            and all(own in {None, size} for own, size in zip(self.sizes, sizes, strict=True))
        )

    def plain(self, sizes: Sequence[int]) -> list[int]:
        """Return the bytes of both operands and of the result."""
        return self._bytes(sizes, (0, 0, 0))

    def padded(self, sizes: Sequence[int]) -> list[int]:
        """Return the bytes of both operands and of the result where these are padded, else 0."""
        rows, inner, columns = self.more
        changed = (rows or inner, inner or columns, rows or columns)
        return [
            size * bool(is_padded)
            for size, is_padded in zip(self._bytes(sizes, self.more), changed, strict=True)
        ]

    def _bytes(self, sizes: Sequence[int], padding: tuple[int, int, int]) -> list[int]:
        *batch, rows, inner, columns = sizes
        rows, inner, columns = rows + padding[0], inner + padding[1], columns + padding[2]
        each = self.itemsize * (batch[0] if batch else 1)
        return [each * rows * inner, each * inner * columns, each * rows * columns]

    def times(self, buffer: int, workspace: int) -> list[int]:
        """Return the requests by which PyTorch times both, as ExtraRequests has them.

        Args:
            buffer: bytes of the one that flushes the GPU's cache.
            workspace: bytes of that of a product.
        """
        first, second, result = self.plain(self.likely)
        left, right, padded_result = self.padded(self.likely)
        earlier: list[int] = []
        called: list[int] = []
        for size, is_before in zip((left, right), self.padded_before, strict=True):
            (earlier if is_before else called).append(size)
        # What is added is made twice, each time as it is.
        held = filter(None, [first, second, self.bias, *earlier, self.bias])
        padded = [*called, padded_result or result, workspace]
        return [*held, *timed([result, workspace], buffer), *timed(padded, buffer)]


@dataclass
class CodeCall:
    """A call of compiled code, in its thread."""

    began: float
    """microseconds since 1970"""
    is_backward: bool
    last_began: float
    """when the product before the next one began"""


class PaddedProducts:
    """Answers Inductor's questions whether padding is faster, and tells what it would take."""

    def __init__(self, extras: ExtraLog) -> None:
        self._extras = extras
        self._asked: dict[Product, None] = {}
        """since code was compiled last"""
        self._products: dict[Product, None] = {}
        """of compiled code that this run has called"""
        self._called: dict[int, ref[Any]] = {}
        """compiled code that this run has called, by its id"""
        self._timed: set[Product] = set()
        """those that this run has called"""
        self._watches = False
        self._calls = local()

    def begin(self) -> None:
        """Forget the products of the last run."""
        self._products.clear()
        self._called.clear()
        self._timed.clear()

    def notes(self) -> list[str]:
        """Return sentences that a reader of the figures has to know about padding."""
        return [NOT_PADDED] * bool(self._products)

    def wrappers(self) -> Iterator[tuple[Patch, Callable[[Any], Any]]]:
        """Yield what is wrapped, and in what."""
        yield KEYS, self._asking
        yield ANSWERS, self._answering
        yield COMPILED, self._keeping
        yield CODE_CALLS, self._telling

    # -- while it compiles --

    def _asking(self, make_key: Any) -> Any:  # noqa: ANN401 - PyTorch's
        """Note a product that PyTorch makes a key of, to ask a cache on the disk first."""

        def key_of(match: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - PyTorch's
            if is_shown() and not options.get("is_base_time_key"):
                product = asked_product(sys.modules[KEYS.module], match, *args)
                self._asked[product] = None
            return make_key(match, *args, **options)

        return key_of

    @staticmethod
    def _answering(look_up: Any) -> Any:  # noqa: ANN401 - PyTorch's
        """Answer that padding is not faster: the cache may have a real GPU's answers.

        Without an answer, PyTorch would make operands of full size next.
        """
        return lambda key: False if is_shown() else look_up(key)

    def _keeping(self, make: Any) -> Any:  # noqa: ANN401 - a function of PyTorch's
        def made(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - PyTorch's
            __tracebackhide__ = True
            compiled = make(*args, **options)
            if self._asked and hasattr(compiled, "current_callable"):
                setattr(compiled, PRODUCTS, tuple(map(tuple, self._asked)))
                self._asked.clear()
            return compiled

        return made

    # -- while it runs --

    def _telling(self, call: Any) -> Any:  # noqa: ANN401 - a method of PyTorch's
        def called(compiled: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - PyTorch's
            __tracebackhide__ = True
            products = getattr(compiled, PRODUCTS, ())
            if products and is_shown():
                self._tell(compiled, [Product(*product) for product in products])
            if not self._products:
                return call(compiled, *args, **options)
            began = time_ns() / 1000
            is_backward = bool((getattr(compiled, "fx_kwargs", None) or {}).get("is_backward"))
            outer = getattr(self._calls, "current", None)
            self._calls.current = CodeCall(began, is_backward, began)
            try:
                return call(compiled, *args, **options)
            finally:
                self._calls.current = outer

        return called

    def _tell(self, compiled: Any, products: Sequence[Product]) -> None:  # noqa: ANN401 - PyTorch's
        """Tell what timing takes, as if this run had compiled the code just now."""
        reference = self._called.get(id(compiled))
        if reference is not None and reference() is compiled:
            return
        self._called[id(compiled)] = ref(compiled)
        self._watch_products()
        buffer, time = flushed(), time_ns() / 1000
        for product in products:
            if product not in self._products:
                self._products[product] = None
                requests = product.times(buffer, chosen_workspace())
                self._extras.add(TIMED, requests, (time, time), counted=False)

    def _watch_products(self) -> None:
        """Put functions around the products that compiled code calls, once."""
        module = sys.modules.get(MULTIPLICATIONS.module)
        if not self._watches and module is not None:
            self._watches = MULTIPLICATIONS.wrap(module, self._multiplying)

    def _multiplying(self, multiply: Any) -> Any:  # noqa: ANN401 - PyTorch's
        def multiplied(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - PyTorch's
            __tracebackhide__ = True
            call = getattr(self._calls, "current", None)
            if call is None or len(args) < 2 or not is_shown():  # noqa: PLR2004 - the operands
                return multiply(*args, **options)
            product, sizes = self._product_of(*args[-2:])
            if product is None:
                return multiply(*args, **options)
            began = time_ns() / 1000
            result = multiply(*args, **options)
            self._add(product, sizes, call, began, (*args[-2:], options.get("out", result)))
            call.last_began = began
            return result

        return multiplied

    def _product_of(self, first: Any, second: Any) -> tuple[Product | None, tuple[int, ...]]:  # noqa: ANN401 - tensors
        sizes = (*first.shape, second.shape[-1])
        for product in tuple(self._products):
            if product.is_of(sizes, first.element_size()):
                return product, sizes
        return None, sizes

    def _add(
        self,
        product: Product,
        sizes: tuple[int, ...],
        call: CodeCall,
        began: float,
        tensors: Sequence[Any],
    ) -> None:
        """Add what padding takes in a call of a product; ``tensors``: the operands, the result."""
        *copies, result_copy = product.padded(sizes)
        sizes_of_copies = [size for size in copies if size]
        ended = time_ns() / 1000
        if product not in self._timed:
            self._timed.add(product)
            self._extras.add(TIMED, [*sizes_of_copies, flushed()], (began, began), counted=False)
        if call.is_backward:
            self._extras.add(PADDED, sizes_of_copies, (call.last_began, ended), counted=True)
            sizes_of_copies = []
        self._extras.add(
            PADDED, filter(None, [*sizes_of_copies, result_copy]), (began, ended), counted=True
        )
        if call.is_backward:
            return
        *operands, result = (tensor.untyped_storage().data_ptr() for tensor in tensors)
        for operand, copy, stays in zip(operands, copies, product.stay, strict=True):
            self._extras.add(
                *(PADDED, [copy], (ended, ended)),
                counted=True,
                beside=(operand, result) if stays else (result,),
                instead=0 if stays else operand,
                since=call.began,
            )


def asked_product(  # noqa: PLR0913, PLR0917 - as PyTorch passes them
    module: Any,  # noqa: ANN401 - PyTorch's
    match: Any,  # noqa: ANN401 - PyTorch's
    first: Any,  # noqa: ANN401 - a tensor
    second: Any,  # noqa: ANN401 - a tensor
    op: object = None,
    bias: Any = None,  # noqa: ANN401 - a tensor, or None
    *_: object,
) -> Product:
    """Return a product of which PyTorch asks whether it is faster with padding."""
    del op
    sizes = (*first.shape, second.shape[-1])
    alignment = module.get_alignment_size(first)
    rows, inner, columns = (module.get_padded_length(size, alignment) for size in sizes[-3:])
    padded_before = [module.should_exclude_padding_time(match, name) for name in ("mat1", "mat2")]
    return Product(
        sizes=tuple(size if isinstance(size, int) else None for size in sizes),
        likely=tuple(map(likely_size, sizes)),
        more=(int(rows), int(inner), int(columns)),
        itemsize=first.element_size(),
        bias=0 if bias is None else likely_size(bias.numel()) * bias.element_size(),
        padded_before=(bool(padded_before[0]), bool(padded_before[1])),
        stay=(is_kept(module, match.kwargs["mat1"]), is_kept(module, match.kwargs["mat2"])),
    )


def is_kept(module: Any, node: Any) -> bool:  # noqa: ANN401 - PyTorch's module, a node of its graph
    """Return whether an operand is needed for more than products, forward and backward.

    The graph has both passes. Inputs of the graph, such as parameters, are not its own to drop.
    """
    from torch._inductor.utils import is_view

    origin = module.get_non_view_def(node)
    if origin.op != "call_function":
        return True
    users = list(origin.users)
    for user in users:  # it grows
        target = user.target
        if getattr(target, "_overloadpacket", None) in product_operators():
            continue
        if getattr(target, "_schema", None) is None or not is_view(target):
            return True
        users += user.users
    return False


def product_operators() -> tuple[object, ...]:
    """Return PyTorch's operators that multiply matrices."""
    import torch

    aten = torch.ops.aten
    return (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)


def likely_size(size: Any) -> int:  # noqa: ANN401 - an int or PyTorch's SymInt
    """Return a size; of one that varies that which it had when it was traced."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if isinstance(hint, int) else 0
