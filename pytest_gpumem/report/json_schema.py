"""The JSON report's form, field by field, as docs/reference/json-report.md has it.

The fields of these classes have the names of the records that they are made from, and JSON names
of their own where ``rename`` says so. Once 0.1.0 is out every change is a new ``FORMAT``, so that
an older version can name the problem; a field that is added then has a default, so that old reports
can be read.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from pytest_gpumem.judge.result import Outcome  # noqa: TC001
from pytest_gpumem.judge.verdict import FigureName, Kind, LeadKind  # noqa: TC001

# At run time: msgspec reads the annotations.
from pytest_gpumem.measurement import Category, DeviceKind, PinnedCount  # noqa: TC001
from pytest_gpumem.notes import Note, NoteKind, paired
from pytest_gpumem.report.model import MAX_SHARDS
from pytest_gpumem.source_lines import package_path

FORMAT: Final = 3
"""The format that is written. 1: the first (pytest-gpumem 0.1.0). 2: a verdict has causes, a
breakdown "lines", "unsplit" and "autocast". 3: a report has origins, a result an outcome, and a
measured breakdown its course, so that the baselines of the session can be written from it; notes
and hints have kinds ("note_kinds", "hint_kinds"), and a verdict the words of its command
("update"); tests that their own code failed or skipped are there ("own_outcomes")."""

Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Signed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""bytes of a line at a batch size of 0, which may be below zero"""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
ShardNumber = Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS)]


class Strict(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A JSON object that has these fields and no other."""

    def __init_subclass__(cls) -> None:
        """Name the form as its record is: the published schema's definitions have these names."""
        cls.__name__ = cls.__name__.removesuffix("Json")


class PeakJson(Strict, frozen=True):
    """Memory of one device: in live tensors, and held by PyTorch's allocator."""

    allocated: Bytes
    reserved: Bytes
    pinned: Bytes = 0


class ProvenanceJson(Strict, frozen=True):
    """Versions and settings that a measurement was made with."""

    torch: str
    cuda: str
    cudnn: str
    driver: str
    allocator: str


class DeviceJson(Strict, frozen=True):
    """The device that a step ran on; ``key`` is the name of its baselines."""

    key: str
    kind: DeviceKind
    name: str
    total_memory: Bytes
    capability: tuple[Count, Count]
    sm_count: Count
    context: Bytes


class OutOfMemoryJson(Strict, frozen=True):
    """A request that was refused."""

    requested: Bytes | None
    allocated: Bytes
    reserved: Bytes
    site: str
    device_index: Count
    needed: PeakJson | None
    path: str = ""
    line: Count = 0


class OfLineJson(Strict, frozen=True):
    """A row of a source line."""

    path: str

    def __post_init__(self) -> None:
        """Name a file of an environment inside of the project as it is named elsewhere."""
        msgspec.structs.force_setattr(self, "path", package_path(self.path))


class SiteJson(OfLineJson, frozen=True, rename={"nbytes": "bytes"}):
    """A source line, and its blocks of one category that were alive at the peak."""

    line: Count
    function: str
    code: str
    module: str
    category: Category
    nbytes: Bytes
    blocks: Count


class LinePeakJson(OfLineJson, frozen=True, rename={"nbytes": "bytes"}):
    """A source line, and the most memory that it had at one time."""

    line: Count
    function: str
    code: str
    nbytes: Bytes
    calls_pass: bool


class BreakdownJson(Strict, frozen=True):
    """One device's memory at its peak, by category and by source line."""

    categories: dict[Category, Bytes]
    cached: Bytes
    sites: tuple[SiteJson, ...]
    lines: tuple[LinePeakJson, ...] = ()
    unsplit: Bytes | None = None
    autocast: bool | None = None


class MeasuredBreakdownJson(BreakdownJson, frozen=True):
    """The breakdown of a measurement, with its memory in the course of the step."""

    course: tuple[Bytes, ...] = ()


class KeeperJson(OfLineJson, frozen=True, rename={"nbytes": "bytes"}):
    """A variable, attribute, list or graph that keeps blocks of a source line alive at the peak."""

    line: Count
    category: Category
    text: str
    nbytes: Bytes
    blocks: Count
    steps: tuple[Count, ...]


_TEXTS: Final = {"note_texts": "notes", "hint_texts": "hints"}
"""the names of sentences, whose kinds came later"""


class AttributionJson(Strict, frozen=True, rename=_TEXTS):
    """Where one device's peak comes from."""

    breakdown: MeasuredBreakdownJson
    note_texts: tuple[str, ...]
    hint_texts: tuple[str, ...]
    keepers: tuple[KeeperJson, ...] = ()
    note_kinds: tuple[NoteKind, ...] = ()
    hint_kinds: tuple[NoteKind, ...] = ()

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes, each with its kind."""
        return paired(self.note_texts, self.note_kinds)

    @property
    def hints(self) -> tuple[Note, ...]:
        """The hints, each with its kind."""
        return paired(self.hint_texts, self.hint_kinds)


class SlopeJson(Strict, frozen=True):
    """How memory grows with the batch size, optimizers' steps left out: a line over sizes."""

    sizes: tuple[Count, ...]
    fixed: Signed
    per_sample: Signed


class HolderJson(Strict, frozen=True, rename={"nbytes": "bytes"}):
    """A variable, attribute or list that refers to memory that stayed."""

    text: str
    nbytes: Bytes
    blocks: Count


class StayedJson(Strict, frozen=True, rename={"nbytes": "bytes"}):
    """Memory that one device still allocated after the test, or that its steps piled up."""

    device: Count
    nbytes: Signed
    sites: tuple[SiteJson, ...]
    holders: tuple[HolderJson, ...]


class DeviceUseJson(Strict, frozen=True):
    """How full a device was while a step ran, all processes counted, as nvidia-smi shows it."""

    peak: Bytes
    besides: Signed
    outside: Signed
    others: Signed
    processes: Count
    source: str
    every_ms: Count


class PeakRangeJson(Strict, frozen=True):
    """The ends between which the peaks lie, one entry a device, and the reason."""

    least: tuple[PeakJson, ...]
    most: tuple[PeakJson, ...]
    reason: str
    judged: bool = False


class MeasurementJson(Strict, frozen=True, rename=_TEXTS):
    """One step's memory; all lists but notes and hints have one entry a device."""

    device: DeviceJson
    provenance: ProvenanceJson
    peaks: tuple[PeakJson, ...]
    held: tuple[PeakJson, ...]
    retained: tuple[PeakJson, ...]
    alloc_retries: Count
    segments: Count
    out_of_memory: OutOfMemoryJson | None
    note_texts: tuple[str, ...]
    attributions: tuple[AttributionJson, ...]
    hint_texts: tuple[str, ...]
    slope: SlopeJson | None
    steps: tuple[tuple[Signed, ...], ...]
    left: tuple[Signed, ...]
    device_use: tuple[DeviceUseJson, ...]
    stayed: StayedJson | None
    largest: Count | None = None
    range: PeakRangeJson | None = None
    host: Bytes | None = None
    pinned_count: PinnedCount = "counted"
    pinned_lines: tuple[LinePeakJson, ...] = ()
    note_kinds: tuple[NoteKind, ...] = ()
    hint_kinds: tuple[NoteKind, ...] = ()

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes, each with its kind."""
        return paired(self.note_texts, self.note_kinds)

    @property
    def hints(self) -> tuple[Note, ...]:
        """The hints, each with its kind."""
        return paired(self.hint_texts, self.hint_kinds)


class ComparisonJson(Strict, frozen=True):
    """One figure of one device beside its baseline and its limit."""

    device: Count
    peak: FigureName
    measured: Signed
    baseline: Signed | None
    allowance: Bytes | None
    budget: Bytes | None


class CauseJson(Strict, frozen=True, rename={"nbytes": "bytes"}):
    """A part of a peak's growth: a source line, the blocks that it has more, and who keeps them."""

    nbytes: Bytes
    category: str
    site: SiteJson | None
    baseline_blocks: Count | None
    keepers: tuple[KeeperJson, ...]
    reasons: tuple[str, ...]
    old_code: str = ""


class LeadJson(Strict, frozen=True):
    """The first thing that a report says of a growth: its sentence, and the line that it names."""

    kind: LeadKind
    sentence: str
    path: str = ""
    line: Count = 0
    place: str = ""


class UpdateCommandJson(Strict, frozen=True):
    """The words of a command that writes baselines, besides the option that does."""

    launcher: tuple[str, ...]
    targets: tuple[str, ...]
    options: tuple[str, ...]


class VerdictJson(
    Strict,
    frozen=True,
    rename={"note_texts": "notes", "command_text": "command", "command": "update"},
):
    """The judgement of one measurement."""

    kind: Kind
    failed: bool
    headline: str
    comparisons: tuple[ComparisonJson, ...]
    note_texts: tuple[str, ...]
    remedy: str
    command_text: str
    uncompared: str
    held_to: str
    causes: tuple[CauseJson, ...] = ()
    beside: str = ""
    accept: str = ""
    lead: LeadJson | None = None
    note_kinds: tuple[NoteKind, ...] = ()
    command: UpdateCommandJson | None = None

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes, each with its kind."""
        return paired(self.note_texts, self.note_kinds)

    @property
    def advice(self) -> str:
        """The remedy without its command, where the report has that in words of its own."""
        return self.remedy.removesuffix(self.command_text).rstrip() if self.command else self.remedy


class FiguresJson(Strict, frozen=True):
    """A baseline's figures, without its breakdowns."""

    peaks: tuple[PeakJson, ...]
    provenance: ProvenanceJson
    batch_size: Count | None
    world_size: Count | None
    rank: Count | None
    slope: SlopeJson | None
    largest: Count | None = None


class BaselineJson(FiguresJson, frozen=True):
    """A baseline."""

    breakdowns: tuple[BreakdownJson, ...] = ()


class BesideJson(Strict, frozen=True):
    """The part that another part of its test is held to."""

    part: str
    peaks: tuple[PeakJson, ...]
    breakdowns: tuple[BreakdownJson, ...]


class ResultJson(
    Strict, frozen=True, rename={"baseline": "baselined", "baseline_entry": "baseline"}
):
    """One judged measurement: of a whole test, or of a part of it."""

    nodeid: str
    part: str
    verdict: VerdictJson
    expected: bool
    location: tuple[str, Count] | None
    batch_size: Count | None
    world_size: Count | None
    rank: Count | None
    card: str
    budget: str
    baseline: bool
    measurement: MeasurementJson | None
    baseline_entry: BaselineJson | None
    snapshot: str
    snapshot_error: str
    beside: BesideJson | None = None
    outcome: Outcome = ""
    origin: Count = 0


class ShardJson(Strict, frozen=True):
    """One of the sessions among which a suite was split."""

    index: ShardNumber
    count: ShardNumber


class OriginJson(Strict, frozen=True):
    """Where and how a session ran."""

    commit: str
    head: str
    other_commits: tuple[str, ...]
    modified: bool
    root: str
    folder: str
    unfinished: str
    follow_provenance: bool
    ranks: Count
    shard: ShardJson | None
    artifact: str
    collected: tuple[str, ...]
    unseen: tuple[tuple[str, str, str, str], ...]
    partial: str


class EntryUpdateJson(Strict, frozen=True):
    """The update of one entry of the baselines."""

    device_key: str
    module: str
    test: str
    part: str
    old: FiguresJson | None
    new: FiguresJson | None


class ProblemJson(Strict, frozen=True):
    """An error: the value or file, its problem, the remedy."""

    given: str
    problem: str
    remedy: str


class UpdatesJson(Strict, frozen=True):
    """The update of the baselines, by the fate of their entries."""

    created: tuple[EntryUpdateJson, ...]
    changed: tuple[EntryUpdateJson, ...]
    unchanged: tuple[EntryUpdateJson, ...]
    removed: tuple[EntryUpdateJson, ...]
    errors: tuple[ProblemJson, ...]
    files: tuple[str, ...]


class OwnOutcomeJson(Strict, frozen=True):
    """A phase of a marked test that the test's own code ended, without a verdict."""

    nodeid: str
    word: Literal["failed", "error", "skipped", "xfailed"]
    message: str
    text: str


class Document(Strict, frozen=True):
    """The whole report."""

    format: Literal[1, 2, 3]
    gpumem: str
    created: str
    device: str
    options: dict[str, str]
    remarks: tuple[str, ...]
    updates: UpdatesJson | None
    results: tuple[ResultJson, ...]
    origins: tuple[OriginJson, ...] = ()
    own_outcomes: tuple[OwnOutcomeJson, ...] = ()
