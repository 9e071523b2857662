"""Which keepers made a line's growth: what their blocks, and all others, can make."""

from pytest_gpumem.explain.keeper_choice import KeptBlock, NamedKeeper, choices
from pytest_gpumem.measurement import ExtraBlocks
from pytest_gpumem.sizes import MIB


def block(keeper, mib, *, earlier=False, unsplit=0):
    return KeptBlock(keeper, mib * MIB, unsplit * MIB, earlier)


def grown(blocks, mib, unused=0):
    return ExtraBlocks(blocks, mib * MIB, unused * MIB)


def test_a_keeper_is_named_where_no_other_blocks_add_up_to_the_growth():
    """The line is in a helper that allocates for several keepers: number and bytes do not tell."""
    blocks = [block("store", 5), block("kept", 4), block("batch", 5)]
    assert choices(blocks, grown(1, 4)) == [NamedKeeper("kept", (1,))]


def test_a_keeper_is_named_where_the_blocks_of_all_others_are_too_few_or_too_small():
    blocks = [block("store", 30), block("kept", 16), block("kept", 16), block("passing", 20)]
    assert choices(blocks, grown(2, 32)) == [NamedKeeper("kept", (1, 2))]
    # The baseline had other sizes, as no choice makes the growth: all but one make less of it.
    assert choices(blocks, grown(2, 68)) == [NamedKeeper("kept", (1, 2))]
    assert [choice.name for choice in choices(blocks, grown(2, 54))] == ["passing or kept or store"]


def test_two_keepers_are_named_where_the_growth_takes_the_blocks_of_both():
    blocks = [block("store", 30), block("logits", 16), block("labels", 4), block("logits", 16)]
    assert choices(blocks, grown(3, 36)) == [
        NamedKeeper("logits", (1, 3)),
        NamedKeeper("labels", (2,)),
    ]


def test_blocks_of_earlier_steps_are_taken_for_the_growth_where_sizes_leave_it_open():
    blocks = [block("store", 8), block("best", 8, earlier=True), block("out", 8)]
    assert choices(blocks, grown(1, 8)) == [NamedKeeper("best", (1,))]


def test_names_stand_for_one_where_either_may_have_made_the_growth():
    blocks = [block("store", 8), block("LOG", 8, earlier=True), block("big", 8, earlier=True)]
    assert choices(blocks, grown(1, 8)) == [NamedKeeper("LOG or big", (1,))]
    assert choices([block("x", 8), block("y", 8)], grown(1, 8)) == [NamedKeeper("y or x", (0,))]
    # More than three say nothing, and one of them may be what has no name.
    assert choices([block(name, 8) for name in "abcd"], grown(1, 8)) == []
    assert choices([block("x", 8), block("", 8)], grown(1, 8)) == []


def test_a_keeper_that_makes_all_of_a_growth_has_all_of_its_blocks():
    """Of the sizes alone, the smaller one beside a block without a name would do as well."""
    blocks = [block("x", 4, earlier=True), block("x", 1, earlier=True), block("", 4), block("", 4)]
    assert choices(blocks, grown(2, 5)) == [NamedKeeper("x", (0, 1))]


def test_bytes_that_were_not_split_off_may_be_the_baselines_or_the_growths():
    """Alone by size, three of LOG's and the other one would make the growth."""
    log = [block("LOG", 14, earlier=at < 3) for at in range(4)]
    blocks = [*log, block("passing", 13)]
    named = choices(blocks, grown(4, 55, unused=1))
    assert named == [NamedKeeper("LOG", (0, 1, 2, 3))]


def test_a_search_that_has_too_many_choices_goes_by_bytes_alone():
    many = [KeptBlock("many", MIB + 512 * at * at, 0, earlier=False) for at in range(60)]
    whole = sum(block.nbytes for block in many)
    blocks = [*many, block("store", 300)]
    assert [choice.name for choice in choices(blocks, ExtraBlocks(60, whole))] == ["many"]
