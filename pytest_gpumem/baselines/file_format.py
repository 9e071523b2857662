"""The format of a baseline file: JSON, decoded strictly, encoded for readable diffs.

::

    {
     "device": {"key": "virtual-T4", "name": "T4", ...},
     "format": 1,
     "module": "examples/test_memory.py",
     "provenance": {"torch-2.15.0+cu132": {"torch": "2.15.0", "cuda": "13.2", ...}},
     "tests": {
      "TestX::test_y[a-1]": {
       "batch_size": 32,
       "breakdown": [{"autocast": false, "cached": bytes, "categories": {"activations": bytes, ...},
         "course": [bytes in the first stretch of the step, in the second, ...], "lines": [
        {"bytes": 536870912, "code": "x = self.attn(x)", "function": "Block.forward", "line": 88,
         "path": "blocks.py"}, ...], "sites": [
        {"blocks": 12, "bytes": 536870912, "category": "activations", "code": "x = self.attn(x)",
         "function": "Block.forward", "line": 88, "module": "GPT.h.*", "path": "blocks.py"}, ...],
         "unsplit": bytes},
        of the second device, ...],
       "cache_tokens": 565952,
       "largest": 14,
       "parts": {"forward": {the same, without parts}},
       "peak_allocated": [bytes on the first device, on the second, ...],
       "peak_pinned": bytes of pinned host memory,
       "peak_reserved": [...],
       "provenance": "torch-2.15.0+cu132",
       "rank": 0,
       "slope": {"fixed": bytes, "per_sample": bytes, "sizes": [8, 16, 32]},
       "world_size": 64
      }
     }
    }

"cache_tokens" is in the entry of an inference server's start; "largest" is in the entry of a search
(``gpu_memory.largest``), with that value's peaks. A test with measured parts only has "parts"
alone; "peak_pinned" is in an entry of a test that pins memory; "batch_size", "slope" (of
"batch_sizes"), and "rank" and "world_size" together, are in an entry if the marker declares them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, astuple, dataclass, field
from itertools import chain, repeat
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec

from pytest_gpumem.baselines.paths import Key, baseline_files, baseline_path, module_at, read_file
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.files.json_forms import Bytes, Forms, JsonProblem, parse_json
from pytest_gpumem.measurement import (
    BaselineEntry,
    Breakdown,
    DeviceInfo,
    LinePeak,
    Peak,
    Provenance,
    Site,
    Slope,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

FORMAT: Final = 1
"""Format version: bump it whenever the format changes."""

WHOLE_TEST: Final = ""
"""name of the part that represents the whole test"""
RESTORE: Final = (
    "restore it from version control, or delete it and run with --gpumem-update-baselines"
)


_OneADevice = Annotated[list[Bytes], msgspec.Meta(min_length=1)]
_AtLeastTwo = Annotated[tuple[Bytes, ...], msgspec.Meta(min_length=2)]
_T = TypeVar("_T")
_one_line: Final = json.JSONEncoder(sort_keys=True).encode


class _Strict(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A JSON object; unknown fields are errors, fields with a default may be missing."""


class _OfDevice(_Strict):
    key: str


if TYPE_CHECKING:
    # For type checkers, each struct that Forms derives from a record is the record itself.
    from pytest_gpumem.measurement import Breakdown as _Breakdown
    from pytest_gpumem.measurement import DeviceInfo as _Device
    from pytest_gpumem.measurement import Provenance as _Provenance
    from pytest_gpumem.measurement import Slope as _Slope
else:
    _FORMS: Final = Forms(_Strict)
    _Device = _FORMS.of(DeviceInfo, base=_OfDevice, without=("kind", "context"))
    _Provenance = _FORMS.of(Provenance)
    _FORMS.of(Site)
    _FORMS.of(LinePeak, optional=("calls_pass",))
    _Breakdown = _FORMS.of(Breakdown, optional=("sites", "lines", "unsplit", "autocast", "course"))
    _Slope = _FORMS.of(Slope, types_of={"sizes": _AtLeastTwo})


class _Entry(_Strict):
    peak_allocated: _OneADevice
    peak_reserved: _OneADevice
    provenance: str
    batch_size: Bytes | None = None
    world_size: Bytes | None = None
    rank: Bytes | None = None
    breakdown: list[_Breakdown] = []
    slope: _Slope | None = None
    largest: Bytes | None = None
    cache_tokens: Bytes | None = None
    peak_pinned: Bytes = 0


class _File(_Strict):
    format: int
    device: _Device
    module: str
    provenance: dict[str, Any]
    tests: dict[str, Any]


@dataclass
class BaselineFile:
    """The baselines of one module's tests on one device."""

    device: DeviceInfo | _Device
    module: str
    tests: dict[str, dict[str, BaselineEntry]] = field(default_factory=dict)
    """entries by test ("TestX::test_y[a-1]") and part ("" is the whole test)"""
    labels: dict[Provenance, str] = field(default_factory=dict)
    """by provenance: its label in the file"""


def decode(
    path: Path, content: bytes, device_key: str | None = None, module: str | None = None
) -> BaselineFile:
    """Parse a baseline file's content; if given, device and module must match.

    Raises:
        BaselineError: they do not match, or this version cannot read the file.
    """
    filename = str(path)
    try:
        document = parse_json(content, "a baseline")
    except JsonProblem as problem:
        remedy = RESTORE
        if problem.conflict:
            side = "take one side (git checkout --ours FILE, or --theirs)"
            remedy = f"{side} and run --gpumem-update-baselines"
        elif problem.encoding:
            remedy = f"save it as UTF-8, or {RESTORE}"
        raise BaselineError(filename, str(problem), remedy) from None
    # Check the format's number first: a newer format may differ in any other field.
    number = document.get("format") if isinstance(document, dict) else None
    if type(number) is not int or number < 1:
        raise BaselineError(filename, 'is not a baseline: it has no "format" number', RESTORE)
    if number > FORMAT:
        raise BaselineError(
            filename,
            f"was written by a newer pytest-gpumem (format {number}; this one reads {FORMAT})",
            "upgrade pytest-gpumem",
        )
    file = _convert(filename, document, _File, "$")
    for kind, value, expected in (
        ("device", file.device.key, device_key),
        ("module", file.module, module),
    ):
        if expected is not None and value != expected:
            raise BaselineError(
                filename,
                (
                    f"belongs to {kind} {json.dumps(value)}, but is in the place of "
                    f"{json.dumps(expected)}"
                ),
                "move the file back to its place, or delete it",
            )
    provenances = {
        label: _record(_convert(filename, value, _Provenance, place), Provenance)
        for label, value, place in _places("$.provenance", file.provenance)
    }
    tests = {
        name: _read_test(filename, value, place, provenances)
        for name, value, place in _places("$.tests", file.tests)
    }
    labels = {provenance: label for label, provenance in provenances.items()}
    return BaselineFile(file.device, file.module, tests, labels)


def _convert(filename: str, value: object, kind: type[_T], place: str) -> _T:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeError) as error:
        problem, _, where = str(error).partition(" - at `$")
        shown = json.dumps(problem)[1:-1]  # a field's name may contain any character
        raise BaselineError(filename, f"{shown} at {place}{where.rstrip('`')}", RESTORE) from None


def _record(form: object, record: type[_T]) -> _T:
    return msgspec.convert(form, record, from_attributes=True)


def _fields(record: object, form: type) -> Any:  # noqa: ANN401 - JSON
    return msgspec.to_builtins(msgspec.convert(record, form, from_attributes=True))


def _places(place: str, values: Mapping[str, _T]) -> Iterable[tuple[str, _T, str]]:
    """Yield the names and values of a JSON object, each with its place for messages."""
    return ((name, value, f"{place}[{json.dumps(name)}]") for name, value in values.items())


def _read_test(
    filename: str, value: object, place: str, provenances: Mapping[str, Provenance]
) -> dict[str, BaselineEntry]:
    own = _convert(filename, value, dict[str, Any], place)
    parts = _convert(filename, own.pop("parts", {}), dict[str, Any], f"{place}.parts")
    if WHOLE_TEST in parts:
        raise BaselineError(filename, f"a part has no name at {place}.parts", RESTORE)
    entries = {}
    if own or not parts:
        entries[WHOLE_TEST] = _read_entry(filename, own, place, provenances)
    for name, fields, part_place in _places(f"{place}.parts", parts):
        entries[name] = _read_entry(filename, fields, part_place, provenances)
    return entries


def _read_entry(
    filename: str, value: object, place: str, provenances: Mapping[str, Provenance]
) -> BaselineEntry:
    entry = _convert(filename, value, _Entry, place)
    if len(entry.peak_allocated) != len(entry.peak_reserved):
        problem = "peak_allocated and peak_reserved have different numbers of devices"
        raise BaselineError(filename, f"{problem} at {place}", RESTORE)
    if entry.provenance not in provenances:
        problem = f"provenance {json.dumps(entry.provenance)} is not in the file"
        raise BaselineError(filename, f"{problem} at {place}", RESTORE)
    if entry.breakdown and len(entry.breakdown) != len(entry.peak_allocated):
        raise BaselineError(
            filename, f"breakdown has another number of devices at {place}", RESTORE
        )
    pinned = chain([entry.peak_pinned], repeat(0))
    peaks = map(Peak, entry.peak_allocated, entry.peak_reserved, pinned)
    breakdowns = tuple(_record(breakdown, Breakdown) for breakdown in entry.breakdown)
    declared = (entry.batch_size, entry.world_size, entry.rank)
    slope = None if entry.slope is None else _record(entry.slope, Slope)
    provenance = provenances[entry.provenance]
    found = (slope, entry.largest, entry.cache_tokens)
    return BaselineEntry(tuple(peaks), provenance, *declared, breakdowns, *found)


def check(filename: str, device: DeviceInfo, parts: Mapping[str, BaselineEntry]) -> None:
    """Refuse entries that could be written but not read again; a hook may have changed them.

    Raises:
        BaselineError: a figure is not a whole number of bytes, or a name is not text.
    """
    for name in (filename, *parts):
        if not name.isascii() and json.loads(json.dumps(name)) != name:
            problem = f"{json.dumps(name)} has two surrogates that JSON reads as one character"
            raise BaselineError(filename, f"its baseline cannot be written: {problem}", "rename it")
    try:
        msgspec.convert(_device_fields(device), _Device)
        for entry in parts.values():
            msgspec.convert(entry.provenance, _Provenance, from_attributes=True)
            msgspec.convert(_entry_fields(entry, {entry.provenance: ""}), _Entry)
    except (msgspec.ValidationError, UnicodeError) as error:
        remedy = "check the hooks that change measurements"
        raise BaselineError(filename, f"its baseline cannot be written: {error}", remedy) from None


def encode(file: BaselineFile) -> bytes:
    """Return the file as JSON with sorted keys, without unused provenances; see :func:`_render`."""
    used = {entry.provenance for parts in file.tests.values() for entry in parts.values()}
    labels = {provenance: label for provenance, label in file.labels.items() if provenance in used}
    # A new provenance's label is "torch-2.15.0+cu132", plus a hash if that label is taken.
    for provenance in sorted(used - labels.keys(), key=astuple):
        name = f"torch-{provenance.torch}"
        if "+" not in name:
            name += f"+cu{provenance.cuda.replace('.', '')}"
        digest = hashlib.sha256(json.dumps(astuple(provenance)).encode()).hexdigest()
        candidates = [name, *(f"{name}-{digest[:length]}" for length in range(8, len(digest) + 1))]
        taken = set(labels.values())
        labels[provenance] = next(label for label in candidates if label not in taken)
    tests = {}
    for name, parts in file.tests.items():
        fields = {part: _entry_fields(entry, labels) for part, entry in parts.items()}
        whole = fields.pop(WHOLE_TEST, {})
        tests[name] = {**whole, "parts": fields} if fields else whole
    document = {
        "format": FORMAT,
        "device": _device_fields(file.device),
        "module": file.module,
        "provenance": {label: asdict(provenance) for provenance, label in labels.items()},
        "tests": tests,
    }
    return f"{_render(document)}\n".encode()


def _render(value: object, indent: str = "") -> str:
    """Render JSON with one name per line, and each list on the line of its name.

    In a list of objects, each object is one line, or one line per name if it contains a list.
    """
    if type(value) is int:
        return str(value)
    inner = f"{indent} "
    if isinstance(value, (list, tuple)) and any(isinstance(element, dict) for element in value):
        lines = []
        for element in value:
            fields = element.values() if isinstance(element, dict) else ()
            nested = any(isinstance(field, (dict, list, tuple)) for field in fields)
            lines.append(f"{inner}{_render(element, inner) if nested else _one_line(element)}")
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    lines = [
        f"{inner}{json.dumps(name)}: {_render(field, inner)}"
        for name, field in sorted(value.items())
    ]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _device_fields(device: DeviceInfo | _Device) -> dict[str, Any]:
    fields: dict[str, Any] = _fields(device, _Device)
    return fields


def _entry_fields(entry: BaselineEntry, labels: Mapping[Provenance, str]) -> dict[str, Any]:
    declared = {name: getattr(entry, name) for name in ("batch_size", "world_size", "rank")}
    fields = {
        **{name: value for name, value in declared.items() if value is not None},
        "peak_allocated": [peak.allocated for peak in entry.peaks],
        "peak_reserved": [peak.reserved for peak in entry.peaks],
        "provenance": labels[entry.provenance],
    }
    if entry.peak_pinned:
        fields["peak_pinned"] = entry.peak_pinned
    for name in ("largest", "cache_tokens"):
        if (found := getattr(entry, name)) is not None:
            fields[name] = found
    if entry.slope is not None:
        fields["slope"] = _fields(entry.slope, _Slope)
    if entry.breakdowns:
        fields["breakdown"] = [_fields(breakdown, _Breakdown) for breakdown in entry.breakdowns]
    return fields


class _DeviceName(msgspec.Struct):
    key: str


class _Names(msgspec.Struct):
    """The names in a baseline file; figures are not decoded."""

    device: _DeviceName
    module: str
    tests: dict[str, msgspec.Raw]


def read_names(
    directory: Path, is_wanted: Callable[[str], bool] = lambda _module: True
) -> list[Key]:
    """Return the keys of tests with a baseline in a folder; fast, as it decodes no figures.

    Files whose module ``is_wanted`` rejects are not read. An unreadable file is skipped: reading
    its figures later raises the error.
    """
    keys = []
    for path in baseline_files(directory):
        module = module_at(directory, path)
        if module is not None and not is_wanted(module):
            continue
        try:
            names = msgspec.json.decode(read_file(path) or b"", type=_Names)
        except (BaselineError, msgspec.DecodeError, UnicodeError, RecursionError):
            continue  # thousands of nested brackets raise RecursionError
        if baseline_path(directory, names.device.key, names.module) == path:
            keys += [Key(names.device.key, names.module, test) for test in names.tests]
    return keys
