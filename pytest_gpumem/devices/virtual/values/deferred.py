"""Large tensors that operators create from known values, computed once something reads them.

Until then such a tensor, for example a mask of a thousand rows and columns, costs only a record of
its operator. The native library knows whether the tensor's memory has been written to since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from pytest_gpumem.devices.virtual.library import CAPACITIES, LIMITS
from pytest_gpumem.devices.virtual.values.few_nonzeros import CHANGES, FewNonzeros, touched_places
from pytest_gpumem.devices.virtual.values.host_tensors import (
    HOST,
    is_plain,
    map_arguments,
    mapped,
    over_device_memory,
    span,
    tensors_in,
)
from pytest_gpumem.devices.virtual.values.operators import OF_CONSTANTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.devices.virtual.library import NativeLibrary
    from pytest_gpumem.devices.virtual.values.known import KnownValues
    from pytest_gpumem.devices.virtual.values.operators import OperatorCall
    from pytest_gpumem.devices.virtual.values.sparse_operators import Compute

MAX_WORK: Final = 1 << 29
"""maximum number of elements in the results of all operators that lead to a tensor: two seconds of
one CPU thread, or eight operators on masks of four texts with 4,096 tokens"""
MAX_STEPS: Final = 32
"""maximum length of the chain of operators that leads to a tensor: in a loop, each iteration adds
an operator"""
MAX_KEPT: Final = 128 << 20
"""maximum bytes of host memory for the arguments of all recipes"""
DECIDING: Final = (torch.bool, torch.int16, torch.int32, torch.int64)
"""dtypes of masks, token ids, edges and labels. Arguments on the host may be large if they have one
of these dtypes; arguments of other dtypes, such as batches of images and weights, are only kept if
they are small."""
ZEROS: Final = {"zeros", "zeros_like", "new_zeros"}
COPYING: Final = {"clone", "_to_copy"}
"""operators that copy a tensor, and are handled like pointwise operators"""


@dataclass(eq=False)
class Recipe:
    """An operator and its arguments, which produce the values of a range of device memory."""

    call: OperatorCall | None
    """the operator's call, stripped of its arguments; None: ``few`` has the values"""
    args: Any
    """arguments on the host; a DeferredPart replaces each large tensor"""
    kwargs: Any
    layout: DeferredPart
    """layout of the operator's result, or of the argument that it changes"""
    changed: Recipe | None
    """recipe of the range's previous values, if the operator changes a part of them; else None"""
    address: int
    nbytes: int
    work: int
    steps: int
    kept: int
    """bytes of host memory that the arguments use"""
    few: FewNonzeros | None = None
    """all nonzero elements of the range; None: ``call`` computes the range"""
    number: int = 0
    """the range's number in the native library, valid until the range is written to"""


@dataclass(frozen=True)
class DeferredPart:
    """A tensor whose memory lies in the range of a recipe."""

    recipe: Recipe | None
    """recipe of the tensor's range; None if the tensor's values do not matter"""
    offset: int
    """bytes from the start of the range"""
    size: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype

    def over(self, storage: Any) -> Tensor:  # noqa: ANN401 - of either of PyTorch's types
        """Return the tensor as a view of a storage with the range's values."""
        host = torch.empty(0, dtype=self.dtype)
        host.set_(storage, self.offset // self.dtype.itemsize, self.size, self.stride)
        return host


class DeferredValues:
    """Records large tensors of known values, and computes them once something reads them."""

    def __init__(
        self,
        library: NativeLibrary,
        values: KnownValues,
        compute: Compute,
        affords_sorting: Callable[[int], bool],
    ) -> None:
        """Start without recipes.

        Args:
            library: the virtual GPU's library.
            values: the known values.
            compute: computes an operator on the host.
            affords_sorting: deducts the cost of sorting this many elements from the budget; False:
                too little is left.
        """
        self._library = library
        self._known = values
        self._compute = compute
        self._affords_sorting = affords_sorting
        self.recipes: dict[int, Recipe] = {}
        """recipes by the number of their range in the native library"""

    def covers(self, tensor: Tensor, least: int = 0) -> bool:
        """Return whether a tensor lies in a deferred range of more than ``least`` bytes."""
        if not self.recipes or not tensor.is_cuda:
            return False
        recipe = self._recipe_at(tensor)
        return recipe is not None and recipe.nbytes > least

    def computed(self, tensor: Tensor) -> bool:
        """Compute the deferred range around a tensor; False if there is none, or that fails."""
        recipe = self._recipe_at(tensor)
        if recipe is None or recipe.nbytes > LIMITS.backed_small:
            return False
        values = self._values_of(recipe)
        if values is None or not self._library.open_deferred(recipe.address, recipe.nbytes):
            self._library.forget(recipe.address, recipe.nbytes)
            return False
        if values.data_ptr() != recipe.address:
            _device_storage(recipe).copy_(values)
        return True

    def add(self, call: OperatorCall, result: Tensor) -> bool:
        """Record how to compute a large result later; return False if it cannot be deferred.

        Args:
            call: call of an operator that has run and returned one tensor.
            result: that tensor: a new one, or an argument that the operator has changed.
        """
        traits = call.traits
        if traits.random or traits.allocates or not is_plain(result) or not result.numel():
            return False
        if result.is_conj() or result.is_neg() or torch.cuda.is_current_stream_capturing():
            return False
        few = self._few_of(call, result)
        if few is not None and self.note_few(result, few):
            return True
        if result.is_floating_point() and not (
            call.name in OF_CONSTANTS
            or (traits.copies and not traits.written)  # such as a mask converted to floats
        ):
            return False
        recipe = self._recipe_of(call, result)
        return recipe is not None and self._note(recipe)

    def note_few(self, tensor: Tensor, few: FewNonzeros) -> bool:
        """Record the nonzero elements of a contiguous tensor; False if host memory is short."""
        if not self._has_room(few.nbytes):
            return False
        layout = DeferredPart(None, 0, tensor.shape, tensor.stride(), tensor.dtype)
        place = tensor.data_ptr(), tensor.nbytes
        return self._note(
            Recipe(
                *(None, (), {}, layout, None, *place),
                work=tensor.numel(),
                steps=1,
                kept=few.nbytes,
                few=few,
            )
        )

    def few_of(self, tensor: Tensor) -> FewNonzeros | None:
        """Return the nonzero elements of a tensor; None: unknown, or too many."""
        recipe = self._recipe_at(tensor, assumed=True)
        if recipe is None or recipe.few is None or not tensor.is_contiguous():
            return None
        is_whole = (tensor.data_ptr(), tensor.nbytes) == (recipe.address, recipe.nbytes)
        return recipe.few if is_whole and tensor.dtype == recipe.layout.dtype else None

    def _note(self, recipe: Recipe) -> bool:
        recipe.number = self._library.defer(recipe.address, recipe.nbytes)
        if not recipe.number:
            return False
        self.recipes[recipe.number] = recipe
        return True

    def _few_of(self, call: OperatorCall, result: Tensor) -> FewNonzeros | None:
        """Return the nonzero elements of an operator's result; None: unknown, or too many."""
        if not result.is_cuda or not result.is_contiguous():
            return None
        name, inputs = call.name, call.inputs()
        if name in ZEROS:
            return FewNonzeros.none(result.dtype)
        if name in CHANGES:
            return self._few_changed(call, result)
        is_pointwise = name in COPYING or torch.Tag.pointwise in call.op.tags
        if not is_pointwise or call.written() or len(inputs) != 1:
            return None
        few = self.few_of(inputs[0]) if inputs[0].shape == result.shape else None

        def computed(values: Tensor) -> Tensor | None:
            args, kwargs = (
                map_arguments(arguments, lambda _: values, lambda generator: generator)
                for arguments in (call.args, call.kwargs)
            )
            host = self._compute(call, args, kwargs)
            return host[0] if host and isinstance(host[0], Tensor) else None

        return few and few.mapped(computed)

    def _few_changed(self, call: OperatorCall, result: Tensor) -> FewNonzeros | None:
        """Return a tensor's nonzeros after an operator has changed a few; None: unknown."""
        target, *rest = call.in_order()
        few = self.few_of(target)
        if few is None:
            return None
        if not all(map(self._is_sure, tensors_in(rest))):
            return None
        args = map_arguments(rest, over_device_memory, lambda generator: generator)
        touched = touched_places(call.name, args, result.shape)
        if touched is None or not self._affords_sorting(touched.numel() + len(few.places)):
            return None
        change = CHANGES[call.name]
        return few.changed(touched, lambda values, at: change(values, at, *args))

    def _is_sure(self, tensor: Tensor) -> bool:
        """Return whether a tensor's values are known, and neither assumed nor deferred."""
        if not is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
            return False
        return self._known.is_known(tensor) and not self._known.are_assumed([tensor])

    def _recipe_of(self, call: OperatorCall, result: Tensor) -> Recipe | None:
        inputs, written = call.inputs(), call.written()
        places = ((tensor, self._source(call, at, tensor)) for at, tensor in enumerate(inputs))
        sources = {id(tensor): source for tensor, source in places if source is not None}
        copied = [tensor for tensor in inputs if id(tensor) not in sources]
        if not all(map(self._can_be_kept, copied)):
            return None
        layout = DeferredPart(None, 0, result.shape, result.stride(), result.dtype)
        address, nbytes = result.data_ptr(), result.nbytes
        target = sources.get(id(written[0])) if written else None
        changed = target.recipe if target is not None else None
        if target is not None and changed is not None:
            layout, address, nbytes = target, changed.address, changed.nbytes
        elif span(result) != nbytes:
            return None  # values of other tensors lie between the result's own
        recipes = [source.recipe for source in sources.values() if source.recipe is not None]
        work = result.numel() + sum(recipe.work for recipe in recipes)
        steps = 1 + max((recipe.steps for recipe in recipes if recipe is not changed), default=0)
        if changed is not None:
            steps = max(steps, changed.steps)  # repeated changes of one range do not form a chain
        kept = sum(tensor.nbytes for tensor in copied)
        largest = max((recipe.nbytes for recipe in recipes), default=nbytes)
        too_much = work > MAX_WORK or max(nbytes, largest) > LIMITS.backed_small
        too_much = too_much or steps > MAX_STEPS
        if too_much or not self._has_room(kept):
            return None

        def lasting(tensor: Tensor) -> object:
            if id(tensor) in sources:
                return sources[id(tensor)]
            return over_device_memory(tensor).clone()

        args, kwargs = (
            map_arguments(arguments, lasting, lambda generator: generator)
            for arguments in (call.args, call.kwargs)
        )
        call = call.without_arguments()
        return Recipe(call, args, kwargs, layout, changed, address, nbytes, work, steps, kept)

    def _recipe_at(self, tensor: Tensor, *, assumed: bool = False) -> Recipe | None:
        """Return the recipe of the deferred range around a tensor; None if there is none.

        Recipes with assumed values count only with ``assumed``.
        """
        nbytes = span(tensor)
        if not nbytes or not is_plain(tensor):
            return None
        recipe = self.recipes.get(self._library.deferred_at(tensor.data_ptr(), nbytes))
        is_assumed = recipe is not None and recipe.few is not None and recipe.few.assumed
        return None if is_assumed and not assumed else recipe

    def _source(self, call: OperatorCall, place: int, tensor: Tensor) -> DeferredPart | None:
        """Return an argument as a part of a deferred range; None if it is not in one.

        The part has no recipe if the operator does not read the argument's values.
        """
        if not tensor.is_cuda or not is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        recipe = self._recipe_at(tensor)
        is_shape = call.name.endswith("_like") or (call.name.startswith("new_") and place == 0)
        is_overwritten = any(tensor is unread for unread in call.unread())
        if is_overwritten and (recipe is None or recipe.nbytes == tensor.nbytes):
            is_shape = True
        size, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
        if is_shape:
            return DeferredPart(None, 0, size, stride, dtype)
        if recipe is None:
            return None
        offset = tensor.data_ptr() - recipe.address
        return (
            None if offset % dtype.itemsize else DeferredPart(recipe, offset, size, stride, dtype)
        )

    def _can_be_kept(self, tensor: Tensor) -> bool:
        """Return whether an argument is small and known, or a host tensor small enough to copy."""
        if not is_plain(tensor):
            return False
        if tensor.is_cuda:
            is_small = span(tensor) <= LIMITS.small
            known = is_small and self._known.is_known(tensor)
            return known and not self._known.are_assumed([tensor])
        return tensor.nbytes <= (MAX_KEPT // 2 if tensor.dtype in DECIDING else LIMITS.small)

    def _has_room(self, kept: int) -> bool:
        """Return whether ``kept`` more bytes can be stored; drop outdated recipes if many exist."""
        total = sum(recipe.kept for recipe in self.recipes.values())
        if len(self.recipes) >= 2 * CAPACITIES.deferred or total + kept > MAX_KEPT:
            self.recipes = {
                number: recipe for number, recipe in self.recipes.items() if self._is_valid(recipe)
            }
            total = sum(recipe.kept for recipe in self.recipes.values())
        return total + kept <= MAX_KEPT

    def _is_valid(self, recipe: Recipe) -> bool:
        return self._library.deferred_at(recipe.address, recipe.nbytes) == recipe.number

    def _values_of(self, recipe: Recipe) -> Any:  # noqa: ANN401 - a storage, which PyTorch has two types for
        """Return a storage with the values of a recipe's range; None if they cannot be computed."""
        changes: list[Recipe] = []
        while recipe.changed is not None and not self._is_computed(recipe):
            changes.append(recipe)
            recipe = recipe.changed
        if self._is_computed(recipe):
            storage = _device_storage(recipe)
            if changes:
                storage = storage.clone()
        elif recipe.few is not None:
            storage = torch.UntypedStorage(recipe.nbytes)
            recipe.few.write_to(recipe.layout.over(storage))
        else:
            result = self._result_of(recipe, None)
            if result is None or result.shape != torch.Size(recipe.layout.size):
                return None
            storage = torch.UntypedStorage(recipe.nbytes)
            recipe.layout.over(storage).copy_(result)
        for change in reversed(changes):
            if self._result_of(change, storage) is None:
                return None
        return storage

    def _result_of(self, recipe: Recipe, changed: Any) -> Tensor | None:  # noqa: ANN401 - a storage
        """Return the result of a recipe's operator on the host; None if it cannot be computed.

        Args:
            recipe: the recipe, whose arguments are computed first.
            changed: the storage that the operator changes; None if it returns a new tensor.
        """
        storages = {id(recipe.changed): changed}

        def filled(argument: object) -> object:
            if not isinstance(argument, DeferredPart):
                return argument
            source = argument.recipe
            if source is None:
                return torch.empty_strided(argument.size, argument.stride, dtype=argument.dtype)
            if id(source) not in storages:
                storages[id(source)] = self._values_of(source)
            storage = storages[id(source)]
            return None if storage is None else argument.over(storage)

        args, kwargs = (mapped(part, filled) for part in (recipe.args, recipe.kwargs))
        if any(storage is None for key, storage in storages.items() if key != id(None)):
            return None
        computed = self._compute(recipe.call, args, kwargs) if recipe.call else None
        return computed[0] if computed and isinstance(computed[0], Tensor) else None

    def _is_computed(self, recipe: Recipe) -> bool:
        is_known = self._library.is_known
        return self._is_valid(recipe) and is_known(recipe.address, recipe.nbytes)


def _device_storage(recipe: Recipe) -> Any:  # noqa: ANN401 - a storage
    return torch._C._construct_storage_from_data_pointer(recipe.address, HOST, recipe.nbytes)
