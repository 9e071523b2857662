"""What keeps blocks in a graph of references, and what letting go of it frees."""

from __future__ import annotations

import itertools

from pytest_gpumem.recording.reference_graph import Name, ReferenceGraph

BLOCKS = {("block", at): 10 for at in range(6)}
A, B, C, D, E, F = BLOCKS


def graph(names, *ways, tensors=(), whole=(), weak=()):
    """A graph of ways down, each a list of objects, of which some have names by lifetime."""
    below = {}
    for way in ways:
        for key, child in itertools.pairwise(way):
            below.setdefault(key, {})[child] = None
    named = {key: [Name(False, lifetime, f"name {key}")] for key, lifetime in names.items()}
    return ReferenceGraph(below, named, BLOCKS, set(tensors), set(whole), set(weak))


def told(graph):
    """Each group: its holder, its number of blocks, and its other holders with theirs."""
    return [
        (
            group.path[-1],
            len(group.blocks),
            [(other.path[-1], len(other.blocks)) for other in group.others],
        )
        for group in graph.groups()
    ]


def test_the_innermost_object_that_all_ways_pass_is_the_holder():
    ways = [[1, 2, 3, 11, A], [1, 2, 3, 12, B], [1, 4, 3]]
    (group,) = graph({1: 2}, *ways, tensors=[11, 12]).groups()
    assert (group.path, group.blocks) == ((1, 2, 3), {A, B})


def test_of_two_objects_that_keep_the_same_blocks_both_are_named():
    ways = [[1, 2, 11, A], [1, 2, 12, B], [1, 3, 11], [1, 3, 12]]
    assert told(graph({1: 2}, *ways, tensors=[11, 12])) == [(2, 2, [(3, 2)])]
    apart = graph({2: 2, 3: 2}, *ways, tensors=[11, 12])
    assert told(apart) == [(2, 2, [(3, 2)])]
    # The parts of a list are none: the list is the holder.
    assert told(graph({1: 2}, *ways, tensors=[11, 12], whole=[1])) == [(1, 2, [])]


def test_the_one_that_keeps_more_comes_first_with_what_it_frees_alone():
    """A registry of models and of optimizers, which have the parameters and more."""
    ways = [[1, 2, 11, A], [1, 3, 11, A], [1, 3, 12, B], [1, 3, 13, C]]
    assert told(graph({1: 2}, *ways, tensors=[11, 12, 13])) == [(3, 3, [(2, 1)])]


def test_a_variable_into_what_the_holder_keeps_is_no_other_holder():
    ways = [[1, 11, A], [1, 12, B], [1, 13, C]]
    last = {"tensors": [11, 12, 13]}
    assert told(graph({1: 2, 13: 2}, *ways, **last)) == [(1, 3, [])]
    # A global variable lasts: what it has is not freed with the list.
    assert told(graph({1: 2, 13: 1}, *ways, **last)) == [(1, 3, [(13, 1)])]


def test_of_several_names_for_a_holder_the_nearest_is_told_and_then_the_one_that_lasts():
    ways = [[1, 2, 11, A], [1, 2, 12, B]]
    (group,) = graph({1: 1, 2: 2}, *ways, tensors=[11, 12]).groups()
    assert (group.name.text, group.path) == ("name 2", (2,))
    both = graph({2: 3}, *ways, tensors=[11, 12])
    both.names[2].append(Name(False, 2, "outer"))
    assert both.groups()[0].name.text == "outer"


def test_what_has_most_of_a_holders_bytes_is_the_holder():
    ways = [[1, 2, 20 + at, block] for at, block in enumerate([A, B, C, D, E])]
    tensors = [20, 21, 22, 23, 24, 30]
    graphs = graph({1: 2}, *ways, [1, 30, F], tensors=tensors)
    assert told(graphs) == [(1, 6, [])]
    graphs.sizes = {**BLOCKS, F: 5}
    assert told(graphs) == [(2, 5, []), (1, 1, [])]


def test_a_graph_keeps_its_inputs_only_where_nothing_else_does():
    """A loss (1) keeps the weight (A) of a model (2), what it computed (B), and an input (C)."""
    ways = [[1, 5, B], [5, A], [5, C], [2, 12, A]]
    options = {"tensors": [1, 5, 12], "weak": [(5, A), (5, C)]}
    assert told(graph({1: 2, 2: 2}, *ways, **options)) == [(1, 2, []), (2, 1, [])]
    # As a list, the losses last: the weight is freed when they let go too.
    kept = graph({1: 2, 2: 2}, *ways, tensors=[5, 12], weak=options["weak"])
    assert told(kept) == [(1, 2, []), (2, 1, [(1, 1)])]


def test_objects_in_a_circle_are_passed_once():
    ways = [[1, 2, 3, 11, A], [3, 1], [3, 12, B], [2, 1]]
    assert told(graph({1: 2}, *ways, tensors=[11, 12])) == [(3, 2, [])]
    assert graph({}, *ways).outermost_above(A) in {1, 2, 3}


def test_what_no_name_reaches_is_in_no_group():
    assert told(graph({1: 2}, [1, 11, A], [2, 12, B], tensors=[11, 12])) == [(1, 1, [])]
