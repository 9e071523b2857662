"""The judgement against a baseline, and where there is none to compare with."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from helpers.judged import LENIENT, NOTHING, PLAIN, known, measured

from pytest_gpumem.judge.judge import judge
from pytest_gpumem.judge.verdict import Kind, Lookup, Policy
from pytest_gpumem.sizes import GIB, MIB, Tolerance
from pytest_gpumem.spec import MemorySpec
from pytest_gpumem.torchrun_env import TorchrunRank

# No baseline, or none that can be compared


@pytest.mark.parametrize("updating", [False, True])
@pytest.mark.parametrize("policy", ["note", "fail"])
@pytest.mark.parametrize(
    ("lookup", "kind"),
    [
        (NOTHING, Kind.NO_BASELINE),
        (Lookup(other_devices=("virtual-L4",)), Kind.INCOMPARABLE),
        (known((1, 1), (1, 1)), Kind.INCOMPARABLE),
        (known((1, 1), batch_size=16), Kind.INCOMPARABLE),
    ],
)
def test_missing_baseline_decides_on_every_test_with_nothing_to_compare(
    lookup, kind, policy, updating
):
    policy = Policy(missing_baseline=policy, updating=updating)
    verdict = judge(measured((1, 1)), MemorySpec(batch_size=32), lookup, policy)
    assert verdict.kind is kind
    assert verdict.failed is (policy.missing_baseline == "fail" and not updating)
    assert [row.difference for row in verdict.comparisons] == [None, None]
    assert bool(verdict.command) is not updating


def test_a_test_without_baseline_says_what_it_took_and_how_to_record_it():
    verdict = judge(measured((GIB, 2 * GIB)), PLAIN, NOTHING, LENIENT, nodeid="t.py::test[a b]")
    assert verdict.headline == (
        "no baseline: 1024.00 MiB allocated, 2048.00 MiB reserved on virtual-T4"
    )
    assert verdict.command_text == "pytest 't.py::test[a b]' --gpumem-update-baselines"
    assert verdict.remedy == f"to record a baseline, run {verdict.command}"


def test_a_rank_says_how_all_of_its_ranks_are_started():
    """One process alone would record other figures."""
    rank = TorchrunRank(0, 4, 0, 4, "")
    policy = Policy(launcher=rank.launcher)
    verdict = judge(measured((MIB, MIB)), PLAIN, NOTHING, policy, nodeid="t.py::test")
    assert verdict.command_text == (
        "torchrun --standalone --nproc-per-node=4 -m pytest t.py::test --gpumem-update-baselines"
    )
    policy = Policy(launcher=rank._replace(local_size=2).launcher)  # of two machines
    verdict = judge(measured((MIB, MIB)), PLAIN, NOTHING, policy, nodeid="t.py::test")
    assert verdict.command is None
    assert verdict.remedy == (
        "to record a baseline, start all ranks again with --gpumem-update-baselines"
    )


def test_a_baseline_of_another_device_is_named_and_not_compared():
    lookup = Lookup(other_devices=("cuda-NVIDIA-H200", "virtual-L4"))
    verdict = judge(measured((MIB, MIB)), PLAIN, lookup, LENIENT)
    assert verdict.headline == (
        "incomparable: no baseline for virtual-T4, only for cuda-NVIDIA-H200, virtual-L4; "
        "1.00 MiB allocated, 1.00 MiB reserved"
    )


def test_other_devices_do_not_matter_where_this_one_has_a_baseline():
    lookup = replace(known((MIB, MIB)), other_devices=("virtual-L4",))
    assert judge(measured((MIB, MIB)), PLAIN, lookup, LENIENT).kind is Kind.WITHIN


@pytest.mark.parametrize(
    ("spec", "lookup", "why"),
    [
        (
            MemorySpec(batch_size=64),
            known((1, 1), batch_size=32),
            "batch size changed from 32 to 64",
        ),
        (PLAIN, known((1, 1), (1, 1)), "devices changed from 2 to 1"),
        (
            MemorySpec(world_size=64, rank=0),
            known((1, 1), world_size=64, rank=3),
            "rank changed from 3 of 64 to 0 of 64",
        ),
        (
            MemorySpec(world_size=8, rank=0),
            known((1, 1)),
            "rank changed from none to 0 of 8",
        ),
    ],
)
def test_a_baseline_of_another_step_is_not_compared(spec, lookup, why):
    verdict = judge(measured((1, 1)), spec, lookup, LENIENT)
    assert verdict.headline.startswith(f"incomparable: {why}; ")
    assert verdict.remedy.startswith("if this is intended, run ")


@pytest.mark.parametrize(("before", "now"), [(None, 32), (32, None), (32, 32)])
def test_a_batch_size_that_only_one_of_them_declares_is_no_reason_not_to_compare(before, now):
    verdict = judge(
        measured((GIB, GIB)), MemorySpec(batch_size=now), known((1, 1), batch_size=before), LENIENT
    )
    assert verdict.kind is Kind.REGRESSED


@pytest.mark.parametrize("updating", [False, True])
def test_a_broken_baseline_fails_even_while_updating_for_it_is_never_overwritten(updating):
    lookup = replace(known((1, 1)), error="x.json: line 3: not JSON; restore it")
    verdict = judge(measured((1, 1)), PLAIN, lookup, Policy(updating=updating))
    assert (verdict.kind, verdict.failed) == (Kind.INCOMPARABLE, True)
    assert verdict.headline == (
        "incomparable: cannot read the baseline: x.json: line 3: not JSON; restore it"
    )
    assert verdict.notes == ()
    assert verdict.command is None


# Against the baseline


@pytest.mark.parametrize("peak", [0, 1])
@pytest.mark.parametrize(("direction", "kind"), [(1, Kind.REGRESSED), (-1, Kind.IMPROVED)])
@pytest.mark.parametrize(
    "tolerances",
    [
        pytest.param((None, None, (MIB, 20 * MIB)), id="default"),
        pytest.param((None, Tolerance(Fraction(0), 7), (7, 7)), id="session"),
        pytest.param((Tolerance(Fraction(0), 5), Tolerance(Fraction(0), 7), (5, 5)), id="spec"),
        pytest.param((Tolerance(Fraction(0), 0), None, (0, 0)), id="none at all"),
        pytest.param((Tolerance(Fraction(1, 4), 0), None, (25 * MIB, 25 * MIB)), id="relative"),
    ],
)
def test_exactly_at_the_tolerance_is_within(peak, direction, kind, tolerances):
    base = 100 * MIB
    spec_tolerance, session_tolerance, allowances = tolerances
    spec, policy = MemorySpec(tolerance=spec_tolerance), Policy(tolerance=session_tolerance)
    for beyond in (0, 1):
        sizes = [base, base]
        sizes[peak] += direction * (allowances[peak] + beyond)
        verdict = judge(measured(tuple(sizes)), spec, known((base, base)), policy)
        assert verdict.kind is (kind if beyond else Kind.WITHIN)
        assert verdict.failed is (bool(beyond) and direction > 0)
        assert tuple(row.allowance for row in verdict.comparisons) == allowances


@pytest.mark.parametrize(("peak", "base"), [(0, 50 * GIB), (1, 50 * GIB)])
def test_the_default_tolerance_of_a_large_step_is_a_thousandth(peak, base):
    verdict = judge(measured((base, base)), PLAIN, known((base, base)), LENIENT)
    assert verdict.comparisons[peak].allowance == base // 1000


def test_growth_of_one_peak_and_shrinkage_of_the_other_is_a_regression():
    verdict = judge(measured((100 * MIB, 400 * MIB)), PLAIN, known((300 * MIB, 300 * MIB)), LENIENT)
    assert verdict.kind is Kind.REGRESSED
    assert verdict.headline.startswith("regressed: peak reserved grew by 100.00 MiB (+33.3%)")
    assert verdict.notes == ()


def test_growth_in_one_device_is_not_made_up_for_by_another():
    before = known((100 * MIB, 100 * MIB), (200 * MIB, 200 * MIB))
    now = measured((150 * MIB, 100 * MIB), (100 * MIB, 200 * MIB))
    verdict = judge(now, PLAIN, before, LENIENT)
    assert verdict.headline == (
        "regressed: peak allocated on device 0 grew by 50.00 MiB (+50.0%): 100.00 -> 150.00 MiB, "
        "tolerance 1.00 MiB"
    )


def test_a_regression_leads_with_the_largest_growth_of_live_tensors():
    before = known((100 * MIB, 100 * MIB), (100 * MIB, 100 * MIB))
    now = measured((110 * MIB, 900 * MIB), (120 * MIB, 100 * MIB))
    verdict = judge(now, PLAIN, before, LENIENT, nodeid="t.py::test")
    assert verdict.headline.startswith("regressed: peak allocated on device 1 grew by 20.00 MiB")
    assert verdict.notes == ()
    assert verdict.command_text == "pytest t.py::test --gpumem-update-baselines"
    assert verdict.remedy == f"if this is intended, run {verdict.command}"


def test_growth_of_reserved_alone_is_said_not_to_be_live_tensors():
    verdict = judge(measured((MIB, 100 * MIB)), PLAIN, known((MIB, MIB)), LENIENT)
    assert verdict.note_texts == ("live tensors take no more memory; the allocator's cache grew",)
    wide = replace(LENIENT, tolerance=Tolerance(Fraction(0), 40 * MIB))
    within = judge(measured((88 * MIB, 128 * MIB)), PLAIN, known((72 * MIB, 84 * MIB)), wide)
    assert within.note_texts == (
        "live tensors take 16.00 MiB more, within tolerance; the allocator's cache grew",
    )


def test_growth_from_nothing_has_no_percentage():
    verdict = judge(measured((2 * MIB, 0)), PLAIN, known((0, 0)), LENIENT)
    assert verdict.headline == (
        "regressed: peak allocated grew by 2.00 MiB: 0 B -> 2.00 MiB, tolerance 1.00 MiB"
    )


@pytest.mark.parametrize("updating", [False, True])
@pytest.mark.parametrize("shrinkage", ["note", "fail"])
def test_shrinkage_fails_where_the_session_says_so(shrinkage, updating):
    policy = Policy(shrinkage=shrinkage, updating=updating)
    verdict = judge(measured((MIB, MIB)), PLAIN, known((9 * MIB, MIB)), policy)
    assert verdict.kind is Kind.IMPROVED
    assert verdict.headline == (
        "improved: peak allocated shrank by 8.00 MiB (-88.9%): 9.00 -> 1.00 MiB, tolerance 1.00 MiB"
    )
    assert verdict.failed is (shrinkage == "fail" and not updating)


def test_while_updating_a_regression_is_told_but_fails_nothing():
    verdict = judge(measured((GIB, GIB)), PLAIN, known((1, 1)), Policy(updating=True))
    assert (verdict.kind, verdict.failed) == (Kind.REGRESSED, False)
    assert verdict.note_texts == ("this run writes a new baseline",)
    assert (verdict.remedy, verdict.command) == ("", None)


def test_within_says_what_the_fullest_device_took():
    peaks = (MIB, 4 * MIB), (3 * MIB, 3 * MIB)
    verdict = judge(measured(*peaks), PLAIN, known(*peaks), LENIENT)
    assert verdict.headline == "ok: 3.00 MiB allocated, 4.00 MiB reserved"
    assert verdict.note_texts == ("device 0 of 2 is the fullest",)
    assert verdict.remedy == ""
    alike = (MIB, 4 * MIB), (MIB, 4 * MIB)
    assert judge(measured(*alike), PLAIN, known(*alike), LENIENT).notes == ()
