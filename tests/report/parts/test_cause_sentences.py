"""The cause of a failure in one line, and failures of one cause."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.terminal_results import (
    CACHE_GREW,
    GROWN,
    LINE,
    MODULE,
    NEW,
    OVER,
    TOO_LARGE,
    TOO_LARGE_BY,
    USUAL,
    WITHIN,
    entry,
    grown,
    peak,
    result,
    section,
)

from pytest_gpumem.judge.verdict import Lookup
from pytest_gpumem.measurement import Keeper
from pytest_gpumem.report.markdown import markdown
from pytest_gpumem.report.model import Report
from pytest_gpumem.report.parts.cause_sentences import (
    cause_lines,
    shared_causes,
    short_cause,
    short_message,
)
from pytest_gpumem.report.terminal.brief_text import brief_failures
from pytest_gpumem.sizes import MIB


@pytest.mark.parametrize(
    ("failed", "sentence"),
    [
        (grown("test"), "+250.00 MiB (+250.0%): activations +250.00 MiB at model.py:29"),
        (grown("test", part="forward"), "part forward: +250.00 MiB (+250.0%): activations +250.00"),
        (GROWN, "+512.00 MiB (+17.2%): torch 2.14.0 -> 2.15.0, CUDA 13.0 -> 13.2"),
        (CACHE_GREW, "+100.00 MiB reserved (+3.0%)"),
        (TOO_LARGE, "out of memory, at examples/test_mlp.py:31 in step"),
        (TOO_LARGE_BY, "out of memory: needs 9534.00 MiB, does not fit in max_gib=8, at examples"),
        (OVER, "over budget: peak allocated of 7987.00 MiB is 3379.00 MiB over max_allocated_"),
        (NEW, "no baseline: 100.00 MiB allocated"),
    ],
)
def test_a_failure_is_told_in_one_line(failed, sentence):
    assert short_cause(failed).startswith(sentence)
    assert "\n" not in short_cause(failed)


def test_a_limit_above_the_devices_memory_is_not_what_a_step_does_not_fit_in():
    measurement = TOO_LARGE_BY.measurement
    small = replace(measurement.device, total_memory=7 << 30)
    failed = replace(TOO_LARGE_BY, measurement=replace(measurement, device=small))
    assert "does not fit in virtual-T4's memory" in short_cause(failed)


def test_the_whole_test_speaks_for_its_parts():
    part, whole = grown("test", 10, part="forward"), grown("test", 20)
    assert short_message([part, whole]) == short_cause(whole)
    assert short_message([part, WITHIN]) == short_cause(part)
    assert short_message([WITHIN]) == ""


def test_failures_of_one_line_are_told_as_one():
    moved = [grown(f"test_{i}", line=replace(LINE, line=29 + i)) for i in range(4)]
    elsewhere = grown("test_b", line=replace(LINE, code="return self.body(x)"))
    assert cause_lines([WITHIN, *moved, elsewhere]) == [
        "4 of 5 failures share model.py:29 (Tiny.forward): activations +250.00 MiB each"
    ]
    assert cause_lines([*moved[:2], grown("test_more", 300)])[0].endswith(
        "activations +250.00 MiB to +300.00 MiB"
    )
    assert cause_lines(moved[:2]) == []


def test_what_fails_in_a_part_as_well_is_told_by_itself():
    moved = [grown(f"test_{i}") for i in range(4)]
    (shared,) = shared_causes([*moved, grown("test_0", part="forward")])
    assert [it.nodeid for it in shared.results] == [f"{MODULE}::test_{i}" for i in (1, 2, 3)]


def test_what_fails_as_expected_is_no_failure():
    moved = [replace(grown(f"test_{i}"), expected=True) for i in range(4)]
    assert cause_lines(moved) == []


KEPT = Keeper("model.py", 29, "activations", "local variable best (train.py:11)", 64 * MIB, 1, (1,))


def kept(test):
    """A test whose growth has a keeper."""
    failed = grown(test)
    attribution = replace(failed.measurement.attributions[0], keepers=(KEPT,))
    measurement = replace(failed.measurement, attributions=(attribution,))
    baseline = replace(entry(peak(100, 120)), breakdowns=(USUAL,))
    return result(test, measurement, Lookup(baseline))


def test_what_keeps_a_line_s_blocks_stands_below_the_line():
    (cause,) = kept("test").verdict.causes
    assert (cause.nbytes, cause.baseline_blocks, cause.keepers) == (250 * MIB, 2, (KEPT,))
    reason = "64.00 MiB kept by local variable best (train.py:11), of step 1"
    assert cause.reasons == (reason,)
    lines = [line.text for line in brief_failures([kept("test")])]
    at = next(i for i, line in enumerate(lines) if "model.py:29 in" in line)
    assert lines[at + 1].strip() == reason
    assert f"{' ' * 14}{reason}\n" in section(kept("test"), width=120)
    lead = "activations +250.00 MiB at model.py:29 (Tiny.forward), kept by local variable best"
    assert short_cause(kept("test")).endswith(f": {lead}")
    assert f"- `model.py:29 in Tiny.forward: return self.head(x)`: {reason}" in markdown(
        Report((kept("test"),))
    )
