"""The terminal's report: whole outputs as text in gold/, and the rules that they follow.

GPUMEM_REWRITE_GOLD=1 writes the files anew; read the difference before you commit it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.noted import noted
from helpers.styled_lines import plain_text
from helpers.terminal_results import (
    BASE,
    BROKEN,
    CACHE_GREW,
    ELSEWHERE,
    GROWN,
    H200,
    MODULE,
    NASTY,
    NEW,
    NOW,
    OOM,
    OVER,
    SHRUNK,
    T4,
    TOO_LARGE,
    TOO_LARGE_BY,
    TWO_DEVICES,
    WITHIN,
    entry,
    matches_gold,
    measured,
    peak,
    result,
    section,
    sections,
)

from pytest_gpumem.baselines.store import EntryUpdate, UpdateSummary
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.judge.verdict import Kind, Lookup, UpdateCommand
from pytest_gpumem.measurement import Attribution, BaselineEntry, Breakdown, Site
from pytest_gpumem.report.model import Report
from pytest_gpumem.report.parts import session_words, update_text
from pytest_gpumem.report.terminal import session_text
from pytest_gpumem.report.terminal.summary_table import summary_table
from pytest_gpumem.report.text import printable
from pytest_gpumem.sizes import MIB
from pytest_gpumem.spec import MemorySpec

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
    text = section(one)
    assert matches_gold(f"failure_{name}", text, width=90)
    assert text.startswith(f"{one.verdict.kind.value}: ")


def test_the_command_of_a_section_stands_unbroken_on_a_line_of_its_own():
    text = section(SHRUNK, width=60)
    assert text.splitlines()[-1] == f"    {SHRUNK.verdict.command}"
    assert text.splitlines()[-2] == "next: to compare later runs with it, run"


def test_a_part_is_named_in_its_section():
    assert "\nstep: part forward, batch size 32, max_gib=8, on virtual-T4\n" in section(SHRUNK)
    part = replace(TOO_LARGE, part="backward")
    assert "\npart       backward\n" in section(part)


def test_out_of_memory_names_the_device_where_there_are_several():
    oom = replace(OOM, device_index=1)
    text = section(
        result("test", measured(peak(1, 2), peak(3, 4), out_of_memory=oom), spec=MemorySpec())
    )
    assert "\ndevice     virtual-T4, number 1\n" in text
    assert "\nbudget     only the device's memory\n" in text


def test_columns_without_anything_in_them_are_left_out():
    text = section(result("test", measured(peak(1, 2)), spec=MemorySpec()))
    assert "budget" not in text
    assert "baseline  " not in text
    assert "difference" not in text


def test_a_tests_parts_come_first_among_its_failures_and_a_command_comes_once():
    part = replace(GROWN, part="forward", nodeid=GROWN.nodeid)
    text = sections([GROWN, WITHIN, part])
    assert text.index("part forward") < text.rindex("peak allocated grew")
    assert text.count(GROWN.verdict.command_text) == 1
    assert text.rstrip().endswith(GROWN.verdict.command_text)
    assert sections([WITHIN]) == ""


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
    text = section(replace(grown, baseline_entry=was), width=width)
    assert matches_gold(f"failure_explained_{width}", text, width=width)


def test_control_characters_from_outside_are_shown_and_not_obeyed():
    nasty = replace(
        GROWN,
        nodeid=f"t.py::{NASTY}",
        part=NASTY,
        budget=NASTY,
        verdict=replace(
            NEW.verdict,
            headline=NASTY,
            notes=noted(NASTY),
            advice=f"run {NASTY}",
            command=UpdateCommand(targets=(f"t.py::{NASTY}",)),
        ),
    )
    oom = replace(
        TOO_LARGE,
        measurement=replace(TOO_LARGE.measurement, out_of_memory=replace(OOM, site=NASTY)),
    )
    entry = EntryUpdate("virtual-T4", NASTY, NASTY, NASTY, None, BASE.entry)
    for text in (
        section(nasty),
        section(oom),
        plain_text(summary_table([nasty], 2, 200)),
        printable(next_text([nasty])),
        update_text.update_summary(
            UpdateSummary(created=(entry,), errors=(BaselineError(NASTY, "b", "c"),))
        ),
        *session_text.header(None, reason=NASTY),
        session_text.header(replace(T4, name=NASTY))[0],
    ):
        assert "\\x1b[31mred\\x07\\r\\n\\u202egnp\\udcff" in text
        assert all(line.isprintable() for line in text.splitlines())


# One-liners


def test_counts_name_each_kind_in_one_line():
    spans = session_words.counts([WITHIN] * 12 + [GROWN, NEW, NEW])
    assert plain_text([spans]) == "12 ok, 1 regressed, 2 without baseline"
    assert session_words.counts([]) == []
    assert Report((GROWN, WITHIN)).counts == {Kind.WITHIN: 1, Kind.REGRESSED: 1}


def test_the_header_of_a_virtual_gpu_says_that_memory_is_predicted():
    assert session_text.header(T4) == [
        "virtual GPU T4 (14.58 GiB, capability 7.5, 40 SMs)",
        "memory is predicted; kernels do not run",
    ]


def test_the_header_of_a_real_gpu_is_the_gpu():
    assert session_text.header(H200) == ["NVIDIA H200 (139.80 GiB, capability 9.0, 132 SMs)"]


def test_the_header_gives_the_reason_where_there_is_no_device():
    assert session_text.header(None, reason="this torch is a CPU-only build") == [
        "no device, so marked tests are skipped: this torch is a CPU-only build"
    ]


# The next command


def next_text(*arguments, **options):
    """The command as it is typed."""
    return str(session_words.next_command(*arguments, **options))


def named(one, module, test):
    """A result under another name, which its command has as well."""
    nodeid = f"{module}::{test}"
    command = one.verdict.command and UpdateCommand(targets=(nodeid,))
    return replace(one, nodeid=nodeid, verdict=replace(one.verdict, command=command))


def test_the_next_command_names_few_tests_each_once_and_quoted():
    assert str(
        session_words.next_command([WITHIN, NEW, replace(NEW, part="forward"), ELSEWHERE])
    ) == (f"pytest '{MODULE}::test_new[a b]' {MODULE}::test_l4 --gpumem-update-baselines")


def test_the_next_command_names_files_where_tests_are_many_or_long():
    many = [named(NEW, "tests/test_a.py", f"test_{i}") for i in range(4)]
    assert next_text(many) == "pytest tests/test_a.py --gpumem-update-baselines"
    long = [named(NEW, "tests/test_a.py", "test_" + "x" * 120)]
    assert next_text(long) == "pytest tests/test_a.py --gpumem-update-baselines"


def test_the_next_command_names_nothing_where_files_are_many():
    many = [named(NEW, f"tests/test_{i}.py", "test") for i in range(4)]
    assert next_text(many) == "pytest --gpumem-update-baselines"
    arguments = ["my tests"]
    assert next_text(many, arguments=arguments) == ("pytest 'my tests' --gpumem-update-baselines")
    assert next_text(many[:1], arguments=arguments) == (
        "pytest tests/test_0.py::test --gpumem-update-baselines"
    )


def test_the_next_command_starts_the_ranks_as_that_of_a_test_does():
    launcher = ("torchrun", "--standalone", "--nproc-per-node=2", "-m", "pytest")
    command = UpdateCommand(launcher, ("tests/test_a.py::test_new",), ("--gpumem-card=T4",))
    new = replace(NEW, verdict=replace(NEW.verdict, command=command))
    assert session_words.next_command([new]) == command
    assert str(command.of(["a"])) == (
        "torchrun --standalone --nproc-per-node=2 -m pytest a --gpumem-card=T4 "
        "--gpumem-update-baselines"
    )


def test_the_next_command_never_covers_a_regression():
    many = [named(NEW, "tests/test_a.py", f"test_{i}") for i in range(4)]
    there, elsewhere = (named(GROWN, f"tests/test_{x}.py", "test_grown") for x in "ab")
    assert session_words.next_command([*many, there]) is None
    assert next_text([*many, elsewhere]) == ("pytest tests/test_a.py --gpumem-update-baselines")
    long = named(NEW, "tests/test_a.py", "test_" + "x" * 120)
    assert next_text([long, there]).startswith("pytest tests/test_a.py::test_xxx")
    part = replace(named(NEW, "tests/test_a.py", "test_grown"), part="forward")
    assert session_words.next_command([part, there]) is None


@pytest.mark.parametrize("one", [WITHIN, GROWN, TOO_LARGE, OVER, BROKEN])
def test_there_is_no_next_command_where_a_baseline_is_not_what_is_missing(one):
    assert session_words.next_command([one]) is None


def test_there_is_no_next_command_in_a_run_that_updates():
    assert session_words.next_command([NEW], updating=True) is None


# The summary of an update


def updated(test, old, new, part=""):
    return EntryUpdate("virtual-T4", MODULE, test, part, old, new)


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
    assert matches_gold("updates", update_text.update_summary(summary))


def test_an_update_tells_that_it_is_of_another_rank():
    old = BaselineEntry((peak(1, 2),), NOW, world_size=8, rank=0)
    new = BaselineEntry((peak(1, 2),), NOW, world_size=64, rank=3)
    summary = UpdateSummary(changed=(updated("test_mlp", old, new),))
    assert "rank: 0 of 8 -> 3 of 64" in update_text.update_summary(summary)


def test_an_update_lists_at_most_twenty_entries_of_a_group():
    created = tuple(updated(f"test_{i}", None, entry(peak(1, 1))) for i in range(23))
    lines = update_text.update_summary(UpdateSummary(created=created)).splitlines()
    assert lines[0] == "23 created"
    assert lines[-1] == "created  and 3 more"
    assert sum("::test_" in line for line in lines) == 20


def test_a_brief_update_is_its_numbers_and_errors():
    summary = UpdateSummary(created=(updated("test_it", None, entry(peak(1, 1))),))
    text = update_text.update_summary(summary, brief=True)
    assert text == "1 created"


def test_an_update_with_nothing_to_write_says_so():
    assert update_text.update_summary(UpdateSummary()) == "nothing to write"
