"""The terminal's report: whole outputs as text in gold/, and the rules that they follow.

GPUMEM_REWRITE_GOLD=1 writes the files anew; read the difference before you commit it.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpumem.baseline import EntryUpdate, UpdateSummary
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.judging import judge
from pytest_gpumem.records import (
    Attribution,
    BaselineEntry,
    Breakdown,
    DeviceInfo,
    Measurement,
    OutOfMemory,
    Peak,
    Provenance,
    Site,
)
from pytest_gpumem.report import terminal
from pytest_gpumem.report.model import Report, Result, describe_budget
from pytest_gpumem.report.table import FEW_ROWS, summary_table
from pytest_gpumem.report.text import shortened
from pytest_gpumem.sizes import MIB
from pytest_gpumem.spec import MemorySpec
from pytest_gpumem.verdict import Kind, Lookup, Policy, Verdict

GOLD = Path(__file__).parent / "gold"
T4 = DeviceInfo("virtual", "T4", 15_655_829_504, (7, 5), 40, context=116 * MIB)
H200 = DeviceInfo("cuda", "NVIDIA H200", 150_110_011_392, (9, 0), 132)
NOW = Provenance("2.15.0", "13.2", "9.19.0", "virtual", "")
BEFORE = replace(NOW, torch="2.14.0", cuda="13.0")
MODULE = "tests/training/test_models.py"
SPEC = MemorySpec(max_gib=8, batch_size=32)


def matches_gold(name, text, width=80):
    path = GOLD / f"{name}.txt"
    if os.environ.get("GPUMEM_REWRITE_GOLD") == "1":
        path.write_text(f"{text}\n", encoding="utf-8")
    assert text == text.strip("\n")
    assert not [line for line in text.splitlines() if line != line.rstrip() or len(line) > width]
    return f"{text}\n" == path.read_text(encoding="utf-8")


def peak(allocated, reserved):
    """A peak from MiB."""
    return Peak(int(allocated * MIB), int(reserved * MIB))


def measured(*peaks, device=T4, **others):
    zeros = tuple(peak(0, 0) for _ in peaks)
    others = {"held": zeros, "retained": zeros, **others}
    return Measurement(device, NOW, peaks, **others)


def known(*peaks, provenance=NOW, batch_size=32):
    return Lookup(BaselineEntry(peaks, provenance, batch_size))


def result(  # noqa: PLR0913 - as many things make a result
    test, measurement, lookup=None, spec=SPEC, *, part="", module=MODULE, policy=None
):
    """A result as the plugin makes one."""
    nodeid = f"{module}::{test}"
    judged = judge(measurement, spec, lookup or Lookup(), policy or Policy(), nodeid=nodeid)
    budget = describe_budget(spec)
    return Result(nodeid, judged, measurement, part, spec.batch_size, budget, (module, 12))


OOM = OutOfMemory(
    requested=512 * MIB,
    allocated=7987 * MIB,
    reserved=8180 * MIB,
    site="examples/test_mlp.py:31 in step",
)
BASE = known(peak(2978.05, 3294))
WITHIN = result("test_resnet50", measured(peak(2978.05, 3294)), BASE)
GROWN = result(
    "test_resnet50[32]",
    measured(peak(3490.05, 3806)),
    known(peak(2978.05, 3294), provenance=BEFORE),
)
CACHE_GREW = result("test_gpt2", measured(peak(2978.05, 3394), alloc_retries=2), BASE)
SHRUNK = result(
    "test_a_transformer_with_checkpointing_and_autocast[resnet50-32-fp16]",
    measured(peak(1978.05, 2294)),
    known(peak(2978.05, 3294), provenance=BEFORE),
    part="forward",
)
NEW = result("test_new[a b]", measured(peak(100, 120)))
ELSEWHERE = result("test_l4", measured(peak(100, 120)), Lookup(others=("virtual-L4",)))
BROKEN = result(
    "test_broken",
    measured(peak(100, 120)),
    Lookup(
        error="baselines/virtual-T4/tests/training/test_models.json: line 12 is a merge conflict "
        "marker; resolve the conflict or restore the file"
    ),
)
OVER = result(
    "test_vgg16",
    measured(peak(7987, 8480)),
    BASE,
    MemorySpec(max_gib=8, max_allocated_gib=4.5, batch_size=32),
)
TOO_LARGE = result(
    "test_mlp[64]", measured(peak(7987, 8180), out_of_memory=OOM), BASE, MemorySpec(max_gib=8)
)
TOO_LARGE_BY = result(
    "test_mlp[128]",
    measured(peak(7987, 8180), out_of_memory=replace(OOM, needed=peak(9300, 9534))),
    BASE,
)
TWO_DEVICES = result(
    "test_pipeline",
    measured(peak(100, 120), peak(1000, 1120), held=(peak(0, 0), peak(8.125, 20))),
    known(peak(100, 120), peak(900, 1020), batch_size=None),
    MemorySpec(devices=2),
)
ALL = [
    WITHIN,
    GROWN,
    CACHE_GREW,
    TOO_LARGE,
    TOO_LARGE_BY,
    OVER,
    NEW,
    SHRUNK,
    ELSEWHERE,
    BROKEN,
    TWO_DEVICES,
]


# A failed test's section


@pytest.mark.parametrize(
    ("name", "one"),
    [
        ("regressed", GROWN),
        ("regressed_reserved_only", CACHE_GREW),
        ("regressed_two_devices", TWO_DEVICES),
        ("over_budget", OVER),
        ("out_of_memory", TOO_LARGE),
        ("out_of_memory_needed", TOO_LARGE_BY),
        ("broken_baseline", BROKEN),
        ("no_baseline", NEW),
    ],
)
def test_a_failed_test_has_a_section_that_leads_with_the_cause(name, one):
    text = terminal.failure(one)
    assert matches_gold(f"failure_{name}", text, width=90)
    assert text.startswith(f"{one.verdict.kind.value}: ")


def test_the_command_of_a_section_stands_unbroken_on_a_line_of_its_own():
    text = terminal.failure(SHRUNK, width=60)
    assert text.splitlines()[-1] == f"    {SHRUNK.verdict.command}"
    assert text.splitlines()[-2] == "next: to hold later runs to it, run"


def test_a_part_is_named_in_its_section():
    assert "\nstep: part forward, batch size 32, max_gib=8, on virtual-T4\n" in terminal.failure(
        SHRUNK
    )
    part = replace(TOO_LARGE, part="backward")
    assert "\npart       backward\n" in terminal.failure(part)


def test_out_of_memory_names_the_device_where_there_are_several():
    oom = replace(OOM, device_index=1)
    text = terminal.failure(
        result("test", measured(peak(1, 2), peak(3, 4), out_of_memory=oom), spec=MemorySpec())
    )
    assert "\ndevice     virtual-T4, number 1\n" in text
    assert "\nbudget     none but the device's memory\n" in text


def test_columns_without_anything_in_them_are_left_out():
    text = terminal.failure(result("test", measured(peak(1, 2)), spec=MemorySpec()))
    assert "budget" not in text
    assert "baseline  " not in text
    assert "difference" not in text


# The table


@pytest.mark.parametrize(("verbosity", "name"), [(0, "default"), (2, "vv")])
def test_the_table_says_more_with_each_v(verbosity, name):
    assert matches_gold(f"summary_{name}", summary_table(ALL, verbosity, 80))


def test_the_table_is_grouped_where_there_are_several_devices_or_files():
    there = result("test_h200", measured(peak(100, 120), device=H200))
    part = replace(NEW, part="forward")
    elsewhere = replace(NEW, nodeid="tests/test_other.py::test_with_a_name", part="alone")
    text = summary_table([NEW, part, there, elsewhere], 0, 80)
    assert matches_gold("summary_devices", text)


@pytest.mark.parametrize("verbosity", [-1, -2])
def test_quiet_has_no_table(verbosity):
    assert summary_table(ALL, verbosity, 80) == ""


def test_many_results_list_those_that_are_not_within_unless_asked():
    few = [replace(WITHIN, nodeid=f"t.py::test_{i}") for i in range(FEW_ROWS)]
    assert "test_24" in summary_table(few, 0, 80)
    many = [*few, GROWN]
    text = summary_table(many, 0, 80)
    assert "test_24" not in text
    assert "(1 of 26, the others are within; -v lists them)" in " ".join(text.split())
    assert "test_24" in summary_table(many, 1, 80)
    assert summary_table([*few, WITHIN], 0, 80) == ""
    assert summary_table([], 2, 80) == ""


def test_tests_of_several_modules_are_named_with_them():
    there = replace(WITHIN, nodeid="t.py::test_there")
    text = summary_table([WITHIN, there], 0, 80)
    assert "\nt.py\n  test_there " in text
    assert text.startswith("Peak memory in MiB on virtual-T4\n")


def test_a_tests_parts_come_first_among_its_failures_and_a_command_comes_once():
    part = replace(GROWN, part="forward", nodeid=GROWN.nodeid)
    text = terminal.failures([GROWN, WITHIN, part])
    assert text.index("part forward") < text.rindex("peak allocated grew")
    assert text.count(GROWN.verdict.command) == 1
    assert text.rstrip().endswith(GROWN.verdict.command)
    assert terminal.failures([WITHIN]) == ""


ATTENTION = Site(
    "models/blocks.py",
    88,
    "Attention.forward",
    "q @ k",
    "GPT.h.*.attn",
    "activations",
    64 * MIB,
    12,
)
WEIGHTS = Site("model.py", 10, "Net", "nn.Linear(9, 9)", "Net.fc", "parameters", 36 * MIB, 2)
USUAL = Breakdown({"parameters": 36 * MIB, "activations": 64 * MIB}, 20 * MIB, (ATTENTION, WEIGHTS))


@pytest.mark.parametrize("width", [80, 120])
def test_where_growth_comes_from_is_told(width):
    now = Breakdown(
        {"parameters": 36 * MIB, "activations": 576 * MIB},
        10 * MIB,
        (replace(ATTENTION, nbytes=576 * MIB, line=91), WEIGHTS),
    )
    was = replace(entry(peak(100, 120)), breakdowns=(USUAL,))
    measurement = replace(measured(peak(612, 622)), attributions=(Attribution(now),))
    grown = result("test_it", measurement, Lookup(was))
    text = terminal.failure(replace(grown, baseline_entry=was), width=width)
    assert matches_gold(f"failure_explained_{width}", text, width=width)


def test_what_failed_as_its_xfail_says_is_told_apart():
    expected = replace(TOO_LARGE, expected=True)
    assert "out of memory (xfail)" in summary_table([expected], 0, 80)
    assert (
        terminal.counts([TOO_LARGE, expected, WITHIN])
        == "gpumem: 1 within, 2 out of memory (1 as expected)"
    )


@pytest.mark.parametrize("width", [80, 90, 120, 200])
def test_the_table_fits_the_width_and_uses_it(width):
    widest = max(map(len, summary_table(ALL, 1, width).splitlines()))
    natural = max(map(len, summary_table(ALL, 1, 1000).splitlines()))
    assert widest == min(width, natural)


def test_a_narrow_terminal_leaves_a_name_its_end():
    assert "…st_resnet50 " in summary_table(ALL, 1, 20)


def test_nothing_but_ascii_where_asked():
    named = replace(GROWN, nodeid=f"{MODULE}::test_größe_" + "x" * 80)
    for text in (
        summary_table([named], 2, 80, ascii_only=True),
        terminal.failure(replace(GROWN, part="größe"), ascii_only=True),
    ):
        assert text.isascii()
    assert "...xxx" in summary_table([named], 2, 80, ascii_only=True)


NASTY = "\x1b[31mred\x07\r\n\u202egnp\udcff"


def test_control_characters_from_outside_are_shown_and_not_obeyed():
    nasty = replace(
        GROWN,
        nodeid=f"t.py::{NASTY}",
        part=NASTY,
        budget=NASTY,
        verdict=replace(
            NEW.verdict, headline=NASTY, notes=(NASTY,), remedy=f"run {NASTY}", command=NASTY
        ),
    )
    oom = replace(
        TOO_LARGE,
        measurement=replace(TOO_LARGE.measurement, out_of_memory=replace(OOM, site=NASTY)),
    )
    entry = EntryUpdate("virtual-T4", NASTY, NASTY, NASTY, None, BASE.entry)
    for text in (
        terminal.failure(nasty),
        terminal.failure(oom),
        summary_table([nasty], 2, 200),
        terminal.next_command([nasty]),
        terminal.update_summary(
            UpdateSummary(created=(entry,), errors=(BaselineError(NASTY, "b", "c"),))
        ),
        terminal.header(None, reason=NASTY),
        terminal.header(replace(T4, name=NASTY)),
        terminal.header(H200, driver=NASTY),
    ):
        assert "\\x1b[31mred\\x07\\r\\n\\u202egnp\\udcff" in text
        assert all(line.isprintable() for line in text.splitlines())


def test_a_shortened_name_counts_columns_and_not_characters():
    assert shortened("測" * 40, 12) == "…測測測測測"
    assert shortened("e\u0301" * 12, 12) == "e\u0301" * 12
    assert shortened("x" * 13, 12) == "…" + "x" * 11


@pytest.mark.parametrize(
    ("used", "percent"), [(8192, "100%"), (8191.99, "99%"), (8192.01, "101%"), (0.01, "0%")]
)
def test_use_of_a_budget_is_never_rounded_across_it(used, percent):
    text = summary_table([result("test", measured(peak(0, used)))], 1, 80)
    assert f" {percent} " in text


def test_out_of_memory_shows_more_than_what_it_got_where_its_need_is_unknown():
    text = summary_table([TOO_LARGE], 0, 80)
    assert ">7987.00" in text
    assert ">8180.00" in text
    assert ">100%" in text
    assert ">" not in summary_table([TOO_LARGE_BY], 0, 80)


def test_a_result_without_a_measurement_is_listed():
    bare = Result("t.py::test", Verdict(Kind.LEAKED, failed=True, headline="leaked: 1.00 MiB"))
    assert "leaked" in summary_table([bare], 2, 80)
    assert terminal.failure(bare).startswith("leaked: 1.00 MiB\n")


def test_notes_of_passing_tests_are_told_once_with_their_number():
    moved = result(
        "test_a", measured(peak(2978.05, 3294)), known(peak(2978.05, 3294), provenance=BEFORE)
    )
    text = summary_table([moved, moved, GROWN], 1, 200)
    assert text.count("baseline made with torch 2.14.0") == 1
    assert "measured with torch 2.15.0, CUDA 13.2 (2 tests)" in text
    noisy = [
        result(f"test_{i}", measured(peak(1, 1), notes=(f"note {i}",)), known(peak(1, 1)))
        for i in range(12)
    ]
    assert summary_table(noisy, 1, 80).endswith("\nnote: and 2 more kinds of notes")


def test_different_provenances_are_told_apart():
    other = replace(WITHIN, measurement=replace(WITHIN.measurement, provenance=BEFORE))
    text = summary_table([WITHIN, WITHIN, other], 2, 200)
    assert "made with: torch 2.15.0, CUDA 13.2, cuDNN 9.19.0, driver virtual, " in text
    assert "allocator settings none (2 tests)\nmade with: torch 2.14.0" in text


def test_ten_thousand_tests_are_listed_in_seconds():
    """About 1.3 s of CPU on a slow core; what grows with the square takes minutes."""
    many = [replace(GROWN, nodeid=f"{MODULE}::test_{i}") for i in range(10_000)]
    start = time.process_time()
    text = summary_table(many, 1, 80)
    assert time.process_time() - start < 6
    assert "test_9999 " in text


# One-liners


def test_counts_name_each_kind_in_one_line():
    assert terminal.counts([WITHIN] * 12 + [GROWN, NEW, NEW]) == (
        "gpumem: 12 within, 1 regressed, 2 without baseline"
    )
    assert terminal.counts([]) == ""
    assert Report((GROWN, WITHIN)).counts == {Kind.WITHIN: 1, Kind.REGRESSED: 1}


def test_the_header_of_a_virtual_gpu_says_that_memory_is_predicted():
    assert terminal.header(T4) == (
        "gpumem: virtual GPU T4 (14.58 GiB, capability 7.5, 40 SMs)\n"
        "gpumem: memory is predicted, kernels do not run"
    )


def test_the_header_of_a_real_gpu_names_its_driver():
    assert terminal.header(H200, driver="580.65.06") == (
        "gpumem: NVIDIA H200 (139.80 GiB, capability 9.0, 132 SMs), driver 580.65.06"
    )


def test_the_header_gives_the_reason_where_there_is_no_device():
    assert terminal.header(None, reason="this torch is a CPU-only build") == (
        "gpumem: no device, marked tests are skipped: this torch is a CPU-only build"
    )


# The next command


def named(one, module, test):
    """A result under another name."""
    return replace(one, nodeid=f"{module}::{test}")


def test_the_next_command_names_few_tests_each_once_and_quoted():
    assert terminal.next_command([WITHIN, NEW, replace(NEW, part="forward"), ELSEWHERE]) == (
        f"pytest '{MODULE}::test_new[a b]' {MODULE}::test_l4 --gpumem-update-baselines"
    )


def test_the_next_command_names_files_where_tests_are_many_or_long():
    many = [named(NEW, "tests/test_a.py", f"test_{i}") for i in range(4)]
    assert terminal.next_command(many) == "pytest tests/test_a.py --gpumem-update-baselines"
    long = [named(NEW, "tests/test_a.py", "test_" + "x" * 120)]
    assert terminal.next_command(long) == "pytest tests/test_a.py --gpumem-update-baselines"


def test_the_next_command_names_nothing_where_files_are_many():
    many = [named(NEW, f"tests/test_{i}.py", "test") for i in range(4)]
    assert terminal.next_command(many) == "pytest --gpumem-update-baselines"


def test_the_next_command_never_covers_a_regression():
    many = [named(NEW, "tests/test_a.py", f"test_{i}") for i in range(4)]
    there, elsewhere = (named(GROWN, f"tests/test_{x}.py", "test_grown") for x in "ab")
    assert terminal.next_command([*many, there]) is None
    assert terminal.next_command([*many, elsewhere]) == (
        "pytest tests/test_a.py --gpumem-update-baselines"
    )
    long = named(NEW, "tests/test_a.py", "test_" + "x" * 120)
    assert terminal.next_command([long, there]).startswith("pytest tests/test_a.py::test_xxx")
    part = replace(named(NEW, "tests/test_a.py", "test_grown"), part="forward")
    assert terminal.next_command([part, there]) is None


@pytest.mark.parametrize("one", [WITHIN, GROWN, TOO_LARGE, OVER, BROKEN])
def test_there_is_no_next_command_where_a_baseline_is_not_what_is_missing(one):
    assert terminal.next_command([one]) is None


def test_there_is_no_next_command_in_a_run_that_updates():
    assert terminal.next_command([NEW], updating=True) is None


# The summary of an update


def updated(test, old, new, part=""):
    return EntryUpdate("virtual-T4", MODULE, test, part, old, new)


def entry(*peaks, batch_size=32):
    return BaselineEntry(peaks, NOW, batch_size)


def test_an_update_tells_every_change_with_its_difference():
    grown = updated(
        "test_mlp[64]", entry(peak(2978.05, 3294)), entry(peak(3490.05, 3294)), "forward"
    )
    shrunk = updated("test_gpt2", entry(peak(12000, 13000)), entry(peak(11990, 12000)))
    batch = updated("test_mlp", entry(peak(1, 2)), entry(peak(1, 2), batch_size=64))
    spread = updated("test_two", entry(peak(100, 120)), entry(peak(60, 70), peak(50, 60)))
    summary = UpdateSummary(
        created=(updated("test_new[a b]", None, entry(peak(100, 120))),),
        changed=(grown, shrunk, batch, spread),
        unchanged=(updated("test_resnet50", entry(peak(1, 1)), entry(peak(1, 1))),) * 12,
        removed=(updated("test_mlp", entry(peak(1, 1)), None, "backward"),),
        errors=(
            BaselineError(
                "baselines/virtual-T4/tests/test_x.json",
                "line 3 is a merge conflict marker",
                "resolve the conflict or restore the file",
            ),
        ),
    )
    assert matches_gold("updates", terminal.update_summary(summary))


def test_an_update_tells_that_it_is_of_another_rank():
    old = BaselineEntry((peak(1, 2),), NOW, world_size=8, rank=0)
    new = BaselineEntry((peak(1, 2),), NOW, world_size=64, rank=3)
    summary = UpdateSummary(changed=(updated("test_mlp", old, new),))
    assert "rank: 0 of 8 -> 3 of 64" in terminal.update_summary(summary)


def test_an_update_lists_at_most_twenty_entries_of_a_group():
    created = tuple(updated(f"test_{i}", None, entry(peak(1, 1))) for i in range(23))
    lines = terminal.update_summary(UpdateSummary(created=created)).splitlines()
    assert lines[0] == "gpumem: baselines: 23 created"
    assert lines[-1] == "created  and 3 more"
    assert sum("::test_" in line for line in lines) == 20


def test_a_brief_update_is_its_numbers_and_errors():
    summary = UpdateSummary(created=(updated("test_it", None, entry(peak(1, 1))),))
    text = terminal.update_summary(summary, brief=True)
    assert text == "gpumem: baselines: 1 created"


def test_an_update_with_nothing_to_write_says_so():
    assert terminal.update_summary(UpdateSummary()) == "gpumem: baselines: nothing to write"
