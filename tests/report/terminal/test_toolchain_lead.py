"""What a summary leads with where tests moved together with the toolchain."""

from __future__ import annotations

from dataclasses import replace

from helpers.styled_lines import plain_text
from helpers.terminal_results import BEFORE, MODULE, known, measured, peak, result

from pytest_gpumem.judge.verdict import Kind, Policy
from pytest_gpumem.measurement import Attribution, Breakdown
from pytest_gpumem.report.parts.session_words import moved_together
from pytest_gpumem.report.terminal.toolchain_lead import lead_lines, short_texts
from pytest_gpumem.sizes import MIB


def moved(name, by, *, provenance=BEFORE, policy=None, part=""):
    lookup = known(peak(100, 120), provenance=provenance)
    now = measured(peak(100 + by, 120 + by))
    judged = result(name, now, lookup, part=part, policy=policy)
    return replace(judged, baseline_entry=lookup.entry)


FIVE = [moved(f"test_{i}", 28) for i in range(5)]


def test_the_lead_is_wrapped_and_ends_in_what_to_do():
    *first, last, command = plain_text(lead_lines(FIVE)).splitlines()
    assert first == [
        "gpumem: torch 2.14.0 -> 2.15.0, CUDA 13.0 -> 13.2: 5 tests moved by +28.00 MiB",
        "        allocated",
    ]
    assert (last, command) == (
        "gpumem: if this is intended, run",
        "    pytest --gpumem-update-baselines",
    )
    arguments = ["tests of " + "x" * 90]
    command = lead_lines(FIVE, arguments=arguments)[-1:]  # never wrapped
    assert plain_text(command) == f"    pytest '{arguments[0]}' --gpumem-update-baselines"


def test_the_workspace_is_named_where_breakdowns_tell_it():
    was = (Breakdown({"parameters": 92 * MIB, "workspaces": 8 * MIB}, 20 * MIB),)
    now = (Attribution(Breakdown({"parameters": 92 * MIB, "workspaces": 36 * MIB}, 20 * MIB)),)
    told = [
        replace(
            it,
            baseline_entry=replace(it.baseline_entry, breakdowns=was),
            measurement=replace(it.measurement, attributions=now),
        )
        for it in FIVE
    ]
    (one,) = moved_together(told)
    assert one.cause == "workspaces +28.00 MiB"


def test_no_update_is_proposed_while_another_test_regressed_by_itself():
    alone = moved("test_alone", 500)
    assert plain_text(lead_lines([*FIVE, alone])[-1:]) == (
        "gpumem: 1 more regressed for another reason: begin with these"
    )
    other = moved("test_other", 500, provenance=FIVE[0].measurement.provenance)
    assert "for another reason" in plain_text(lead_lines([*FIVE, other])[-1:])


def test_nothing_leads_where_nothing_moved_together():
    same = FIVE[0].measurement.provenance
    assert lead_lines([]) == []
    assert lead_lines(FIVE[:2]) == []
    assert lead_lines([moved(f"test_{i}", 28, provenance=same) for i in range(5)]) == []
    assert lead_lines([moved(f"test_{i}", 0) for i in range(5)]) == []


def test_what_is_held_to_another_device_is_no_change_of_toolchain():
    policy = Policy(against="virtual-L4", provenance="fail")
    held = [moved(f"test_{i}", 28, policy=policy) for i in range(5)]
    assert {it.verdict.kind for it in held} == {Kind.REGRESSED}
    assert lead_lines(held) == []


def test_what_passed_with_a_note_is_led_with_and_needs_no_command():
    passed = [moved(f"test_{i}", 28, policy=Policy(provenance="note")) for i in range(5)]
    assert {it.verdict.kind for it in passed} == {Kind.INCOMPARABLE}
    assert len(plain_text(lead_lines(passed)).split("gpumem: ")) == 2


def test_a_section_is_shortened_only_where_that_is_all_that_failed():
    alone = moved("test_alone", 500)
    broken = moved("test_0", 900, part="forward")
    texts = short_texts([*FIVE, alone, broken])
    assert set(texts) == {f"{MODULE}::test_{i}" for i in range(1, 5)}
    text = texts[f"{MODULE}::test_1"]
    assert text.startswith(
        "regressed: torch 2.14.0 -> 2.15.0, CUDA 13.0 -> 13.2; peak allocated grew by 28.00 MiB"
    )
    assert "see the summary" in text
