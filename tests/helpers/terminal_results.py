"""Results with every verdict, and a comparison of their texts with gold files."""

from __future__ import annotations

import os
from dataclasses import replace

from helpers.paths import GOLD
from pytest_gpumem.explain.lead import explain_growth
from pytest_gpumem.judge.judge import judge
from pytest_gpumem.judge.result import Result, describe_budget
from pytest_gpumem.judge.verdict import Lookup, Policy
from pytest_gpumem.measurement import (
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
from pytest_gpumem.report.terminal.failure_text import failure_section, failure_sections
from pytest_gpumem.sizes import MIB
from pytest_gpumem.spec import MemorySpec

T4 = DeviceInfo("virtual", "T4", 15_655_829_504, (7, 5), 40, context=116 * MIB)
H200 = DeviceInfo("cuda", "NVIDIA H200", 150_110_011_392, (9, 0), 132)
NOW = Provenance("2.15.0", "13.2", "9.19.0", "virtual", "")
BEFORE = replace(NOW, torch="2.14.0", cuda="13.0")
MODULE = "tests/training/test_models.py"
SPEC = MemorySpec(max_gib=8, batch_size=32)


def section(one, **how):
    """The full text of a failure."""
    return "\n".join(line.text for line in failure_section(one, **how))


def sections(results, **how):
    """The full text of a test's failures."""
    return "\n".join(line.text for line in failure_sections(results, **how))


def matches_gold(name, text, width=80):
    path = GOLD / f"{name}.txt"
    if os.environ.get("GPUMEM_REWRITE_GOLD") == "1":
        path.write_text(f"{text}\n", encoding="utf-8")
    assert text == text.strip("\n")
    assert not [line for line in text.splitlines() if line != line.rstrip() or len(line) > width]
    assert f"{text}\n" == path.read_text(encoding="utf-8"), (
        f"{path}; GPUMEM_REWRITE_GOLD=1 writes it"
    )
    return True


def peak(allocated, reserved):
    """Return a peak given in MiB."""
    return Peak(int(allocated * MIB), int(reserved * MIB))


def measured(*peaks, device=T4, **others):
    zeros = tuple(peak(0, 0) for _ in peaks)
    others = {"held": zeros, "retained": zeros, **others}
    return Measurement(device, NOW, peaks, **others)


def known(*peaks, provenance=NOW, batch_size=32):
    return Lookup(BaselineEntry(peaks, provenance, batch_size))


def result(  # noqa: PLR0913 - the parts of a result
    test, measurement, lookup=None, spec=SPEC, *, part="", module=MODULE, policy=None
):
    """A result as the plugin makes one."""
    nodeid = f"{module}::{test}"
    judged = judge(
        measurement,
        spec,
        lookup or Lookup(),
        policy or Policy(),
        nodeid=nodeid,
        explain=explain_growth,
    )
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
ELSEWHERE = result("test_l4", measured(peak(100, 120)), Lookup(other_devices=("virtual-L4",)))
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


NASTY = "\x1b[31mred\x07\r\n\u202egnp\udcff"


def entry(*peaks, batch_size=32):
    return BaselineEntry(peaks, NOW, batch_size)


LINE = Site("model.py", 29, "Tiny.forward", "return self.head(x)", "", "activations", 64 * MIB, 2)
USUAL = Breakdown({"activations": 64 * MIB, "parameters": 36 * MIB}, 0, (LINE,))


def grown(test, by=250, *, line=LINE, part=""):
    """A failed test in which a line of the model allocates ``by`` MiB more than in the baseline."""
    site = replace(line, nbytes=(64 + by) * MIB)
    now = Breakdown({"activations": site.nbytes, "parameters": 36 * MIB}, 0, (site,))
    baseline = replace(entry(peak(100, 120)), breakdowns=(USUAL,))
    measurement = replace(measured(peak(100 + by, 120 + by)), attributions=(Attribution(now),))
    judged = result(test, measurement, Lookup(baseline), part=part)
    return replace(judged, baseline_entry=baseline)
