"""``gpumem diff``, as a user types it: tables, limits, files that are not safe."""

from __future__ import annotations

import json
import os
import pickle

import pytest
from helpers.dumps import alloc, block, dump, frame, free, snapshot
from helpers.pages import flat
from helpers.terminal_results import matches_gold

from pytest_gpumem.sizes import MIB

HEAD = frame("/home/ann/project/model.py", 29, "Tiny.forward")
LOSS = frame("/home/ann/project/train.py", 14, "train")


@pytest.fixture
def two(here):
    """Two snapshots, of which the second has more of one line, and one that is gone."""
    old = [
        alloc(0, 100 * MIB, HEAD),
        alloc(1, 20 * MIB, LOSS),
        alloc(2, MIB, frame("b.py", 1, "f")),
    ]
    more = frame("/home/ann/project/model.py", 31, "Tiny.forward")
    new = [alloc(0, 350 * MIB, more), alloc(1, 20 * MIB, LOSS), *free(0, 350 * MIB)]
    dump(here / "a.pickle", snapshot(old, [block(0, 100 * MIB, HEAD)]))
    dump(here / "b.pickle", snapshot(new, [block(1, 20 * MIB, LOSS)]))
    return here


def test_the_lines_that_grew_are_listed(two, gpumem):
    status, out, err = gpumem("diff", "a.pickle", "b.pickle")
    assert (status, err) == (0, "")
    assert matches_gold("diff", out.rstrip("\n"))


def test_all_lines_and_the_end_can_be_asked_for(two, gpumem):
    text = flat(gpumem("diff", "a.pickle", "b.pickle", "--all", "--at-end")[1])
    assert "at the end: allocated 100.00 -> 20.00 MiB (-80.00 MiB, -80.0%)" in text
    assert "ann/project/train.py:14 (train) 0 B 20.00 MiB +20.00 MiB 0 -> 1" in text


def test_the_markdown_and_the_json_have_the_same_figures(two, gpumem):
    text = gpumem("diff", "a.pickle", "b.pickle", "--format=markdown")[1]
    row = "| `/home/ann/project/model.py:31 (Tiny.forward)` | 100.00 MiB | 350.00 MiB |"
    assert row in text
    document = json.loads(gpumem("diff", "a.pickle", "b.pickle", "--format=json")[1])
    (device,) = document["devices"]
    assert device["allocated"] == [121 * MIB, 370 * MIB]
    assert device["lines"][0]["bytes"] == [100 * MIB, 350 * MIB]
    assert [line["line"] for line in device["lines"]] == [31, 14, 1]


@pytest.mark.parametrize(("limit", "status"), [("249MiB", 0), ("248MiB", 1), ("300%", 0)])
def test_growth_fails_beyond_what_is_allowed(two, gpumem, limit, status):
    assert gpumem("diff", "a.pickle", "b.pickle", "--fail-on-growth", limit)[0] == status


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            pickle.dumps(Harmful()),
            "would call posix.mkdir, which no snapshot does",
        ),
        (pickle.dumps({"segments": [Harmful()]}), "is a pickle that would call posix.mkdir"),
        (b"(S'x'\nP0\n.", "is "),
        (pickle.dumps([1]), 'is no snapshot of PyTorch\'s allocator: it has no list of "segments"'),
        (b"not a pickle", "is not a pickle that can be read"),
        (b"", "is not a pickle that can be read (EOFError)"),
        (b"\x80\x04r\xff\xff\xff\x7f.", "is not a pickle that can be read"),
        (None, "cannot be read: No such file or directory; name a file of --gpumem-snapshots"),
    ],
)
def test_a_file_that_is_no_snapshot_runs_nothing_and_is_named(two, gpumem, content, message):
    if content is not None:
        (two / "c.pickle").write_bytes(content)
    status, out, err = gpumem("diff", "a.pickle", "c.pickle")
    assert (status, out) == (2, "")
    assert err.startswith("gpumem: c.pickle: ")
    assert message in err
    assert not (two / "harmed").exists()


def test_snapshots_without_memory_say_so(here, gpumem):
    dump(here / "a.pickle", snapshot())
    assert "neither snapshot has memory of any device" in gpumem("diff", "a.pickle", "a.pickle")[1]


def test_a_tests_own_snapshot_has_the_peak_that_was_measured(
    virtual_gpu, suite, gpumem, monkeypatch
):
    source = """
        @pytest.mark.gpu_memory
        def test_it():
            model = torch.nn.Linear(1024, 1024).cuda()
            model(torch.randn(256, 1024, device="cuda")).sum().backward()
    """
    options = ("--gpumem-snapshots=snaps", "--gpumem-snapshot-when=always", "--gpumem-json=r.json")
    session = suite.run(*options, source=source)
    assert session.ret == 0
    monkeypatch.chdir(suite.path)
    (result,) = json.loads((suite.path / "r.json").read_text())["results"]
    name = "snaps/test_it.py--test_it.pickle"
    out = gpumem("diff", name, name, "--format=json")[1]
    document = json.loads(out[out.index('{\n "format"') :])  # behind the session's output
    device = document["devices"][0]
    assert device["allocated"] == [result["measurement"]["peaks"][0]["allocated"]] * 2
    phases = {(line["path"], line["phase"]) for line in device["lines"]}
    assert phases == {("test_it.py", ""), ("test_it.py", "backward")}
