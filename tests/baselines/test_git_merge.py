"""Baselines of two branches: git merges what changed in different tests of one file."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.command_line import NOW, T4, write
from helpers.git import commit, git

from pytest_gpumem.baselines.store import BaselineStore
from pytest_gpumem.cli.recorded.folder import read_folder
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.measurement import BaselineEntry, Breakdown, Peak, Site
from pytest_gpumem.sizes import MIB

FILE = Path("baselines/virtual-T4/tests/test_a.json")
NAMES = [f"test_{letter}" for letter in "bcdefgh"]


def entry(mib, *, autocast=None, provenance=NOW):
    """A baseline with a breakdown."""
    site = Site("model.py", 29, "Net.forward", "x = f(x)", "Net", "activations", mib * MIB, 1)
    breakdown = Breakdown({"activations": mib * MIB}, 0, (site,), autocast=autocast)
    return BaselineEntry((Peak(mib * MIB, 2 * mib * MIB),), provenance, breakdowns=(breakdown,))


@pytest.fixture
def branches(here):
    """Change the tests of one file on two branches, and merge them."""
    git("init", "-q", "-b", "main")
    write(here / "baselines", {name: entry(10) for name in NAMES})
    commit("one")

    def merge(ours, theirs):
        git("checkout", "-qb", "topic")
        write(here / "baselines", theirs)
        commit("theirs")
        git("checkout", "-q", "main")
        write(here / "baselines", ours)
        commit("ours")
        names = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", *names, "merge", "-q", "-m", "merge", "topic"]
        return subprocess.run(command, check=False, capture_output=True).returncode

    return merge


def peaks():
    figures = read_folder(Path("baselines"))
    assert figures.errors == []
    return {key.test: entry.peaks[0].allocated // MIB for key, entry in figures.entries.items()}


@pytest.mark.parametrize(("ours", "theirs"), [("test_b", "test_h"), ("test_d", "test_e")])
def test_other_tests_of_a_file_are_merged(branches, ours, theirs):
    """Also neighbours: between their figures are lines that neither changes."""
    assert branches({ours: entry(20)}, {theirs: entry(30)}) == 0
    assert peaks() == {**dict.fromkeys(NAMES, 10), ours: 20, theirs: 30}


def test_new_tests_are_merged_where_they_have_other_places(branches):
    assert branches({"test_a": entry(20)}, {"test_i": entry(30)}) == 0
    assert peaks() == {**dict.fromkeys(NAMES, 10), "test_a": 20, "test_i": 30}


def test_a_newer_toolchain_on_both_sides_is_merged(branches):
    newer = replace(NOW, torch="2.16.0")
    ours = {"test_b": entry(20, provenance=newer, autocast=False)}
    theirs = {"test_h": entry(30, provenance=newer, autocast=False)}
    assert branches(ours, theirs) == 0
    assert peaks() == {**dict.fromkeys(NAMES, 10), "test_b": 20, "test_h": 30}


def test_a_test_that_both_changed_is_a_conflict_that_is_named_and_ended(branches):
    assert branches({"test_d": entry(20)}, {"test_d": entry(30)}) == 1
    with pytest.raises(BaselineError) as caught:
        BaselineStore(Path("baselines")).get(T4.key, "tests/test_a.py", "test_d")
    assert f"{FILE}: has a merge-conflict marker (<<<<<<<) in line " in str(caught.value)
    assert "take one side (git checkout --ours FILE, or --theirs)" in str(caught.value)
    git("checkout", "-q", "--theirs", str(FILE))
    assert peaks()["test_d"] == 30
