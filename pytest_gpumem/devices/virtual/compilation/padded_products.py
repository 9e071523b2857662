"""Turns off ``torch.compile``'s padding of matrix products, and reports the memory it may take.

PyTorch times a product of odd sizes twice: unpadded, and with operands padded to whole vectors.
Which one is faster on a GPU is not known here. The upper bound of a step's range includes the
memory for padding: what PyTorch allocates to time both, and padded copies besides the operands and
the result. A copy of the result lives as long as the product runs. Copies of a forward pass's
operands may be saved for the backward pass: they live until the result is freed or compiled code
has run the backward pass, whichever comes last. In a backward pass one kernel may copy the operands
of two products: these copies live from the previous product on. The copying kernels are timed as
well.

PyTorch chooses while it compiles, and a later run loads compiled code from a cache. So the products
that it considered are stored with the code that it compiles next, which is the forward pass's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from threading import local
from time import time_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import ref

from pytest_gpumem.devices.virtual.compilation.compiled_code import preceded_by
from pytest_gpumem.devices.virtual.compilation.compiled_values import CALLS, COMPILER
from pytest_gpumem.devices.virtual.compilation.kernel_timing import (
    KERNELS_TIMED,
    add_timed,
    flushed,
    is_shown,
)
from pytest_gpumem.devices.virtual.gpu_choices import chosen_workspace
from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.devices.virtual.gpu_choices import GpuChoices

KEYS: Final = Patch(
    "torch._inductor.fx_passes.pad_mm",
    "should_pad_bench_key",
    reason="Inductor decides for each matrix product whether padding it is faster",
)
ANSWERS: Final = Patch(
    KEYS.module, "get_cached_should_pad", reason="no product is padded: a GPU's answer is not known"
)
COMPILED: Final = Patch(
    COMPILER,
    *("fx_codegen_and_compile", "_compile_fx_inner"),
    reason="the products that a GPU may pad are stored with the code",
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
    reason="padded copies that a GPU may make exist while the product runs",
)
PRODUCTS: Final = "_gpumem_products"
"""attribute of compiled code with the products considered for padding, as plain data"""
PADDED: Final = "matrix products that torch.compile pads where a GPU is faster with padding"
NOT_PADDED: Final = (
    "torch.compile pads the operands of a matrix product if a GPU is faster with padding: the "
    "virtual GPU pads none, so the memory of padded copies is not predicted"
)


class Product(NamedTuple):
    """A matrix product, or a batch of them, that a GPU may pad."""

    sizes: tuple[int | None, ...]
    """rows, inner size and columns, preceded by the batch size if there is one; None: dynamic"""
    likely: tuple[int, ...]
    """``sizes``, with each dynamic size replaced by the one that PyTorch uses for timing"""
    more: tuple[int, int, int]
    """number of rows, inner elements and columns that padding adds"""
    itemsize: int
    bias: int
    """bytes of the added tensor; 0: none"""

    def is_of(self, sizes: tuple[int, ...], itemsize: int) -> bool:
        """Return whether a call with these sizes may compute this product."""
        return (
            itemsize == self.itemsize
            and len(sizes) == len(self.sizes)
            and all(own in {None, size} for own, size in zip(self.sizes, sizes, strict=True))
        )

    def padded(self, sizes: Sequence[int]) -> list[int]:
        """Return the bytes of both operands and of the result; 0 for each that is not padded."""
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

    def timed(self) -> tuple[list[int], list[int]]:
        """Return the bytes of the blocks that exist while PyTorch times the padded product.

        Returns:
            blocks that the call allocates, and blocks that exist during the whole timing.
        """
        first, second, result = self._bytes(self.likely, (0, 0, 0))
        left, right, padded_result = self.padded(self.likely)
        # The added tensor is created twice, unpadded.
        operands = [first, second, self.bias, self.bias]
        return [left, right, padded_result or result, chosen_workspace()], operands


@dataclass
class CodeCall:
    """A call of compiled code that is running on some thread."""

    is_backward: bool
    saves: bool
    """whether it saves tensors for a backward pass"""
    last_began: float
    """start of the previous product that is known, or of the call, in microseconds since 1970"""
    saved: list[range] = field(default_factory=list)
    """ranges of indices in GpuChoices: the padded copies that it may save"""


class PaddedProducts:
    """Makes Inductor never pad, and reports the memory that padding would take."""

    def __init__(self, gpu_choices: GpuChoices) -> None:
        self._gpu_choices = gpu_choices
        self._requested: dict[Product, None] = {}
        """products considered since code was last compiled"""
        self._products: dict[Product, None] = {}
        """products of compiled code that this run has called"""
        self._called: dict[int, ref[Any]] = {}
        """references to compiled code that this run has called, by the code's id"""
        self._timed: set[Product] = set()
        """products that this run has computed, and whose copying kernels have been reported"""
        self._watches = False
        self._calls = local()
        self._saved: list[list[range]] = []
        """``CodeCall.saved`` of each call whose backward pass has not ended"""

    def begin(self) -> None:
        """Reset the products of the last run."""
        self._products.clear()
        self._called.clear()
        self._timed.clear()
        self._saved.clear()

    def notes(self) -> list[str]:
        """Return sentences on padding that a reader of the figures needs."""
        return [NOT_PADDED] * bool(self._products)

    def wrappers(self) -> Iterator[tuple[Patch, Callable[[Any], Any]]]:
        """Yield the functions to wrap, with their wrappers."""
        yield KEYS, preceded_by(self._note_requested)
        # False means "not faster" to PyTorch: its cache may contain a real GPU's results, and
        # without a result PyTorch would allocate operands of full size to time them.
        yield ANSWERS, lambda look_up: lambda key: False if is_shown() else look_up(key)
        yield COMPILED, wrapped_by(self._compile)
        yield CODE_CALLS, wrapped_by(self._call)

    # -- while PyTorch compiles --

    def _note_requested(self, _match: object, *args: Any, **options: Any) -> None:
        """Record a product when PyTorch creates its cache key."""
        if is_shown() and not options.get("is_base_time_key"):
            self._requested[asked_product(sys.modules[KEYS.module], *args)] = None

    def _compile(self, make: Any, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        compiled = make(*args, **options)
        if self._requested and hasattr(compiled, "current_callable"):
            setattr(compiled, PRODUCTS, tuple(map(tuple, self._requested)))
            self._requested.clear()
        return compiled

    # -- while compiled code runs --

    def _call(self, call: Any, compiled: Any, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        products = getattr(compiled, PRODUCTS, ())
        if products and is_shown():
            # Products cached by an earlier version of this package have more fields: use the first.
            fields_of = (product[: len(Product._fields)] for product in products)
            self._report(compiled, [Product(*of_product) for of_product in fields_of])
        if not self._products:
            return call(compiled, *args, **options)
        settings = getattr(compiled, "fx_kwargs", None) or {}
        is_backward = bool(settings.get("is_backward"))
        saves = not is_backward and not settings.get("is_inference")
        outer = getattr(self._calls, "current", None)
        current = self._calls.current = CodeCall(is_backward, saves, time_ns() / 1000)
        try:
            return call(compiled, *args, **options)
        finally:
            self._calls.current = outer
            if saves:
                self._saved.append(current.saved)
            elif is_backward and self._saved:
                for numbers in self._saved.pop():
                    self._gpu_choices.keep_until(numbers, time_ns() / 1000)

    def _report(self, compiled: Any, products: Sequence[Product]) -> None:
        """Report the memory for timing, as if this run had just compiled the code."""
        reference = self._called.get(id(compiled))
        if reference is not None and reference() is compiled:
            return
        self._called[id(compiled)] = ref(compiled)
        module = sys.modules.get(MULTIPLICATIONS.module)
        if not self._watches and module is not None:
            self._watches = MULTIPLICATIONS.wrap(module, wrapped_by(self._multiply))
        for product in products:
            if product not in self._products:
                self._products[product] = None
                called, operands = product.timed()
                add_timed(self._gpu_choices, called, flushed(), operands)

    def _multiply(self, multiply: Any, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        call = getattr(self._calls, "current", None)
        if call is None or len(args) < 2 or not is_shown():  # noqa: PLR2004 - the operands
            return multiply(*args, **options)
        first, second = args[-2:]
        sizes = (*first.shape, second.shape[-1])
        size = first.element_size()
        products = (known for known in tuple(self._products) if known.is_of(sizes, size))
        product = next(products, None)
        began = time_ns() / 1000
        result = multiply(*args, **options)
        if product is None:
            return result
        *copies, result_copy = product.padded(sizes)
        ended = time_ns() / 1000
        if product not in self._timed:
            self._timed.add(product)
            self._gpu_choices.add_blocks(
                KERNELS_TIMED, [*copies, flushed()], (began, began), counted=False
            )
        self._gpu_choices.add_blocks(PADDED, [result_copy], (began, ended))
        out = options.get("out", result)
        kept_with = out.untyped_storage().data_ptr() if call.saves else 0
        start = call.last_began if call.is_backward else began
        numbers = self._gpu_choices.add_blocks(PADDED, copies, (start, ended), kept_with=kept_with)
        call.saved.append(numbers)
        call.last_began = began
        return result


def asked_product(
    module: Any, first: Any, second: Any, op: object = None, bias: Any = None, *_: object
) -> Product:
    """Describe a product of two tensors that PyTorch considers for padding."""
    del op
    sizes = (*first.shape, second.shape[-1])
    alignment = module.get_alignment_size(first)
    rows, inner, columns = (module.get_padded_length(size, alignment) for size in sizes[-3:])
    return Product(
        sizes=tuple(size if isinstance(size, int) else None for size in sizes),
        likely=tuple(map(likely_size, sizes)),
        more=(int(rows), int(inner), int(columns)),
        itemsize=first.element_size(),
        bias=0 if bias is None else likely_size(bias.numel()) * bias.element_size(),
    )


def likely_size(size: Any) -> int:
    """Return a size; for a dynamic one, its value when it was traced."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if isinstance(hint, int) else 0
