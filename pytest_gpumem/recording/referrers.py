"""Find what keeps CUDA memory alive: the objects between it and the program's names.

Python's collector lists the references between Python objects, and autograd those in its graphs.
The search follows all references from the tensors up to names: variables of modules, of classes and
of running functions, and fixtures. The result is a :class:`ReferenceGraph`. Nothing here keeps a
tensor alive.
"""

from __future__ import annotations

import gc
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.measurement import Holder
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.recording.graphs import is_node, saved_objects
from pytest_gpumem.recording.plain_tensors import gradient_of, place_of
from pytest_gpumem.recording.program_names import ProgramNames, is_harness
from pytest_gpumem.recording.reference_graph import ReferenceGraph
from pytest_gpumem.recording.ways import shared_words, with_way, words_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import Tensor

    from pytest_gpumem.recording.reference_graph import Group, Key, Name

    BlockKey = tuple[int, int]
    """device and address of a storage"""

MAX_OBJECTS: Final = 200_000
"""number of objects and graph nodes after which the search is cut short; with a time limit the
result would depend on the machine's speed"""
MAX_LEVELS: Final = 100
"""maximum number of objects between a tensor and a name: each level scans all references of the
process"""
FEW: Final = 40
"""number of objects up to which ``gc.get_referrers`` is faster than scanning chunks"""
CHUNK: Final = 500
"""number of objects whose references are scanned together"""
MAX_GROUPS: Final = 50
"""maximum number of groups to build; the largest of these are reported"""
MAX_HOLDERS: Final = 5
NOT_SEARCHED: Final = "objects that were not searched, as there are too many"
UNNAMED: Final = "PyTorch itself: no Python object refers to it"
_GRADIENT: Final = "gradient"
"""first element of a gradient's key: the gradient may not be a Python object, so it has no id"""
_WHOLE: Final = (list, tuple, set, frozenset, deque)


class BlockKeeper(NamedTuple):
    """What keeps a block alive: a name in the program, and the path from there to the block."""

    name: str = ""
    """the program's name of what keeps the block; "" if nothing with a name does"""
    way: tuple[str, ...] = ()
    """words for the objects from that name (or from the outermost object, without a name) to the
    block"""
    holder: str = ""
    """the name, and the start of the path that all blocks of one holder share"""
    others: tuple[str, ...] = ()
    """other holders: the block is freed only if they release it, too"""
    is_of_graph: bool = False
    """whether the autograd graph of one of the holder's tensors keeps the block"""
    sequence: int = -1
    """the sequence number of the node that made that tensor; -1 without a graph"""
    is_gradient: bool = False
    """whether the ``.grad`` of one of the holder's tensors keeps the block"""
    is_parameters: bool = False
    """whether the tensor with this ``.grad`` is a parameter"""


def holders(blocks: Mapping[BlockKey, int]) -> tuple[Holder, ...]:
    """Return the holders of live memory, the one with most bytes first.

    ``blocks`` has the bytes of each block, by device and address.
    """
    with _searched(blocks) as search:
        found = [search.holder(group) for group in search.graph.groups(MAX_GROUPS)]
        found.sort(key=lambda holder: (-holder.nbytes, holder.text))
        # Memory without a name in the program comes last: no name frees it.
        found += search.without_a_name()
    return tuple(found[:MAX_HOLDERS])


def kept_memory(blocks: Mapping[BlockKey, int]) -> dict[BlockKey, BlockKeeper]:
    """Return what keeps each block, by device and address.

    ``blocks`` has the bytes of each block, by device and address.
    """
    with _searched(blocks) as search:
        kept: dict[Any, BlockKeeper] = {}
        for group in search.graph.groups():
            kept.update(search.kept(group))
        return {place: kept.get(place) or search.kept_without_a_name(place) for place in blocks}


@contextmanager
def _searched(blocks: Mapping[BlockKey, int]) -> Iterator[_Search]:
    """Search for what keeps some blocks alive.

    Afterwards the search keeps no object of the program and no reference cycle. What was frozen
    (``gc.freeze``) when the test began is not frozen again: that would freeze the test's own
    garbage, too, which would never be collected.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    gc.unfreeze()  # the collector does not list frozen objects
    search = _Search(blocks)
    try:
        search.run()
        yield search
    finally:
        search.close()
        if was_enabled:
            gc.enable()


class _Search:
    """Searches for what keeps some blocks of memory alive."""

    def __init__(self, blocks: Mapping[BlockKey, int]) -> None:
        self._blocks = blocks
        self._objects: dict[Key, Any] = {}
        """objects that lead to a block, and graph nodes, by id"""
        self._edges: dict[Key, dict[Key, None]] = {}
        """references of tensors and graph nodes, which the collector does not list"""
        self._weak: set[tuple[Key, Key]] = set()
        """references from nodes to inputs and parameters: see ``ReferenceGraph.weak``"""
        self._hooks: set[Any] = set()
        """ids of saved-tensor hooks that were visited"""
        self._roots: dict[int, Any] = {}
        """objects that name others (modules' variables, classes, fixtures), by id"""
        self.is_cut = False
        self._heap = _Heap()
        self._names = ProgramNames()

    def run(self) -> None:
        """Build the graph of everything that leads to the blocks."""
        self._climb([*self._tensors()])
        self._heap.close()
        self.graph = self._made_graph()

    def close(self) -> None:
        """Drop all references."""
        self._heap.close()
        for each in (self._objects, self._roots, self._edges):
            each.clear()

    # -- references that PyTorch knows --

    def _tensors(self) -> list[Tensor]:
        """Return the tensors that lead to a block by their storage, graph or gradient."""
        import torch

        tensors = self._heap.tensors()
        pending: list[Any] = []
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors:
                self._objects[id(tensor)] = tensor
                self._refer(id(tensor), tensor, pending)
            while pending:
                node = pending.pop()
                if len(self._objects) > MAX_OBJECTS + len(tensors):
                    self.is_cut = True
                    break
                self._walk(node, pending)
        above: dict[Key, list[Key]] = {}
        for key, children in self._edges.items():
            for child in children:
                above.setdefault(child, []).append(key)
        leading: set[Key] = {*self._blocks}
        climbing: list[Key] = [*leading]
        while climbing:
            for parent in above.get(climbing.pop(), ()):
                if parent not in leading:
                    leading.add(parent)
                    climbing.append(parent)
        self._edges = {key: each for key, each in self._edges.items() if key in leading}
        found = [tensor for tensor in tensors if id(tensor) in leading]
        self._objects = {key: each for key, each in self._objects.items() if key in leading}
        return found

    def _edge(self, key: Key, child: Key) -> None:
        self._edges.setdefault(key, {})[child] = None

    def _refer(self, key: Key, tensor: Tensor, pending: list[Any]) -> None:
        """Add edges to a tensor's storage, its gradient and the node that made it."""
        import torch

        # Some subclasses' own __torch_function__ raises.
        with torch._C.DisableTorchFunctionSubclass():
            device, node = tensor.device.type, tensor.grad_fn
        if device == VIEW.backend.device_type and (place := place_of(tensor)) in self._blocks:
            self._edge(key, place)
        if node is not None:
            self._edge(key, self._node(node, pending))
        gradient = gradient_of(tensor)
        if gradient is not None:
            of_gradient = (_GRADIENT, id(tensor))
            self._objects[id(tensor)] = tensor  # kept, or Python may reuse its id
            self._edge(key, of_gradient)
            if of_gradient not in self._edges:
                self._edges[of_gradient] = {}
                self._refer(of_gradient, gradient, pending)

    def _node(self, node: Any, pending: list[Any]) -> Key:  # noqa: ANN401 - one of autograd's many types
        if id(node) not in self._objects:
            self._objects[id(node)] = node
            pending.append(node)
        return id(node)

    def _walk(self, node: Any, pending: list[Any]) -> None:  # noqa: ANN401 - one of autograd's many types
        """Add edges from a node to what it saved and to the nodes before it."""
        key = id(node)
        for saved in saved_objects(node, self._hooks):
            if is_node(saved):
                self._edge(key, self._node(saved, pending))
            else:
                self._refer_from_node(key, saved, pending)
        leaf = getattr(node, "variable", None)  # only AccumulateGrad has it
        if leaf is not None:
            self._refer_from_node(key, leaf, pending)
        for successor, _ in node.next_functions:
            if successor is not None:
                self._edge(key, self._node(successor, pending))

    def _refer_from_node(self, key: Key, tensor: Tensor, pending: list[Any]) -> None:
        before = {*self._edges.get(key, ())}
        self._refer(key, tensor, pending)
        if tensor.grad_fn is None:
            self._weak.update(
                (key, child) for child in self._edges.get(key, ()) if child not in before
            )

    # -- references that Python knows --

    def _climb(self, level: list[object]) -> None:
        """Find all objects that refer to those in ``level``, directly or through other objects.

        The search ends at objects that give names, and skips those of pytest and this package.
        """
        passed: set[int] = set()
        for _ in range(MAX_LEVELS):
            if not level:
                return
            above = []
            for referrer in self._heap.referrers(level):
                key = id(referrer)
                if key in self._objects or key in self._roots or key in passed:
                    continue
                if self._names.is_root(referrer):
                    self._roots[key] = referrer
                elif is_harness(referrer):
                    passed.add(key)
                else:
                    self._objects[key] = referrer
                    above.append(referrer)
            level = above
            if len(self._objects) > MAX_OBJECTS:
                break
        self.is_cut = True

    def _made_graph(self) -> ReferenceGraph:
        """Build the graph of what was found."""
        names = self._named()
        below: dict[Key, dict[Key, None]] = {key: {**each} for key, each in self._edges.items()}
        for key, value in self._objects.items():
            children = below.setdefault(key, {})
            for child in gc.get_referents(value):
                if id(child) in self._objects:
                    children[id(child)] = None
        tensors = {
            key for key, value in self._objects.items() if _is_tensor(value) or is_node(value)
        }
        tensors.update(key for key in self._edges if _is_gradient(key))
        whole = {key for key, value in self._objects.items() if _is_whole(value)}
        return ReferenceGraph(below, names, {**self._blocks}, tensors, whole, self._weak)

    def _named(self) -> dict[Key, list[Name]]:
        """Return the names of the objects that were found.

        A root that has a name itself, which is a fixture, is added to these objects.
        """
        names: dict[Key, list[Name]] = {}
        for key, name in self._names.locals.items():
            if key in self._objects:
                names.setdefault(key, []).append(name)
        for root in self._roots.values():
            for key, name in self._names.names_of(root):
                if key == id(root):
                    self._objects[key] = root
                if key in self._objects:
                    names.setdefault(key, []).append(name)
        return names

    # -- in words --

    def holder(self, group: Group) -> Holder:
        """Return a group's holder in words, with its bytes and the other holders of its blocks."""
        tensors = [
            tensor for tensor in map(self._tensor_of, self._paths(group)) if tensor is not None
        ]
        made = [tensor for tensor in tensors if tensor.grad_fn is not None]
        text = self._text(group)
        if made:
            made.sort(key=lambda tensor: -tensor.grad_fn._sequence_nr())
            text += f", with its autograd graph ({made[0].grad_fn.name()})"
        if self.is_cut:
            text += ", as far as was searched"
        return Holder(
            text,
            self.graph.bytes_of(group.blocks),
            len(group.blocks),
            self._others_of(group),
            self.graph.bytes_of(group.shared),
        )

    def kept(self, group: Group) -> dict[Key, BlockKeeper]:
        """Return what keeps each block of a group."""
        text, others = self._text(group), self._others_of(group)
        shared = group.shared
        kept = {}
        for path in self._paths(group):
            tensor = self._tensor_of(path)
            is_of_graph = any(is_node(self._objects.get(key)) for key in path)
            leaf = self._leaf_of(path)
            kept[path[-1]] = BlockKeeper(
                group.name.text,
                words_of(self._python_part(path)),
                text,
                others if path[-1] in shared else (),
                is_of_graph,
                tensor.grad_fn._sequence_nr() if is_of_graph and tensor is not None else -1,
                leaf is not None,
                _is_parameter(leaf),
            )
        return kept

    def kept_without_a_name(self, place: Key) -> BlockKeeper:
        """Return what keeps a block that no name leads to."""
        if self.is_cut:
            return BlockKeeper(name=NOT_SEARCHED)
        leaf = self._leaf_of([key for key, children in self._edges.items() if place in children])
        way = self._words_from_outermost(place, {place})
        return BlockKeeper(way=way, is_gradient=leaf is not None, is_parameters=_is_parameter(leaf))

    def without_a_name(self) -> list[Holder]:
        """Return the holders of the blocks that no name leads to, the one with most bytes first."""
        left = self._blocks.keys() - self.graph.reached(self.graph.names)
        found: dict[str, list[Key]] = {}
        while left:
            outermost = self.graph.outermost_above(min(left))
            blocks = self.graph.reached([outermost]) & left
            words = self._words_from_outermost(min(left), blocks)
            text = f"objects that no variable refers to ({', '.join(words)})" if words else UNNAMED
            found.setdefault(NOT_SEARCHED if self.is_cut else text, []).extend(blocks)
            left -= blocks
        held = [
            Holder(text, self.graph.bytes_of(blocks), len(blocks)) for text, blocks in found.items()
        ]
        return sorted(held, key=lambda holder: (-holder.nbytes, holder.text))

    def _words_from_outermost(self, place: Key, blocks: Collection[Key]) -> tuple[str, ...]:
        """Describe the path to blocks from the object farthest above one of them."""
        paths = self.graph.paths(self.graph.outermost_above(place), blocks)
        return shared_words(words_of(self._python_part(path)) for path in paths)

    def _text(self, group: Group) -> str:
        return with_way(group.name.text, self._words(group))

    def _words(self, group: Group) -> tuple[str, ...]:
        return shared_words(words_of(self._python_part(path)) for path in self._paths(group))

    def _others_of(self, group: Group) -> tuple[str, ...]:
        """Describe a group's other holders, without a name that equals the group's name."""
        return tuple(
            ", ".join(self._words(other)) if other.name == group.name else self._text(other)
            for other in group.others
        )

    def _paths(self, group: Group) -> Iterator[tuple[Key, ...]]:
        """Yield the path from a group's name to each of its blocks."""
        for path in self.graph.paths(group.path[-1], group.blocks):
            yield (*group.path, *path[1:])

    def _python_part(self, path: Sequence[Key]) -> list[Any]:
        """Return the Python objects on a path, up to its autograd nodes or its block."""
        values: list[Any] = []
        for key in path:
            value = self._objects.get(key)
            if value is None or is_node(value):
                break
            values.append(value)
        return values

    def _tensor_of(self, path: Sequence[Key]) -> Any:  # noqa: ANN401 - a tensor
        """Return the last of a path's Python objects if it is a tensor, else None."""
        values = self._python_part(path)
        return values[-1] if values and _is_tensor(values[-1]) else None

    def _leaf_of(self, path: Sequence[Key]) -> Any:  # noqa: ANN401 - a tensor
        """Return the tensor whose gradient keeps a block; None if none does."""
        leaves = [key[1] for key in path if isinstance(key, tuple) and _is_gradient(key)]
        return self._objects.get(leaves[0]) if leaves else None


class _Heap:
    """The objects that Python's collector tracked at the time of construction.

    The search's own objects are made later, and are not among them.
    """

    def __init__(self) -> None:
        objects = gc.get_objects()
        self._keys = {*map(id, objects)}
        # Not a comprehension: its variables would be in this list and refer to it, a cycle.
        self._chunks: list[list[Any]] = []
        for at in range(0, len(objects), CHUNK):
            self._chunks.append(objects[at : at + CHUNK])

    def tensors(self) -> list[Tensor]:
        """Return all tensors, on whichever device."""
        import torch

        # type(), not isinstance: isinstance reads __class__, which makes a lazy object load itself.
        return [
            each for chunk in self._chunks for each in chunk if issubclass(type(each), torch.Tensor)
        ]

    def referrers(self, targets: Sequence[object]) -> list[object]:
        """Return the objects that refer to any of the targets.

        ``gc.get_referrers`` slows down with the number of targets. For many of them, scan chunks of
        the heap: most refer to no target, which one set operation shows.
        """
        if len(targets) <= FEW:
            return [each for each in gc.get_referrers(*targets) if id(each) in self._keys]
        keys = {*map(id, targets)}
        return [
            each
            for chunk in self._chunks
            if not keys.isdisjoint(map(id, gc.get_referents(*chunk)))
            for each in chunk
            if not keys.isdisjoint(map(id, gc.get_referents(each)))
        ]

    def close(self) -> None:
        """Drop all references."""
        self._chunks.clear()


def _is_gradient(key: Key) -> bool:
    return isinstance(key, tuple) and key[0] == _GRADIENT


def _is_tensor(value: object) -> bool:
    import torch

    return issubclass(type(value), torch.Tensor)


def _is_parameter(value: object) -> bool:
    import torch

    return issubclass(type(value), torch.nn.Parameter)


def _is_whole(value: object) -> bool:
    """Return whether an object and its parts count as one holder, as for a list or an optimizer."""
    import torch

    kind = type(value)
    return issubclass(kind, _WHOLE) or (
        kind.__module__.startswith("torch.") and not issubclass(kind, torch.nn.Module)
    )
