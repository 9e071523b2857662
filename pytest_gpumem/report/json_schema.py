"""Define the JSON report's fields, as documented in docs/reference/json-report.md.

Most structs are derived from the records (``Forms`` in files/json_forms.py). The others have their
record's field names, and rename those whose JSON names differ (``rename``). After the release of
0.1.0 every change needs a new ``FORMAT``, so that older versions can name the problem; new fields
then need a default, so that old reports can be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from pytest_gpumem import measurement
from pytest_gpumem.files.json_forms import Bytes, Forms, Signed
from pytest_gpumem.judge import verdict
from pytest_gpumem.judge.result import Outcome  # noqa: TC001
from pytest_gpumem.judge.verdict import Kind  # noqa: TC001

# Imported at run time, because msgspec reads the annotations.
from pytest_gpumem.measurement import PinnedCount  # noqa: TC001
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.report import model
from pytest_gpumem.report.model import MAX_SHARDS

FORMAT: Final = 1

Count = Bytes
ShardNumber = Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS)]


class Strict(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A JSON object that has these fields and no other."""

    def __init_subclass__(cls) -> None:
        """Remove "Json" from the class's name, which the published schema's definitions use."""
        cls.__name__ = cls.__name__.removesuffix("Json")


class OfDeviceJson(Strict, frozen=True):
    """A device."""

    key: str


if TYPE_CHECKING:
    # For type checkers, each struct that Forms derives from a record is the record itself.
    from pytest_gpumem.judge.verdict import Cause as CauseJson
    from pytest_gpumem.judge.verdict import Comparison as ComparisonJson
    from pytest_gpumem.judge.verdict import Lead as LeadJson
    from pytest_gpumem.judge.verdict import UpdateCommand as UpdateCommandJson
    from pytest_gpumem.measurement import Breakdown as BreakdownJson
    from pytest_gpumem.measurement import Breakdown as MeasuredBreakdownJson
    from pytest_gpumem.measurement import DeviceInfo as DeviceJson
    from pytest_gpumem.measurement import DeviceUse as DeviceUseJson
    from pytest_gpumem.measurement import Keeper as KeeperJson
    from pytest_gpumem.measurement import LinePeak as LinePeakJson
    from pytest_gpumem.measurement import OutOfMemory as OutOfMemoryJson
    from pytest_gpumem.measurement import Peak as PeakJson
    from pytest_gpumem.measurement import PeakRange as PeakRangeJson
    from pytest_gpumem.measurement import Provenance as ProvenanceJson
    from pytest_gpumem.measurement import ServerStart as ServerStartJson
    from pytest_gpumem.measurement import Slope as SlopeJson
    from pytest_gpumem.measurement import Stayed as StayedJson
    from pytest_gpumem.report.model import Origin as OriginJson
else:
    _Key = tuple[str, str, str, str]
    _FORMS: Final = Forms(Strict)
    PeakJson = _FORMS.of(measurement.Peak)
    ProvenanceJson = _FORMS.of(measurement.Provenance)
    DeviceJson = _FORMS.of(measurement.DeviceInfo, base=OfDeviceJson, name="Device")
    OutOfMemoryJson = _FORMS.of(measurement.OutOfMemory)
    SiteJson = _FORMS.of(measurement.Site)
    LinePeakJson = _FORMS.of(measurement.LinePeak)
    MeasuredBreakdownJson = _FORMS.of(measurement.Breakdown, name="MeasuredBreakdown")
    BreakdownJson = _FORMS.of(measurement.Breakdown, without=("course",))
    KeeperJson = _FORMS.of(measurement.Keeper)
    SlopeJson = _FORMS.of(measurement.Slope)
    HolderJson = _FORMS.of(measurement.Holder)
    StayedJson = _FORMS.of(measurement.Stayed)
    DeviceUseJson = _FORMS.of(measurement.DeviceUse)
    ServerStartJson = _FORMS.of(measurement.ServerStart)
    PeakRangeJson = _FORMS.of(measurement.PeakRange)
    ComparisonJson = _FORMS.of(verdict.Comparison)
    CauseJson = _FORMS.of(verdict.Cause)
    LeadJson = _FORMS.of(verdict.Lead)
    UpdateCommandJson = _FORMS.of(verdict.UpdateCommand)
    ShardJson = _FORMS.of(model.Shard, types_of={"index": ShardNumber, "count": ShardNumber})
    OriginJson = _FORMS.of(model.Origin, types_of={"unseen": tuple[_Key, ...]})
ORIGIN: Final[type] = OriginJson

_TEXTS: Final = {"note_texts": "notes", "hint_texts": "hints"}
"""JSON names of the lists of sentences, by attribute; separate lists have their kinds"""


class _Noted:
    """Combines the sentences of notes and hints with their kinds."""

    note_texts: tuple[str, ...]
    note_kinds: tuple[NoteKind, ...]
    hint_texts: tuple[str, ...]
    hint_kinds: tuple[NoteKind, ...]

    def __post_init__(self) -> None:
        """Reject a sentence without a kind."""
        for name in ("note", "hint"):
            texts, kinds = (getattr(self, f"{name}_{each}", ()) for each in ("texts", "kinds"))
            if len(texts) != len(kinds):
                raise ValueError(f"{len(texts)} {name}s have {len(kinds)} kinds")

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes with their kinds."""
        return tuple(map(Note, self.note_kinds, self.note_texts))

    @property
    def hints(self) -> tuple[Note, ...]:
        """The hints with their kinds."""
        return tuple(map(Note, self.hint_kinds, self.hint_texts))


class AttributionJson(_Noted, Strict, frozen=True, rename=_TEXTS):
    """Where one device's peak comes from."""

    breakdown: MeasuredBreakdownJson
    note_texts: tuple[str, ...]
    hint_texts: tuple[str, ...]
    keepers: tuple[KeeperJson, ...]
    note_kinds: tuple[NoteKind, ...]
    hint_kinds: tuple[NoteKind, ...]


class MeasurementJson(_Noted, Strict, frozen=True, rename=_TEXTS):
    """One step's memory; lists except notes, hints and pinned_lines have one entry per device."""

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
    largest: Count | None
    range: PeakRangeJson | None
    host: Bytes | None
    pinned_count: PinnedCount
    pinned_lines: tuple[LinePeakJson, ...]
    servers: tuple[ServerStartJson, ...]
    note_kinds: tuple[NoteKind, ...]
    hint_kinds: tuple[NoteKind, ...]


class VerdictJson(
    _Noted,
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
    causes: tuple[CauseJson, ...]
    beside: str
    not_of_peak: bool
    blame: str
    accept: str
    lead: LeadJson | None
    note_kinds: tuple[NoteKind, ...]
    command: UpdateCommandJson | None

    @property
    def advice(self) -> str:
        """The remedy without the text of ``command``, which reports show separately."""
        return self.remedy.removesuffix(self.command_text).rstrip() if self.command else self.remedy


class FiguresJson(Strict, frozen=True):
    """A baseline's figures, without its breakdowns."""

    peaks: tuple[PeakJson, ...]
    provenance: ProvenanceJson
    batch_size: Count | None
    world_size: Count | None
    rank: Count | None
    slope: SlopeJson | None
    largest: Count | None
    cache_tokens: Count | None


class BaselineJson(FiguresJson, frozen=True):
    """A baseline."""

    breakdowns: tuple[BreakdownJson, ...]


class BesideJson(Strict, frozen=True):
    """The part whose figure limits another part of the same test."""

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
    beside: BesideJson | None
    outcome: Outcome
    origin: Count


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
    """A phase of a marked test that the test's own code failed or skipped: it has no verdict."""

    nodeid: str
    word: Literal["failed", "error", "skipped", "xfailed"]
    message: str
    text: str


class Document(Strict, frozen=True):
    """The whole report."""

    format: Literal[1]
    gpumem: str
    created: str
    device: str
    options: dict[str, str]
    remarks: tuple[str, ...]
    updates: UpdatesJson | None
    results: tuple[ResultJson, ...]
    origins: tuple[OriginJson, ...]
    own_outcomes: tuple[OwnOutcomeJson, ...]
