"""Sample results for the page's tests and its benchmark: every verdict, and names with markup."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from helpers.noted import noted
from pytest_gpumem.baselines.store import EntryUpdate, UpdateSummary
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.explain.lead import explain_growth
from pytest_gpumem.explain.timeline import course_of
from pytest_gpumem.judge.judge import judge
from pytest_gpumem.judge.result import Result, describe_budget
from pytest_gpumem.judge.verdict import Lookup, Policy
from pytest_gpumem.measurement import (
    CATEGORIES,
    Attribution,
    BaselineEntry,
    Breakdown,
    DeviceInfo,
    Measurement,
    OutOfMemory,
    Peak,
    Phase,
    Provenance,
    Site,
    Timeline,
)
from pytest_gpumem.report.model import Report
from pytest_gpumem.sizes import MIB
from pytest_gpumem.spec import MemorySpec

T4 = DeviceInfo("virtual", "T4", 15_655_829_504, (7, 5), 40, context=116 * MIB)
H100 = DeviceInfo("virtual", "H100", 84_929_347_584, (9, 0), 132, context=520 * MIB)
NOW = Provenance("2.15.0+cu132", "13.2", "9.26.0", "virtual", "")
BEFORE = replace(NOW, torch="2.14.0+cu130", cuda="13.0")
MODULE = "tests/training/test_models.py"
EVIL = 'test_<script>alert(1)</script>["\x1b[31m&\u202e</template>]'
SEGMENT = 20 * MIB


def timeline(layers=12, scale=1.0, retained=0):  # noqa: C901 - a step from beginning to end
    """The timeline of a GPT's step; the backward pass does not free ``retained`` MiB."""
    mib = dict.fromkeys(CATEGORIES, 0.0)
    mib.update({"parameters": 475, "buffers": 12, "optimizer state": 950, "workspaces": 8})
    points, phases = [], []

    def point(**change):
        for name, amount in change.items():
            mib[name.replace("_", " ")] += amount
        points.append({name: int(scale * size * MIB) for name, size in mib.items()})

    def phase(name, start):
        phases.append(Phase(name, start, len(points)))

    point()
    point(batch_data=2)
    start = len(points)
    point(activations=48)
    for _ in range(layers):
        for size, spike in ((24, 0), (72, 24), (48, 96), (24, 0), (96, 48), (24, 0)):
            point(activations=size, temporaries=spike)
            if spike:
                point(temporaries=-spike)
    point(activations=785)
    phase("forward", start)
    start = len(points)
    point(temporaries=785)
    point(activations=-785)
    point(temporaries=-785, gradients=147)
    for _ in range(layers):
        for size, spike in ((24, 48), (96, 96), (24, 0), (48, 96), (72, 48), (24, 24)):
            point(temporaries=spike, gradients=4.5)
            point(activations=-size, temporaries=-spike)
    point(activations=-48 + retained)
    phase("backward", start)
    start = len(points)
    for size in (147, 3, 96, 96, 96):
        point(temporaries=size)
        point(temporaries=-size)
    phase("optimizer", start)
    point(gradients=-mib["gradients"])
    totals = [sum(one.values()) for one in points]
    reserved, most = [], 0
    for total in totals:
        most = max(most, -(-total // SEGMENT) * SEGMENT + SEGMENT)
        reserved.append(most)
    kept = [name for name in CATEGORIES if any(one[name] for one in points)]
    places = ("src/model.py:88 in Attention.forward", "src/model.py:141 in MLP.forward")
    return Timeline(
        {name: tuple(one[name] for one in points) for name in kept},
        tuple(reserved),
        tuple(phases),
        totals.index(max(totals)),
        places,
        tuple(index % 3 - 1 for index in range(len(points))),
    )


LINES = (
    ("src/model.py", 88, "Attention.forward", "att = (q @ k.transpose(-2, -1)) * self.scale", 0.42),
    ("src/model.py", 141, "MLP.forward", "x = self.gelu(self.c_fc(x))", 0.31),
    ("src/model.py", 90, "Attention.forward", "att = F.softmax(att, dim=-1)", 0.19),
    ("src/model.py", 171, "GPT.forward", "x = self.transformer.drop(tok + pos)", 0.08),
)
OWNERS = {
    "parameters": ("src/model.py", 41, "GPT.__init__", "self.lm_head = nn.Linear(n_embd, vocab)"),
    "optimizer state": ("tests/training/test_models.py", 33, "step", "optimizer.step()"),
    "gradients": ("tests/training/test_models.py", 32, "step", "loss.backward()"),
    "temporaries": ("src/model.py", 189, "GPT.forward", "loss = F.cross_entropy(logits, targets)"),
}


def breakdown(of, sites=True):
    """The breakdown at a timeline's peak, with its source lines."""
    held = {name: values[of.peak] for name, values in of.categories.items() if values[of.peak]}
    found = []
    for name, size in held.items():
        if name == "activations":
            found += [
                Site(*line, "GPT.transformer.h.*.attn", name, int(size * share), 12)
                for *line, share in LINES
            ]
        elif name in OWNERS:
            found.append(Site(*OWNERS[name], "", name, size, 148))
        else:
            found.append(Site("", 0, "", "", "", name, size, 3))
    found.sort(key=lambda site: -site.nbytes)
    total = sum(held.values())
    levels = [sum(column) for column in zip(*of.categories.values(), strict=True)]
    course = course_of(range(len(levels)), [0, *levels])
    kept = tuple(found) if sites else ()
    return Breakdown(held, of.reserved[of.peak] - total, kept, course=course)


def attribution(**how):
    """The attribution of a peak, with its timeline."""
    line = timeline(**how)
    return Attribution(breakdown(line), line)


def peak(of):
    """Return the peak that an attribution explains."""
    return Peak(sum(of.breakdown.categories.values()), max(of.timeline.reserved))


def measured(*found, device=T4, **others):
    """A measurement with attributions."""
    peaks = tuple(map(peak, found))
    zeros = tuple(Peak(0, 0) for _ in peaks)
    others = {"held": zeros, "retained": zeros, "segments": 61, "attributions": found, **others}
    return Measurement(device, NOW, peaks, **others)


def entry(*found, provenance=NOW, batch_size=8):
    """A baseline with breakdowns."""
    broken = tuple(it.breakdown for it in found)
    return BaselineEntry(tuple(map(peak, found)), provenance, batch_size, breakdowns=broken)


def result(test, measurement, lookup=None, *, part="", module=MODULE, **spec):
    """A result as a session makes one."""
    lookup = lookup or Lookup()
    expected = spec.pop("expected", False)
    spec = MemorySpec(**{"batch_size": 8, **spec})
    nodeid = f"{module}::{test}"
    return Result(
        nodeid,
        judge(measurement, spec, lookup, Policy(), nodeid=nodeid, explain=explain_growth),
        measurement,
        part,
        spec.batch_size,
        describe_budget(spec),
        (module, 28),
        expected=expected,
        baseline_entry=lookup.entry,
    )


def sample(more=()):
    """A report with every verdict, parts, two devices, notes, and names that contain markup."""
    plain, grown = attribution(), attribution(retained=600, scale=1.13)
    small, half = attribution(layers=4), attribution(layers=6, scale=0.5)
    known = Lookup(entry(plain))
    oom = OutOfMemory(512 * MIB, 3987 * MIB, 4080 * MIB, f"{MODULE}:31 in step", 0, peak(grown))
    mute = replace(measured(plain), attributions=())
    results = (
        result("test_gpt2_step", measured(plain), known, max_gib=8),
        result(
            "test_gpt2_step_retains[8]",
            measured(grown, alloc_retries=2, notes=noted("cuDNN's workspaces are taken as zero")),
            Lookup(entry(plain, provenance=BEFORE)),
            max_gib=8,
        ),
        result("test_gpt2_step_retains[8]", measured(small), Lookup(entry(small)), part="forward"),
        result("test_gpt2_step_retains[8]", measured(half), Lookup(entry(small)), part="backward"),
        result("test_gpt2_large", measured(grown, out_of_memory=oom), known, max_gib=4),
        result("test_llama", measured(plain), known, max_allocated_gib=2.5),
        result("test_new_model[fp16-checkpointed]", measured(small)),
        result("test_with_more_data", measured(plain), Lookup(entry(plain, batch_size=4))),
        result(
            "test_on_another", measured(small, device=H100), Lookup(other_devices=("virtual-T4",))
        ),
        result(
            "test_data_parallel",
            measured(plain, small, device=H100),
            Lookup(entry(plain, half)),
            devices=2,
        ),
        result("test_not_yet", measured(grown), known, expected=True),
        result(EVIL, mute, known, part="<img src=x onerror=alert(2)>"),
        *more,
    )
    return Report(
        results,
        device="virtual GPU T4 (14.57 GiB, capability 7.5, 40 SMs); memory is predicted",
        remarks=("2 skipped: needs 4 devices, <b>this machine</b> has 1",),
    )


def many(number, *, attributed=0, moved=False):
    """Return results of ``number`` tests, one in a hundred failed; some have attributions.

    With ``moved``, each line has a little more memory than in the baseline.
    """
    plain, grown = attribution(layers=4), attribution(layers=4, retained=900, scale=1.1)
    bare = {id(it): replace(measured(it), attributions=()) for it in (plain, grown)}
    known = Lookup(entry(attribution(layers=4, scale=0.9998) if moved else plain))
    found = []
    for index in range(number):
        one = grown if index % 100 == 7 else plain
        taken = measured(one) if index < attributed else bare[id(one)]
        module = f"tests/models/test_family_{index // 50}.py"
        found.append(result(f"test_step[model-{index}-fp16]", taken, known, module=module))
    return found


def with_updates():
    new = entry(attribution(layers=4))
    plain = replace(new, breakdowns=())
    created = EntryUpdate("virtual-T4", "tests/test_a.py", "test_x[a b]", "", None, new)
    changed = EntryUpdate("virtual-T4", "tests/test_a.py", "test_y", "forward", plain, plain)
    removed = EntryUpdate("virtual-T4", "tests/test_a.py", "test_y", "backward", plain, None)
    return UpdateSummary(
        (created,),
        (changed,),
        (),
        (removed,),
        (BaselineError("b.json", "is a folder", "move it"),),
        (Path("/x/baselines/a.json"),),
    )
