"""Pinned host memory: its peak, its limits, its baselines, and the lines that pin too much."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.torch_features import require_release

from pytest_gpumem.baselines.file_format import BaselineFile, decode, encode
from pytest_gpumem.judge.judge import judge
from pytest_gpumem.judge.verdict import Kind, Lookup, Policy
from pytest_gpumem.measurement import BaselineEntry, DeviceInfo, Measurement, Peak, Provenance
from pytest_gpumem.recording.allocator_view import VIEW, PinnedStats
from pytest_gpumem.sizes import MIB
from pytest_gpumem.spec import MemorySpec

MADE = Provenance("2.15.0", "13.2", "92600", "virtual", "")
T4 = DeviceInfo("virtual", "T4", 15_828_320_256, (7, 5), 40)
LOAD = """
def load(count, nbytes=32 << 20):
    return [torch.empty(nbytes, dtype=torch.uint8).pin_memory() for _ in range(count)]

"""


@pytest.fixture
def counted():
    require_release(2, 10, "figures of pinned memory")


def pinned(session):
    """The peaks pinned of a session with ``--gpumem-json=r.json``, by test and part, in MiB."""
    results = json.loads((session.suite.path / "r.json").read_text())["results"]
    return {
        (it["test"].partition("::")[2] if "test" in it else it["nodeid"].partition("::")[2])
        + (f" ({it['part']})" if it["part"] else ""): it["measurement"]["peaks"][0]["pinned"] / MIB
        for it in results
    }


@pytest.mark.usefixtures("counted")
def test_its_peak_is_that_of_the_test_alone_in_every_order(suite):
    source = f"""{LOAD}
KEPT = []

@pytest.fixture(scope="module")
def buffer():
    return load(1, 8 << 20)

@pytest.mark.gpu_memory
def test_three(buffer):
    load(1)
    held = load(2)
    held[0].cuda(non_blocking=True)

@pytest.mark.gpu_memory
def test_fixture_only(buffer):
    buffer[0].cuda()

@pytest.mark.gpu_memory
def test_leaves_some():
    KEPT.extend(load(1))

@pytest.mark.gpu_memory
def test_parts(gpu_memory):
    one = load(1)
    with gpu_memory.measure("more"):
        more = load(1, 16 << 20)

@pytest.mark.gpu_memory
def test_none():
    torch.ones(5).cuda().sum().item()
"""
    expected = {
        "test_three": 72.0,  # 32 MiB are used again
        "test_fixture_only": 8.0,
        "test_leaves_some": 32.0,
        "test_parts": 48.0,
        "test_parts (more)": 48.0,
        "test_none": 0.0,
    }
    suite.write("test_it.py", source)
    names = [name for name in expected if "(" not in name]
    for order in (names, names[::-1], *([name] for name in names)):
        session = suite.run("--gpumem-json=r.json", *(f"test_it.py::{name}" for name in order))
        assert pinned(session) == {
            name: size for name, size in expected.items() if name.partition(" ")[0] in order
        }


@pytest.mark.usefixtures("counted")
def test_a_doubled_load_fails_with_the_line_that_pins(suite):
    source = f"{LOAD}@pytest.mark.gpu_memory\ndef test_load():\n    weights = load(4)\n"
    session = suite.run("--gpumem-update-baselines", source=source)
    assert session.outcomes == {"passed": 1}
    (content,) = suite.baselines().values()
    assert json.loads(content)["tests"]["test_load"]["peak_pinned"] == 128 * MIB
    assert suite.run().outcomes == {"passed": 1}
    doubled = source.replace("    weights", "    again = load(4)\n    weights")
    session = suite.run(source=doubled)
    assert session.outcomes == {"failed": 1}
    assert "peak pinned grew by 128.00 MiB (+100.0%): 128.00 -> 256.00 MiB" in session.flat
    assert "256.00 MiB pinned by test_it.py:7 in load: return [torch.empty(nbytes" in session.flat
    assert "ran a second time to find which lines pin memory" in session.flat
    assert "next: if this is intended, run" in session.flat
    assert suite.run("--gpumem-update-baselines").outcomes == {"passed": 1}
    assert suite.run().outcomes == {"passed": 1}
    assert suite.run("--gpumem-shrinkage=fail", source=source).outcomes == {"failed": 1}


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("limit", ["max_pinned_gib=0.1"])
def test_limits_hold_of_a_test_and_of_a_part(suite, limit):
    session = suite.run(
        source=f"{LOAD}@pytest.mark.gpu_memory({limit})\ndef test_it(): weights = load(4)"
    )
    assert session.outcomes == {"failed": 1}
    assert f"peak pinned of 128.00 MiB is 25.60 MiB over {limit}" in session.flat
    assert "pinned by test_it.py:7 in load" in session.flat
    assert "next: try smaller buffers that are used again" in session.flat
    part = limit.replace("0.1", "0.02").replace("102.4", "20")
    session = suite.run(
        source=f"""{LOAD}@pytest.mark.gpu_memory(max_pinned_gib=1)
def test_it(gpu_memory):
    with gpu_memory.measure("load", {part}):
        load(1)
"""
    )
    assert session.outcomes == {"failed": 1}
    assert f"over {part}" in session.flat


@pytest.mark.usefixtures("counted")
def test_a_test_that_takes_host_memory_alone_is_measured(suite):
    source = f"{LOAD}@pytest.mark.gpu_memory(max_gib=1)\ndef test_it(): load(1)"
    assert suite.run("--gpumem-update-baselines", source=source).outcomes == {"passed": 1}
    assert suite.baselined() == {"test_it.py::test_it": (0, 0)}


@pytest.mark.usefixtures("counted")
def test_batches_that_a_thread_pins_ahead_are_held_to_limits_alone(suite):
    source = """
class Batches(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.zeros(1 << 20)

@pytest.mark.gpu_memory(MARK)
def test_it():
    for batch in torch.utils.data.DataLoader(Batches(), num_workers=1, pin_memory=True):
        batch.cuda(non_blocking=True)
"""
    suite.write("test_it.py", source.replace("MARK", ""))
    session = suite.run_warm("--gpumem-update-baselines")
    assert session.outcomes == {"passed": 1}
    (content,) = suite.baselines().values()
    assert "peak_pinned" not in content
    session = suite.run_warm("--gpumem-missing-baseline=fail")
    assert session.outcomes == {"passed": 1}
    assert "peak pinned is not compared: DataLoader's thread pins batches ahead" in session.flat
    suite.write("test_it.py", source.replace("MARK", "max_pinned_gib=3/1024"))
    session = suite.run_warm()
    assert session.outcomes == {"failed": 1}
    assert "MiB over max_pinned_gib=0.0029296875" in session.flat


@pytest.mark.usefixtures("counted")
def test_the_test_reads_of_it_what_it_reads_without_the_plugin(suite):
    session = suite.run(
        source=f"""{LOAD}
@pytest.mark.gpu_memory
def test_it(gpu_memory):
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    load(1)
    torch.cuda.reset_peak_host_memory_stats()
    held = load(2)
    del held
    torch.cuda.synchronize()
    torch._C._host_emptyCache()
    with gpu_memory.measure("part"):  # resets the real peaks
        load(1)
    stats = torch.cuda.host_memory_stats()
    assert stats["allocated_bytes.peak"] - before == 64 << 20, stats
"""
    )
    assert session.outcomes == {"passed": 1}


def test_an_older_torch_has_no_figure_and_refuses_limits(suite, monkeypatch):
    monkeypatch.setattr(VIEW, "pinned_stats", lambda: PinnedStats({}, {}))
    source = f"{LOAD}@pytest.mark.gpu_memory\ndef test_it(): load(1)[0].cuda()"
    session = suite.run("--gpumem-json=r.json", source=source)
    assert session.outcomes == {"passed": 1}
    assert pinned(session) == {"test_it": 0.0}
    session = suite.run(source=source.replace("gpu_memory", "gpu_memory(max_pinned_gib=1)"))
    assert session.outcomes == {"errors": 1}
    assert f"max_pinned_gib=1: torch {torch.__version__} does not report how much" in session.flat
    assert "with torch 2.10 or newer, or leave out this limit" in session.flat


# Its baselines


def measured(nbytes, **fields):
    return Measurement(T4, MADE, (Peak(8 * MIB, 20 * MIB, nbytes),), (), (), **fields)


def entry(nbytes):
    return BaselineEntry((Peak(8 * MIB, 20 * MIB, nbytes), Peak(1, 2)), MADE)


@pytest.mark.parametrize("nbytes", [0, 64 * MIB])
def test_a_file_has_the_peak_of_a_test_that_pins_memory(nbytes):
    content = encode(BaselineFile(T4, "m.py", {"test_a": {"": entry(nbytes)}}))
    assert ("peak_pinned" in content.decode()) == bool(nbytes)
    assert decode("m.json", content, T4.key, "m.py").tests["test_a"][""] == entry(nbytes)


@pytest.mark.parametrize("policy", ["note", "fail"])
def test_a_baseline_without_it_is_no_baseline_of_memory_that_is_pinned(policy):
    lookup = Lookup(BaselineEntry((Peak(8 * MIB, 20 * MIB),), MADE))
    verdict = judge(
        measured(64 * MIB), MemorySpec(), lookup, Policy(missing_baseline=policy), nodeid="test_a"
    )
    assert (verdict.kind, verdict.failed) == (Kind.NO_BASELINE, policy == "fail")
    assert verdict.headline == "no baseline: 64.00 MiB of pinned host memory"
    assert verdict.command_text == "pytest test_a --gpumem-update-baselines"
    grown = Measurement(T4, MADE, (Peak(80 * MIB, 100 * MIB, 64 * MIB),), (), ())
    assert judge(grown, MemorySpec(), lookup, Policy()).kind is Kind.REGRESSED
    shrunk = Measurement(T4, MADE, (Peak(2 * MIB, 2 * MIB, 64 * MIB),), (), ())
    assert judge(shrunk, MemorySpec(), lookup, Policy()).kind is Kind.NO_BASELINE
    assert judge(shrunk, MemorySpec(), lookup, Policy(shrinkage="fail")).kind is Kind.IMPROVED
    varying = measured(64 * MIB, pinned_count="by time")
    assert judge(varying, MemorySpec(), lookup, Policy()).kind is Kind.WITHIN


def test_a_torch_that_does_not_count_is_no_shrinkage():
    lookup = Lookup(BaselineEntry((Peak(8 * MIB, 20 * MIB, 64 * MIB),), MADE))
    now = measured(0, pinned_count="uncounted")
    verdict = judge(now, MemorySpec(), lookup, Policy(shrinkage="fail"))
    assert (verdict.kind, verdict.failed) == (Kind.WITHIN, False)
    (note,) = verdict.note_texts
    assert note == "peak pinned is not compared: torch 2.15.0 does not count pinned memory"


@pytest.mark.parametrize(
    ("nbytes", "kind"),
    [(65 * MIB, Kind.WITHIN), (65 * MIB + 1, Kind.REGRESSED), (0, Kind.IMPROVED)],
)
def test_its_tolerance_is_a_mebibyte(nbytes, kind):
    lookup = Lookup(BaselineEntry((Peak(8 * MIB, 20 * MIB, 64 * MIB),), MADE))
    assert judge(measured(nbytes), MemorySpec(), lookup, Policy()).kind is kind


@pytest.mark.usefixtures("counted")
def test_the_page_has_a_column_of_it_where_any_test_pins(suite):
    source = f"{LOAD}@pytest.mark.gpu_memory\ndef test_it(): NUMBER and load(2)"
    for number, hidden in ((1, False), (0, True)):
        suite.run("--gpumem-html=r.html", source=source.replace("NUMBER", str(number)))
        page = (suite.path / "r.html").read_text(encoding="utf-8")
        assert ('data-label="pinned">64.00<' in page) is not hidden
        assert ("no-pinned" in page.partition('<table role="table"')[2].partition(">")[0]) is hidden
        assert '<svg class="plot"' not in page  # nothing was on the device
