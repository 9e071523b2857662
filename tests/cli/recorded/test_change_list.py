"""A comparison as text and as markdown: whole outputs in gold/, and their rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.command_line import BEFORE, NOW
from helpers.terminal_results import NASTY, matches_gold

from pytest_gpumem.baselines.paths import Key
from pytest_gpumem.cli.recorded import change_list as rendering
from pytest_gpumem.cli.recorded.changes import Changes, pair_entries
from pytest_gpumem.measurement import BaselineEntry, Breakdown, Peak, Site
from pytest_gpumem.sizes import MIB

MODULE = "tests/training/test_models.py"
SITE = Site(
    "models/blocks.py", 88, "Attention.forward", "q @ k", "GPT.h.*", "activations", 64 * MIB, 12
)


def key(test, part="", device="virtual-T4", module=MODULE):
    return Key(device, module, test, part)


def entry(*peaks, provenance=BEFORE, activations=0, **declared):
    found = tuple(Peak(int(a * MIB), int(r * MIB)) for a, r in peaks)
    if activations:
        site = replace(SITE, nbytes=activations * MIB)
        breakdown = Breakdown({"activations": activations * MIB}, 0, (site,))
        declared["breakdowns"] = (breakdown,)
    return BaselineEntry(found, provenance, **declared)


OLD = {
    key("test_resnet50[32]"): entry((2978.05, 3294), activations=2978),
    key("test_resnet50[32]", "forward"): entry((1000, 1010)),
    key("test_a_transformer_with_checkpointing_and_autocast[resnet50-32-fp16]"): entry((500, 520)),
    key("test_two_devices"): entry((100, 120), (90, 120)),
    key("test_gone"): entry((12.5, 20)),
    key("test_batch"): entry((12.5, 20), batch_size=8),
    key("test_same"): entry((1, 2)),
    key("test_x", module="tests/test_b.py", device="cuda-NVIDIA-H200"): entry((10, 20)),
    **{key(f"test_gpt2[{i}]"): entry((200, 220)) for i in range(4)},
}
NEW = {
    key("test_resnet50[32]"): entry((3490.05, 3806), activations=3490),
    key("test_resnet50[32]", "forward"): entry((900, 1010)),
    key("test_a_transformer_with_checkpointing_and_autocast[resnet50-32-fp16]"): entry((501, 520)),
    key("test_two_devices"): entry((100, 120), (95, 140)),
    key("test_new[a b]"): entry((70, 80)),
    key("test_batch"): entry((22.5, 30), batch_size=16),
    key("test_same"): entry((1, 2), provenance=NOW),
    key("test_x", module="tests/test_b.py", device="cuda-NVIDIA-H200"): entry((10, 40)),
    key("test_big"): entry((9, 9)),
    **{key(f"test_gpt2[{i}]"): entry((228, 248), provenance=NOW) for i in range(4)},
}


def made(**others):
    moves = tuple(pair_entries(OLD, NEW, new_oom={key("test_big")}))
    return Changes("main", "HEAD", moves, ("main has only three feet",), **others)


@pytest.mark.parametrize("across", [False, True])
def test_a_comparison_on_the_terminal(across):
    text = rendering.table(made(across=across))
    assert matches_gold("compare_across" if across else "compare", text)


def test_a_comparison_in_markdown():
    text = rendering.changes_markdown(made(across=True))
    assert matches_gold("compare_markdown", text, width=400)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_keeps_the_width(width):
    lines = rendering.table(made(), width).splitlines()
    assert max(map(len, lines)) <= width


def test_what_comes_from_outside_is_shown_and_not_obeyed():
    nasty = key(NASTY, NASTY, module=NASTY)
    changes = Changes(
        NASTY, NASTY, tuple(pair_entries({nasty: entry((1, 1))}, {nasty: entry((2, 2))})), (NASTY,)
    )
    for text in (rendering.table(changes, 200), rendering.changes_markdown(changes)):
        assert all(line.isprintable() for line in text.splitlines())
        assert "\\x1b" in text.replace("&#92;", "\\").replace("\\\\", "\\")


def test_names_are_no_markup():
    name = "test_<b>|x|`y`*z*_[a](b)@me #1"
    moves = pair_entries({}, {key(name, module="a.py"): entry((1, 1))})
    text = rendering.changes_markdown(Changes("<b>a</b>", "b|c", tuple(moves), ("<i>x</i> | y",)))
    row = next(line for line in text.splitlines() if "test&#95;" in line)
    assert row.count("|") == 5  # four columns have anything in them
    assert "<b>" not in text.replace("`<b>a</b>`", "")
    assert "\\<i\\>" in text


def test_nothing_to_compare_is_said():
    assert rendering.table(Changes("a", "b", ())) == "gpumem: a -> b: no figures"
    assert rendering.changes_markdown(Changes("a", "b", ())) == "`a` → `b`: no figures"


def test_causes_are_few():
    old = {key(f"test_{i}"): entry((10 + i, 99), activations=10 + i) for i in range(30)}
    new = {it: entry((99 + 2 * i, 99), activations=99 + 2 * i) for i, it in enumerate(old)}
    text = rendering.table(Changes("a", "b", tuple(pair_entries(old, new))))
    assert text.count("cause: ") == 11
    assert "cause: and 20 more tests" in text


def test_ten_thousand_moves_are_rendered_in_seconds():
    import time

    old = {key(f"test_{i}"): entry((10, 99)) for i in range(10_000)}
    new = {it: entry((11 + i, 99)) for i, it in enumerate(old)}
    start = time.process_time()
    changes = Changes("a", "b", tuple(pair_entries(old, new)), across=True)
    assert "test_9999 " in rendering.table(changes)
    rendering.changes_markdown(changes)
    assert time.process_time() - start < 10
