"""What keeps live CUDA memory: the objects between it and the names of the program.

Python's collector knows the references between objects, autograd those of its graphs. The search
climbs from the tensors by all references to the names: variables of modules, of classes and of
functions that run, and fixtures. What it has climbed is a :class:`ReferenceGraph`, which tells who
keeps what. Nothing here keeps a tensor alive.
"""

from __future__ import annotations

import gc
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.measurement import Holder
from pytest_gpumem.recording.graphs import is_node, saved_objects
from pytest_gpumem.recording.plain_tensors import gradient_of, place_of
from pytest_gpumem.recording.program_names import ProgramNames, is_harness
from pytest_gpumem.recording.reference_graph import ReferenceGraph
from pytest_gpumem.recording.ways import shared_words, with_way, words_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from pytest_gpumem.recording.reference_graph import Group, Key, Name

    Place = tuple[int, int]
    """device and address of a storage"""

MAX_OBJECTS: Final = 200_000
"""objects that lead to the blocks, and nodes of graphs, until the search is given up. A number and
not a time, so that the answer does not depend on the machine's speed"""
MAX_LEVELS: Final = 100
"""objects between a tensor and a name; for each the references of all the process are looked at"""
FEW: Final = 40
"""objects whose referrers the collector's own search finds faster"""
CHUNK: Final = 500
"""objects of which the references are looked at together"""
MAX_GROUPS: Final = 50
"""groups of blocks of one holder that are told apart, to find the largest"""
MAX_HOLDERS: Final = 5
"""holders that are reported"""
NOT_SEARCHED: Final = "objects that were not searched, as there are too many"
UNNAMED: Final = "PyTorch itself: no object of Python's refers to it"
_GRADIENT: Final = "gradient"
"""begins the key of a tensor's gradient, which need not be an object of Python's"""
_WHOLE: Final = (list, tuple, set, frozenset, deque)


class Kept(NamedTuple):
    """What keeps a block."""

    name: str = ""
    """the program's name for what keeps the block; "" where nothing with a name does"""
    way: tuple[str, ...] = ()
    """the objects from that name to the block, in words"""
    holder: str = ""
    """the name, and the beginning of the way that all blocks of one holder share"""
    others: tuple[str, ...] = ()
    """what keeps the block as well, so that it is freed only if these let go too"""
    is_of_graph: bool = False
    """whether the graph of a tensor keeps it, which the holder has"""
    sequence: int = -1
    """the number of the node that made that tensor"""
    is_gradient: bool = False
    """whether it is the ``.grad`` of a tensor, which the holder has"""
    is_parameters: bool = False
    """whether that tensor is a parameter"""


def holders(blocks: Mapping[Place, int]) -> tuple[Holder, ...]:
    """Return the holders of live memory, by the bytes that they keep, most first.

    ``blocks`` has the bytes of each block, by device and address.
    """
    with _searched(blocks) as search:
        found = [search.holder(group) for group in search.graph.groups(MAX_GROUPS)]
        found.sort(key=lambda holder: (-holder.nbytes, holder.text))
        # What nothing of the program's refers to comes last: letting go of a name frees none of it.
        found += search.without_a_name()
    return tuple(found[:MAX_HOLDERS])


def kept_memory(blocks: Mapping[Place, int]) -> dict[Place, Kept]:
    """Return what keeps each block, by device and address.

    ``blocks`` has the bytes of each block, by device and address.
    """
    with _searched(blocks) as search:
        kept: dict[Any, Kept] = {}
        for group in search.graph.groups():
            kept.update(search.kept(group))
        return {place: kept.get(place) or search.kept_without_a_name(place) for place in blocks}


@contextmanager
def _searched(blocks: Mapping[Place, int]) -> Iterator[_Search]:
    """Search for what keeps some blocks.

    Nothing of it stays: no object of the program's, and no reference cycle. Objects that were
    frozen when the test began are not frozen again: the test's own garbage would be among them, and
    never be collected.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    gc.unfreeze()  # the collector tells nothing of frozen objects
    search = _Search(blocks)
    try:
        search.run()
        yield search
    finally:
        search.close()
        if was_enabled:
            gc.enable()


class _Search:
    """The search for what keeps some blocks."""

    def __init__(self, blocks: Mapping[Place, int]) -> None:
        self._blocks = blocks
        self._objects: dict[Key, Any] = {}
        """those that lead to a block, and nodes of graphs, by id"""
        self._edges: dict[Key, dict[Key, None]] = {}
        """what tensors and nodes of graphs refer to, which the collector does not know"""
        self._weak: set[tuple[Key, Key]] = set()
        """edges from nodes to inputs and parameters: see ``ReferenceGraph.weak``"""
        self._hooks: set[Any] = set()
        """ids of hooks of saved tensors that were looked at"""
        self._roots: dict[int, Any] = {}
        """objects that give names"""
        self.is_cut = False
        self._heap = _Heap()
        self._names = ProgramNames()

    def run(self) -> None:
        """Make the graph of all that leads to the blocks."""
        self._climb([*self._tensors()])
        self._heap.close()
        self.graph = self._made_graph()

    def close(self) -> None:
        """Let go of all objects."""
        self._heap.close()
        for each in (self._objects, self._roots, self._edges):
            each.clear()

    # -- references of PyTorch's --

    def _tensors(self) -> list[Tensor]:
        """Return the tensors that lead to a block, by their storage, graph or gradient."""
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
        """Note a tensor's storage, its gradient and the node that made it."""
        if tensor.is_cuda and (place := place_of(tensor)) in self._blocks:
            self._edge(key, place)
        if tensor.grad_fn is not None:
            self._edge(key, self._node(tensor.grad_fn, pending))
        gradient = gradient_of(tensor)
        if gradient is not None:
            of_gradient = (_GRADIENT, id(tensor))
            self._objects[id(tensor)] = tensor  # else its id may become another's
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
        """Note what a node of a graph has saved, and the nodes before it."""
        key = id(node)
        for saved in saved_objects(node, self._hooks):
            if is_node(saved):
                self._edge(key, self._node(saved, pending))
            else:
                self._refer_from_node(key, saved, pending)
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
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

    # -- references of Python's --

    def _climb(self, level: list[object]) -> None:
        """Find all that leads to some objects, up to what gives names."""
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
        """Return the graph of what was found."""
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
        """Return the names of the objects that were found; fixtures become objects themselves."""
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

    # -- words --

    def holder(self, group: Group) -> Holder:
        """Return a group's holder in words, with what else keeps its blocks."""
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

    def kept(self, group: Group) -> dict[Key, Kept]:
        """Return what keeps each block of a group."""
        text, others = self._text(group), self._others_of(group)
        shared = group.shared
        kept = {}
        for path in self._paths(group):
            tensor = self._tensor_of(path)
            is_of_graph = any(is_node(self._objects.get(key)) for key in path)
            leaf = self._leaf_of(path)
            kept[path[-1]] = Kept(
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

    def kept_without_a_name(self, place: Key) -> Kept:
        """Return what is known of a block that nothing with a name keeps."""
        if self.is_cut:
            return Kept(name=NOT_SEARCHED)
        leaf = self._leaf_of([key for key, children in self._edges.items() if place in children])
        return Kept(is_gradient=leaf is not None, is_parameters=_is_parameter(leaf))

    def without_a_name(self) -> list[Holder]:
        """Return the memory that nothing with a name keeps, with what is known of it."""
        left = self._blocks.keys() - self.graph.reached(self.graph.names)
        found: dict[str, list[Key]] = {}
        while left:
            outermost = self.graph.outermost_above(min(left))
            blocks = self.graph.reached([outermost]) & left
            paths = self.graph.paths(outermost, blocks)
            words = shared_words(words_of(self._python_part(path)) for path in paths)
            text = f"objects that no variable refers to ({', '.join(words)})" if words else UNNAMED
            found.setdefault(NOT_SEARCHED if self.is_cut else text, []).extend(blocks)
            left -= blocks
        held = [
            Holder(text, self.graph.bytes_of(blocks), len(blocks)) for text, blocks in found.items()
        ]
        return sorted(held, key=lambda holder: (-holder.nbytes, holder.text))

    def _text(self, group: Group) -> str:
        return with_way(group.name.text, self._words(group))

    def _words(self, group: Group) -> tuple[str, ...]:
        return shared_words(words_of(self._python_part(path)) for path in self._paths(group))

    def _others_of(self, group: Group) -> tuple[str, ...]:
        """Return the other holders of a group's blocks, those of the same name by the way alone."""
        return tuple(
            ", ".join(self._words(other)) if other.name == group.name else self._text(other)
            for other in group.others
        )

    def _paths(self, group: Group) -> Iterator[tuple[Key, ...]]:
        """Yield the path from a group's name to each of its blocks."""
        for path in self.graph.paths(group.path[-1], group.blocks):
            yield (*group.path, *path[1:])

    def _python_part(self, path: Sequence[Key]) -> list[Any]:
        """Return the objects of a path until autograd's part of it begins, or the memory."""
        values: list[Any] = []
        for key in path:
            value = self._objects.get(key)
            if value is None or is_node(value):
                break
            values.append(value)
        return values

    def _tensor_of(self, path: Sequence[Key]) -> Any:  # noqa: ANN401 - a tensor
        """Return the tensor by which a path reaches a block, or a graph that keeps the block."""
        values = self._python_part(path)
        return values[-1] if values and _is_tensor(values[-1]) else None

    def _leaf_of(self, path: Sequence[Key]) -> Any:  # noqa: ANN401 - a tensor
        """Return the tensor whose gradient keeps a block; None if no gradient does."""
        leaves = [key[1] for key in path if isinstance(key, tuple) and _is_gradient(key)]
        return self._objects.get(leaves[0]) if leaves else None


class _Heap:
    """All objects of Python's that refer to others, as they were when this was made.

    A search's own objects, which are made later, are none of these.
    """

    def __init__(self) -> None:
        objects = gc.get_objects()
        self._keys = {*map(id, objects)}
        # A comprehension's variables would be in this list, and have it: a cycle.
        self._chunks: list[list[Any]] = []
        for at in range(0, len(objects), CHUNK):
            self._chunks.append(objects[at : at + CHUNK])

    def tensors(self) -> list[Tensor]:
        """Return all tensors, on whichever device."""
        import torch

        # type(), not isinstance: that asks __class__, which a lazy object answers by waking up.
        return [
            each for chunk in self._chunks for each in chunk if issubclass(type(each), torch.Tensor)
        ]

    def referrers(self, targets: Sequence[object]) -> list[object]:
        """Return the objects that refer to any of some others.

        ``gc.get_referrers`` takes the longer the more objects it is asked for. Of many objects most
        chunks refer to none, which is seen at once.
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
        """Let go of all objects."""
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
    """Whether an object's parts are no holders by themselves: a list's, an optimizer's."""
    import torch

    kind = type(value)
    return issubclass(kind, _WHOLE) or (
        kind.__module__.startswith("torch.") and not issubclass(kind, torch.nn.Module)
    )
