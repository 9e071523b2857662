"""The judgement: its order, its boundaries, and what it says."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from helpers.judged import LENIENT, NOTHING, NOW, PLAIN, known, measured
from helpers.noted import noted
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.judge.judge import judge, judge_left
from pytest_gpumem.judge.verdict import Kind, Lookup, Policy, Verdict
from pytest_gpumem.measurement import (
    Attribution,
    Breakdown,
    Holder,
    OutOfMemory,
    Peak,
    PeakRange,
    Stayed,
)
from pytest_gpumem.notes import NoteKind
from pytest_gpumem.relations import Bound, Relation
from pytest_gpumem.sizes import GIB, MIB, Tolerance, gib
from pytest_gpumem.spec import MemorySpec


def short_of_memory(**changes):
    oom = OutOfMemory(
        requested=512 * MIB,
        allocated=7800 * MIB,
        reserved=8000 * MIB,
        site="examples/test_mlp.py:31 in step",
    )
    return measured((7800 * MIB, 8000 * MIB), out_of_memory=replace(oom, **changes))


# The order of judgement


def test_running_out_of_memory_comes_before_everything_else():
    spec = MemorySpec(max_gib=8, max_allocated_gib=1)
    verdict = judge(short_of_memory(), spec, Lookup(error="broken"), Policy(updating=True))
    assert (verdict.kind, verdict.failed) == (Kind.OUT_OF_MEMORY, True)


def test_a_budget_comes_before_the_baseline_and_holds_while_updating():
    spec = MemorySpec(max_allocated_gib=1)
    now = measured((2 * GIB, 2 * GIB))
    verdict = judge(now, spec, known((GIB, GIB)), Policy(updating=True))
    assert (verdict.kind, verdict.failed) == (Kind.OVER_BUDGET, True)


def test_a_test_without_baseline_on_purpose_is_within_whatever_lies_in_the_folder():
    spec = MemorySpec(baseline=False)
    for lookup in (
        NOTHING,
        known((1, 1)),
        Lookup(error="broken"),
        Lookup(other_devices=("virtual-L4",)),
    ):
        verdict = judge(measured((GIB, GIB)), spec, lookup, Policy(missing_baseline="fail"))
        assert (verdict.kind, verdict.failed, verdict.notes) == (Kind.WITHIN, False, ())
        assert [row.baseline for row in verdict.comparisons] == [None, None]


# Budgets


@pytest.mark.parametrize(
    ("argument", "peak"),
    [("max_gib", "reserved"), ("max_reserved_gib", "reserved"), ("max_allocated_gib", "allocated")],
)
@pytest.mark.parametrize("over", [0, 1])
def test_exactly_at_a_budget_is_within(argument, peak, over):
    limit = gib(1.5)
    sizes = {"allocated": 0, "reserved": 0, peak: limit + over}
    spec = MemorySpec(**{argument: 1.5, "baseline": False})
    verdict = judge(measured((sizes["allocated"], sizes["reserved"])), spec, NOTHING, LENIENT)
    assert verdict.kind is (Kind.OVER_BUDGET if over else Kind.WITHIN)
    assert verdict.failed is bool(over)
    assert {row.peak: row.budget for row in verdict.comparisons}[peak] == limit
    if over:
        assert verdict.headline == (
            f"over budget: peak {peak} of 1536.00 MiB is 1 B over {argument}=1.5 (1536.00 MiB)"
        )
        assert verdict.remedy.endswith(f"declare {argument}=1.51")


def test_max_gib_does_not_limit_peak_allocated_by_itself():
    now = measured((2 * GIB, GIB))  # not possible on a device, which is why it tells them apart
    verdict = judge(now, MemorySpec(max_gib=1, baseline=False), NOTHING, LENIENT)
    assert verdict.kind is Kind.WITHIN


@pytest.mark.parametrize("over", [0, 1])
def test_a_card_limits_what_is_reserved_to_its_memory_less_its_context(over):
    spec = MemorySpec(card="T4", baseline=False)
    now = measured((GIB, 2 * GIB + over))
    verdict = judge(now, spec, NOTHING, LENIENT, card_bytes=2 * GIB)
    assert verdict.failed is bool(over)
    if over:
        assert "1 B over card='T4' (2048.00 MiB)" in verdict.headline
        assert "declare" not in verdict.remedy


def test_each_device_is_held_to_the_budget_and_the_worst_is_named_first():
    spec = MemorySpec(max_reserved_gib=1, max_allocated_gib=1, devices=3, baseline=False)
    now = measured((0, 0), (0, GIB + MIB), (GIB + 2 * MIB, GIB))
    verdict = judge(now, spec, NOTHING, LENIENT)
    assert verdict.headline == (
        "over budget: peak allocated of 1026.00 MiB on device 2 is 2.00 MiB over "
        "max_allocated_gib=1 (1024.00 MiB)"
    )
    (note,) = verdict.note_texts
    assert note == (
        "also, peak reserved of 1025.00 MiB on device 1 is 1.00 MiB over "
        "max_reserved_gib=1 (1024.00 MiB)"
    )


def test_the_tightest_budget_stands_in_the_comparison():
    spec = MemorySpec(max_gib=8, max_reserved_gib=2, baseline=False)
    verdict = judge(measured((1, 1)), spec, NOTHING, LENIENT, card_bytes=4 * GIB)
    assert [row.budget for row in verdict.comparisons] == [None, 2 * GIB]


@given(st.integers(GIB, 200 * GIB))
def test_the_budget_that_a_verdict_proposes_is_enough(nbytes):
    verdict = judge(measured((0, nbytes)), MemorySpec(max_gib=0.5), NOTHING, LENIENT)
    proposed = float(verdict.remedy.rpartition("declare max_gib=")[2])
    assert nbytes <= gib(proposed) < nbytes + gib(0.011)


# Out of memory


def test_out_of_memory_says_batch_size_budget_request_what_was_held_and_what_it_needs():
    spec = MemorySpec(max_gib=8, batch_size=64)
    verdict = judge(short_of_memory(needed=Peak(8900 * MIB, 9000 * MIB)), spec, NOTHING, LENIENT)
    assert verdict.headline == (
        "out of memory: batch size 64 does not fit in max_gib=8 (8192.00 MiB): it asked for "
        "512.00 MiB more when 7800.00 MiB were allocated, 8000.00 MiB reserved; it needs "
        "9000.00 MiB"
    )
    assert verdict.remedy.endswith("; or, if the step may take that much, declare max_gib=8.79")
    assert "gradient accumulation" in verdict.remedy


def test_out_of_memory_with_no_budget_names_the_device_and_what_it_leaves():
    verdict = judge(short_of_memory(requested=None), PLAIN, NOTHING, LENIENT)
    assert verdict.headline == (
        "out of memory: the step does not fit on T4 (14.47 GiB): "
        "7800.00 MiB were allocated, 8000.00 MiB reserved"
    )
    assert "declare" not in verdict.remedy


def test_out_of_memory_names_the_tighter_of_max_gib_and_card():
    spec = MemorySpec(max_gib=20, card="T4")
    now = short_of_memory(needed=Peak(15 * GIB, 15 * GIB))
    verdict = judge(now, spec, NOTHING, LENIENT, card_bytes=8 * GIB)
    assert "does not fit in card='T4' (8192.00 MiB)" in verdict.headline
    assert "declare" not in verdict.remedy  # a larger max_gib would not help


def test_out_of_memory_names_the_device_that_ran_out():
    oom = OutOfMemory(1, 2, 3, "", device_index=1)
    verdict = judge(measured((1, 1), (2, 2), out_of_memory=oom), PLAIN, NOTHING, LENIENT)
    assert "(14.47 GiB) on device 1: " in verdict.headline


def test_out_of_memory_compares_what_the_step_needs_with_the_baseline():
    now = short_of_memory(needed=Peak(9 * GIB, 9 * GIB + MIB))
    verdict = judge(now, MemorySpec(max_gib=8), known((7 * GIB, 7 * GIB)), LENIENT)
    assert [row.difference for row in verdict.comparisons] == [2 * GIB, 2 * GIB + MIB]


def test_out_of_memory_that_could_not_be_run_again_compares_nothing_but_tells_the_baseline():
    verdict = judge(short_of_memory(), MemorySpec(max_gib=8), known((GIB, 2 * GIB)), LENIENT)
    assert verdict.comparisons == ()
    assert verdict.note_texts == ("the baseline is 1024.00 MiB allocated, 2048.00 MiB reserved",)


@pytest.mark.parametrize(("short_by", "others_hold_it"), [(0, True), (1, False)])
def test_out_of_memory_below_the_budget_says_that_others_hold_the_memory(short_by, others_hold_it):
    """One segment of 20 MiB is left for how the allocator rounds a request up."""
    now = short_of_memory(reserved=8 * GIB - 512 * MIB - 20 * MIB + short_by)
    verdict = judge(now, MemorySpec(max_gib=8), NOTHING, LENIENT)
    said = any("others use the rest of the device's memory" in note for note in verdict.note_texts)
    assert said is others_hold_it


def test_a_step_that_fits_when_run_again_is_not_said_to_need_more_than_the_budget():
    now = short_of_memory(needed=Peak(7 * GIB, 7 * GIB))
    verdict = judge(now, MemorySpec(max_gib=8), NOTHING, LENIENT)
    assert verdict.headline.endswith("; in a second run it took 7168.00 MiB")
    assert "declare" not in verdict.remedy


def test_a_broken_baseline_is_told_beside_what_comes_first():
    lookup = Lookup(error="x.json: bad; mend it")
    for now in (short_of_memory(), measured((0, 9 * GIB))):
        verdict = judge(now, MemorySpec(max_gib=8), lookup, LENIENT)
        assert verdict.note_texts == ("cannot read the baseline: x.json: bad; mend it",)


# Notes


def test_only_what_differs_in_provenance_is_named_and_the_comparison_is_made():
    before = replace(NOW, torch="2.14.0", allocator="expandable_segments:True")
    verdict = judge(measured((GIB, GIB)), PLAIN, known((1, 1), provenance=before), LENIENT)
    assert verdict.kind is Kind.REGRESSED
    assert verdict.headline.startswith(
        "regressed: torch 2.14.0 -> 2.15.0, allocator settings expandable_segments:True -> none; "
        "peak allocated grew by 1024.00 MiB"
    )
    assert verdict.notes == ()  # the headline says that
    as_before = judge(measured((1, 1)), PLAIN, known((1, 1), provenance=before), LENIENT)
    (note,) = as_before.note_texts
    assert note == (
        "baseline made with torch 2.14.0, allocator settings expandable_segments:True; "
        "measured with torch 2.15.0, allocator settings none"
    )


def test_equal_provenance_is_not_worth_a_note():
    assert judge(measured((1, 1)), PLAIN, known((1, 1)), LENIENT).notes == ()


def test_the_measurement_s_own_notes_and_its_retries_are_passed_on():
    now = measured((1, 1), notes=noted("one step only"), alloc_retries=2)
    assert judge(now, PLAIN, known((1, 1)), LENIENT).note_texts == (
        "one step only",
        "the allocator emptied its cache 2 times, because memory ran out",
    )


# Properties

SIZES = st.integers(0, 64 * MIB)
PEAKS = st.tuples(SIZES, SIZES)
TOLERANCES = st.none() | st.builds(
    Tolerance, st.sampled_from([Fraction(0), Fraction(1, 50)]), st.integers(0, 8 * MIB)
)
LOOKUPS = st.just(NOTHING) | st.builds(known, PEAKS) | st.just(Lookup(error="broken"))
POLICIES = st.builds(
    Policy, st.sampled_from(["note", "fail"]), st.just("note"), TOLERANCES, st.booleans()
)
SPECS = st.builds(
    MemorySpec,
    max_gib=st.none() | st.floats(0.001, 0.1),
    max_allocated_gib=st.none() | st.floats(0.001, 0.1),
    baseline=st.booleans(),
)


@given(PEAKS, PEAKS, SPECS, LOOKUPS, POLICIES)
def test_growing_never_makes_a_failing_step_pass(peaks, growth, spec, lookup, policy):
    """But where shrinkage="fail", which is for being too small."""
    before = judge(measured(peaks), spec, lookup, policy)
    grown = judge(measured((peaks[0] + growth[0], peaks[1] + growth[1])), spec, lookup, policy)
    assert grown.failed or not before.failed


@given(PEAKS, PEAKS, TOLERANCES)
def test_shrinkage_as_failure_passes_exactly_what_is_within(peaks, before, tolerance):
    policy = Policy(shrinkage="fail", tolerance=tolerance)
    verdict = judge(measured(peaks), PLAIN, known(before), policy)
    assert verdict.failed is (verdict.kind is not Kind.WITHIN)
    assert (verdict.kind is Kind.WITHIN) is all(row.excess == 0 for row in verdict.comparisons)


@given(PEAKS, SPECS, LOOKUPS, POLICIES)
def test_every_verdict_leads_with_its_kind_and_every_failure_has_a_remedy(
    peaks, spec, lookup, policy
):
    verdict = judge(measured(peaks), spec, lookup, policy)
    assert verdict.headline.startswith(f"{verdict.kind.word}: ")
    assert verdict.remedy.endswith(verdict.command_text)
    assert bool(verdict.remedy) or not verdict.failed


# A baseline of another toolchain

BEFORE = replace(NOW, torch="2.14.0")


@pytest.mark.parametrize(
    ("policy", "grown", "kind", "failed"),
    [
        ("compare", 0, Kind.WITHIN, False),
        ("compare", 28, Kind.REGRESSED, True),
        ("note", 0, Kind.WITHIN, False),
        ("note", 28, Kind.INCOMPARABLE, False),
        ("note", -28, Kind.INCOMPARABLE, False),
        ("fail", 0, Kind.INCOMPARABLE, True),
        ("fail", 28, Kind.INCOMPARABLE, True),
    ],
)
def test_what_becomes_of_a_baseline_that_was_made_with_something_else(policy, grown, kind, failed):
    now = measured((GIB + grown * MIB, 2 * GIB))
    lookup = known((GIB, 2 * GIB), provenance=BEFORE)
    given = Policy(provenance=policy, shrinkage="fail")
    verdict = judge(now, PLAIN, lookup, given, nodeid="t.py::test")
    assert (verdict.kind, verdict.failed) == (kind, failed)
    assert [row.difference for row in verdict.comparisons] == [grown * MIB, 0]
    if kind is Kind.INCOMPARABLE:
        assert "made with torch 2.14.0" in verdict.headline
        assert verdict.command_text == "pytest t.py::test --gpumem-update-baselines"
    updating = judge(now, PLAIN, lookup, replace(given, updating=True))
    assert not updating.failed


def test_the_driver_is_named_with_other_versions_that_lead_and_else_in_a_note():
    now, lookup = measured((GIB + 28 * MIB, 2 * GIB)), known((GIB, 2 * GIB), provenance=BEFORE)
    older = replace(lookup.entry, provenance=replace(BEFORE, driver="550"))
    verdict = judge(now, PLAIN, replace(lookup, entry=older), LENIENT)
    assert verdict.lead.sentence.endswith(f", driver 550 -> {NOW.driver}")
    older = replace(lookup.entry, provenance=replace(NOW, driver="550"))
    verdict = judge(now, PLAIN, replace(lookup, entry=older), LENIENT)
    assert verdict.lead is None
    assert f"baseline made with driver 550; measured with driver {NOW.driver}" in verdict.note_texts


@pytest.mark.parametrize("policy", ["compare", "note", "fail"])
def test_with_the_same_toolchain_the_policy_changes_nothing(policy):
    for grown in (0, 28, -28):
        now, lookup = measured((GIB + grown * MIB, 2 * GIB)), known((GIB, 2 * GIB))
        verdict = judge(now, PLAIN, lookup, Policy(provenance=policy))
        assert verdict == judge(now, PLAIN, lookup, LENIENT)


def test_a_budget_and_running_out_of_memory_come_before_the_toolchain():
    lookup = known((GIB, GIB), provenance=BEFORE)
    policy = Policy(provenance="note")
    over = judge(measured((2 * GIB, 2 * GIB)), MemorySpec(max_allocated_gib=1), lookup, policy)
    assert (over.kind, over.failed) == (Kind.OVER_BUDGET, True)
    assert judge(short_of_memory(), PLAIN, lookup, policy).failed


def test_a_limit_is_held_to_the_largest_of_a_range():
    least, most = (Peak(50 * MIB, 70 * MIB),), (Peak(90 * MIB, 120 * MIB),)
    spanned = PeakRange(least, most, "cuDNN's choice in benchmark mode", judged=True)
    measurement = replace(measured((60 * MIB, 80 * MIB)), range=spanned)
    spec = MemorySpec(max_reserved_gib=100 / 1024)
    verdict = judge(measurement, spec, NOTHING, LENIENT)
    assert verdict.kind is Kind.OVER_BUDGET
    assert "peak reserved of 120.00 MiB at most is 20.00 MiB over" in verdict.headline
    assert "max_reserved_gib=0.12" in verdict.remedy
    assert not judge(measurement, MemorySpec(max_reserved_gib=120 / 1024), NOTHING, LENIENT).failed
    estimated = replace(measurement, range=PeakRange(least, most, "cuFFT's workspaces"))
    assert not judge(estimated, spec, NOTHING, LENIENT).failed


def test_a_lower_limit_is_held_to_the_least_of_a_range():
    least, most = (Peak(50 * MIB, 70 * MIB),), (Peak(90 * MIB, 120 * MIB),)
    spanned = PeakRange(least, most, "cuDNN's choice in benchmark mode", judged=True)
    measurement = replace(measured((60 * MIB, 80 * MIB)), range=spanned)

    def verdict(figure, limit, held):
        relation = Relation("at_least", "", Fraction(0), limit * MIB, figure)
        bound = Bound(relation, limit * MIB, held * MIB)
        return judge(measurement, PLAIN, NOTHING, LENIENT, relations=[bound])

    low = verdict("allocated", 55, 60)
    assert low.kind is Kind.UNDER_LIMIT
    assert "peak allocated of 50.00 MiB is 5.00 MiB under at_least='55.00 MiB'" in low.headline
    assert "find the tensors that were expected: 5.00 MiB or more" in low.remedy
    assert not verdict("reserved", 70, 80).failed
    assert not verdict("held", 55, 60).failed  # ranges are of peaks


def test_who_else_holds_what_was_left_is_told():
    others = ("the hook of Net", "local variable best")
    holders = (
        Holder("global variable CACHE", 3 * MIB, 2),
        Holder("attribute last of Net", 2 * MIB, 1, others, MIB),
        Holder("global variable NETS", MIB, 1, others, MIB),
    )
    left = replace(measured((GIB, GIB)), left=(6 * MIB,), stayed=Stayed(0, 6 * MIB, (), holders))
    before = judge(left, PLAIN, NOTHING, LENIENT)
    verdict = judge_left(left, MemorySpec(max_leak_mib=1), before)
    cache, last, nets = (note.text for note in verdict.notes if note.kind is NoteKind.HOLDER)
    assert cache == "held by global variable CACHE: 3.00 MiB in 2 blocks"
    assert last == (
        "held by attribute last of Net: 2.00 MiB in 1 block, of which 1.00 MiB are also held by "
        "the hook of Net and local variable best"
    )
    assert nets == (
        "held by global variable NETS and the hook of Net and local variable best: 1.00 MiB in 1 "
        "block, freed when all of them let go"
    )


def test_every_kind_has_a_rank_of_its_own():
    assert sorted(kind.severity for kind in Kind) == list(range(len(Kind)))


def test_no_baseline_resolves_a_verdict_whose_figures_become_none():
    assert [kind for kind in Kind if kind.by_baseline and kind.refusal] == []


def test_the_remedy_of_a_limit_is_by_what_the_peak_is():
    """Smaller batches and autocast lower what the model's passes have, and nothing else."""
    spec = MemorySpec(max_gib=0.125)
    for category, words in (("activations", "micro-batch"), ("other", "delete the references")):
        breakdown = Breakdown({"parameters": 60 * MIB, category: 140 * MIB}, 0)
        held = replace(measured((200 * MIB, 200 * MIB)), attributions=(Attribution(breakdown),))
        assert words in judge(held, spec, NOTHING, LENIENT).remedy


@pytest.mark.parametrize("kind", Kind)
def test_a_step_that_needs_too_much_or_whose_server_does_not_start_does_not_fit(kind):
    assert Verdict(kind, True, "").does_not_fit is (
        kind in {Kind.OVER_BUDGET, Kind.OUT_OF_MEMORY, Kind.NO_START}
    )
    assert not Verdict(kind, True, "", not_of_peak=True).does_not_fit
