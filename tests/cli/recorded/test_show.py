"""``gpumem show``: what it finds by a name, and what it prints."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.command_line import NOW, T4, write
from helpers.pages import flat
from helpers.terminal_results import matches_gold

from pytest_gpumem.measurement import BaselineEntry, Breakdown, Peak, Site, Slope
from pytest_gpumem.sizes import MIB

SITE = Site(
    "models/blocks.py", 88, "Attention.forward", "q @ k", "GPT.h.*", "activations", 64 * MIB, 12
)
USUAL = Breakdown({"parameters": 36 * MIB, "activations": 64 * MIB}, 20 * MIB, (SITE,))
ENTRY = BaselineEntry((Peak(100 * MIB, 120 * MIB),), NOW, 32, breakdowns=(USUAL,))
TWO = BaselineEntry(
    (Peak(50 * MIB, 60 * MIB), Peak(40 * MIB, 42 * MIB)), NOW, None, 64, 3, (USUAL, USUAL)
)


@pytest.fixture
def shown(here, gpumem):
    """Baselines of several tests, on two devices."""
    write(here / "baselines", {"test_gpt[a-1]": ENTRY, "test_gpt_two": TWO, "test_x": (7, 8)})
    write(here / "baselines", {"test_gpt[a-1]": (90, 99)}, device=replace(T4, name="L4"))
    write(here / "baselines", {"test_other": (1, 2)}, module="tests/test_b.py")
    return gpumem


def test_a_test_is_shown_with_its_breakdown_on_each_device(shown):
    status, out, err = shown("show", "tests/test_a.py::test_gpt[a-1]")
    assert (status, err) == (0, "")
    assert matches_gold("show", out.rstrip("\n"))


def test_how_it_grows_is_shown(here, gpumem):
    slope = Slope((4, 8), 40 * MIB, 3 * MIB)
    write(here / "baselines", {"test_gpt": replace(ENTRY, slope=slope)})
    text = flat(gpumem("show", "test_gpt")[1])
    assert "3.00 MiB a sample and 40.00 MiB fixed, over batch sizes 4, 8" in text


def test_several_devices_of_a_test_each_have_their_own(shown):
    text = flat(shown("show", "test_gpt_two")[1])
    assert "rank 3 of 64" in text
    assert "device 0 50.00 MiB 60.00 MiB device 1 40.00 MiB 42.00 MiB" in text
    assert "at the peak, device 0" in text
    assert "allocated by, device 1" in text


@pytest.mark.parametrize(
    ("wanted", "listed"),
    [
        ("tests/test_a.py", {"test_gpt[a-1]", "test_gpt_two", "test_x"}),
        ("gpt", {"test_gpt[a-1]", "test_gpt_two"}),
        ("./tests/test_b.py::test_other", {"test_other"}),
    ],
)
def test_a_file_or_a_part_of_a_name_lists_what_it_means(shown, wanted, listed):
    status, out, _ = shown("show", wanted)
    assert status == 0
    every = {"test_gpt[a-1]", "test_gpt_two", "test_x", "test_other"}
    assert {name for name in every if name in out} == listed


def test_without_a_name_all_are_listed(shown):
    status, out, _ = shown("show")
    assert status == 0
    assert out.startswith("Baselines of 4 tests: peak memory in MiB\n")
    text = flat(out)
    assert "tests/test_a.py on virtual-L4 test_gpt[a-1] 90.00 99.00" in text
    assert "test_gpt[a-1] 100.00 120.00 32" in text
    assert "test_gpt_two 50.00 60.00 3 of 64 2" in text


def test_one_device_alone(shown):
    assert "virtual-T4" not in shown("show", "--device", "virtual-L4")[1]
    status, out, err = shown("show", "--device", "T4")
    assert (status, out) == (2, "")
    assert "--device=T4: this device has no baselines; these have: virtual-L4, virtual-T4" in err


def test_parts_stand_below_their_test(here, gpumem):
    from pytest_gpumem.baselines.store import BaselineStore, NewBaseline

    entry = BaselineEntry((Peak(MIB, MIB),), NOW)
    change = NewBaseline(
        T4, "test_a.py", "test_it", {"": entry, "forward": entry, "back\x1b": entry}
    )
    assert not BaselineStore(here / "baselines").update([change]).errors
    out = gpumem("show")[1]
    assert "  test_it\x20" in out
    assert "    (forward)" in out
    assert "    (back\\x1b)" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["test_gtp"], "test_gtp: no test with a baseline has this text in its name; these do: "),
        (["zzz"], "zzz: no test with a baseline has this text in its name; gpumem show lists all"),
        (["--baseline-dir", "absent"], "absent: there are no baselines; record some with"),
    ],
)
def test_what_is_not_there_is_one_line_and_exit_status_2(shown, arguments, said):
    status, out, err = shown("show", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"gpumem: {said}")
    assert err.count("\n") == 1


def test_the_default_folder_that_is_not_there_says_where_to_look(here, gpumem):
    said = gpumem("show")[2]
    assert "baselines: there are no baselines; record some with pytest --gpumem-update" in said
    assert "run gpumem from pytest's root folder" in said


def test_a_broken_file_is_named_and_the_rest_shown(shown, here):
    (here / "baselines/virtual-T4/tests/test_b.json").write_text("{")
    status, out, err = shown("show")
    assert status == 2
    assert "test_b.json: is not JSON" in err
    assert "test_gpt_two" in out
