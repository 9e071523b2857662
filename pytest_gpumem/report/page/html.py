"""The page: one HTML file with all of a session's results in it, which needs no network.

The first results have their rows and sections in the page as it stands; those of the others lie in
it packed, and a script unpacks them when they are wanted, so that a page of ten thousand tests
opens as quickly as one of ten. Whatever comes from outside is escaped where the template prints it
(:func:`_printed`), and the page's own policy lets no script run but its one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.judge.breakdown_diff import provenance_text
from pytest_gpumem.judge.result import urgency
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.report.breakdown_rows import DeviceRows, device_rows
from pytest_gpumem.report.held_to import compared, is_news
from pytest_gpumem.report.terminal.session_text import circumstances, shortage_rows
from pytest_gpumem.report.terminal.summary_table import budget_use, change, taken
from pytest_gpumem.report.terminal.update_text import update_summary
from pytest_gpumem.report.text import printable, size
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from jinja2 import Environment, Template
    from markupsafe import Markup

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import Attribution
    from pytest_gpumem.report.model import Report

MOST_ROWS = 200
"""rows of the table that are in the page as it stands; a script shows the others"""
MOST_SECTIONS = 25
"""sections likewise: of failures, or of all tests where there are no more than that"""
MOST_DRAWN = 100
"""timelines that are drawn, those of failures first: each takes about 25 ms and 10 kB"""
MOST_EXPLAINED = 1000
"""results with their breakdowns and source lines, likewise: each takes about 1 ms"""
MOST_SITES = 12
"""source lines that a section lists, of each device"""
PACK = 100_000
"""characters of sections that are packed together, at least"""

_FIGURE = re.compile(r"[+-]?\d+(?:\.\d+)?")


class Entry(NamedTuple):
    """A result with its place in the page."""

    anchor: str
    """the id of its section, which later pages give the same test"""
    result: Result
    rank: int
    """of its verdict: the lower, the more urgent"""
    drawn: bool
    """whether its timelines are drawn"""
    explained: bool
    """whether its section says where its peaks come from"""

    @property
    def failed(self) -> bool:
        """Whether it failed the session."""
        return self.result.verdict.failed and not self.result.expected

    @property
    def word(self) -> str:
        """The verdict, as the table has it."""
        return f"{self.result.verdict.kind}{' (xfail)' if self.result.expected else ''}"

    @property
    def mark(self) -> str:
        """A character beside the verdict, for those who see no colours."""
        if self.result.verdict.failed:
            return "✕"
        marks = {Kind.WITHIN: "✓", Kind.IMPROVED: "↓"}
        return marks.get(self.result.verdict.kind, "○")

    @property
    def tone(self) -> str:
        """The class of its colour."""
        if self.failed:
            return "bad"
        return "good" if self.result.verdict.kind in {Kind.WITHIN, Kind.IMPROVED} else "open"

    @property
    def cells(self) -> dict[str, str]:
        """The row of the table: device, batch size, figures in MiB, change, use of the budget."""
        result = self.result
        allocated, reserved = taken(result.measurement) if result.measurement else ("", "")
        return {
            "device": result.device_key,
            "batch": "" if result.batch_size is None else str(result.batch_size),
            "allocated": allocated,
            "reserved": reserved,
            "change": change(result),
            "budget": budget_use(result),
        }

    @property
    def devices(self) -> list[DeviceRows]:
        """Where the peak of each device comes from."""
        if not self.explained:
            return []
        return device_rows(self.result, self.anchor, drawn=self.drawn)

    @property
    def unexplained(self) -> bool:
        """Whether that is known, and not shown."""
        return not self.explained and bool(_attributions(self.result))


def page(report: Report, *, when: str = "") -> str:
    """Return the page.

    Args:
        report: what to show.
        when: date and time of the session, as the page's head says it.
    """
    entries = _entries(report.results)
    parts: Any = _environment().get_template("parts.html.j2").module
    rows = [str(parts.row(it)) for it in entries]
    shown = [it for it in entries if it.failed or len(entries) <= MOST_SECTIONS][:MOST_SECTIONS]
    sections = {it.anchor: str(parts.section(it)) for it in shown}
    packs, places = _packed_sections(parts, [it for it in entries if it.anchor not in sections])
    index = [
        {
            "id": entry.anchor,
            "row": row,
            "keys": list(_keys(entry)),
            "failed": entry.failed,
            "pack": places.get(entry.anchor),
        }
        for entry, row in zip(entries, rows, strict=True)
    ]
    return _template("page.html.j2").render(
        report=report,
        remarks=_remarks(report),
        when=when,
        counts=_counts(entries),
        devices=len({it.device_key for it in report.results}),
        rows=_raw("".join(rows[:MOST_ROWS])),
        sections=_raw("".join(sections.values())),
        left_out=len(entries) - len(shown),
        index=_packed(index),
        packs=packs,
        script=_raw(_source("page.js")),
        style=_raw(_source("page.css")),
        script_hash=_hash(_source("page.js")),
        style_hash=_hash(_source("page.css")),
    )


def _remarks(report: Report) -> list[str]:
    """Return the sentences about the session: what was compared, what became of the baselines."""
    found = compared(report.results) if is_news(report.results) else {}
    remarks = [*report.remarks, *(f"on {key}: {text}" for key, text in found.items())]
    if report.updates is None:
        return remarks
    text = update_summary(report.updates, brief=True, width=10_000)
    return [*remarks, *(line.removeprefix("gpumem: ") for line in text.splitlines())]


def anchor(result: Result) -> str:
    """Return the id of a result's section: the same in every page, whatever else is in it."""
    text = f"{result.nodeid}\0{result.part}\0{result.device_key}"
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
    return f"t-{digest[:12]}"


def _entries(results: Sequence[Result]) -> list[Entry]:
    """Return the results in the order of the table, each with an id of its own."""
    seen: dict[str, int] = {}
    found = []
    for result in results:
        name = anchor(result)
        number = seen[name] = seen.get(name, 0) + 1
        name = name if number == 1 else f"{name}-{number}"
        found.append(Entry(name, result, urgency(result), drawn=False, explained=False))
    drawn = explained = 0
    entries = []
    for entry in sorted(found, key=lambda it: it.rank):
        known = _attributions(entry.result)
        drawn += sum(it.timeline is not None for it in known)
        explained += bool(known)
        few, some = drawn <= MOST_DRAWN, explained <= MOST_EXPLAINED
        entries.append(entry._replace(drawn=few, explained=some))
    return entries


def _attributions(result: Result) -> Sequence[Attribution]:
    return result.measurement.attributions if result.measurement else ()


def _keys(entry: Entry) -> Iterator[str | float | None]:
    """Yield what the table's columns are sorted by; None goes last."""
    yield printable(entry.result.name)
    for name, text in entry.cells.items():
        if name == "device":
            yield text
        else:
            figure = _FIGURE.search(text)
            yield float(figure[0]) if figure else None
    yield entry.rank


class _Count(NamedTuple):
    word: str
    """the verdict, as the table has it"""
    number: int
    tone: str


def _counts(entries: Iterable[Entry]) -> list[_Count]:
    found = Counter((it.word, it.tone) for it in entries)
    return [_Count(word, number, tone) for (word, tone), number in found.items()]


def _packed_sections(parts: Any, entries: Iterable[Entry]) -> tuple[list[str], dict[str, int]]:  # noqa: ANN401 - a template's macros
    """Return packs of sections, and in which of them each one is."""
    packs: list[str] = []
    places: dict[str, int] = {}
    waiting: dict[str, str] = {}
    size = 0
    for entry in entries:
        text = waiting[entry.anchor] = str(parts.section(entry))
        places[entry.anchor] = len(packs)
        size += len(text)
        if size >= PACK:
            packs.append(_packed(waiting))
            waiting, size = {}, 0
    if waiting:
        packs.append(_packed(waiting))
    return packs, places


def _packed(data: object) -> str:
    """Return data as JSON, compressed, in letters that mean nothing in HTML."""
    text = json.dumps(data, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# -- the templates --


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("pytest_gpumem.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=size)
    environment.globals.update(
        circumstances=circumstances,
        shortage_rows=shortage_rows,
        provenance_text=provenance_text,
        most_sites=MOST_SITES,
        most_drawn=MOST_DRAWN,
        most_explained=MOST_EXPLAINED,
        size=_size_cell,
        difference=_difference_cell,
    )
    return environment


def _template(name: str) -> Template:
    return _environment().get_template(name)


def _printed(value: object) -> object:
    """Return what a template prints: text without characters that a reader would not see.

    jinja2 escapes it after this; text that is markup already is left alone by both.
    """
    if value is None:
        return ""
    return printable(value) if type(value) is str else value


def _size_cell(nbytes: int | None, label: str = "", kind: str = "") -> Markup:
    """Return a cell of a table, a section's most frequent part: a macro takes ten times as long.

    Args:
        nbytes: its figure.
        label: of the templates' own words, what it is called where the table has no columns.
        kind: likewise, a class.
    """
    kind = f" {kind}" if kind else ""
    label = f' data-label="{label}"' if label else ""
    title = "" if nbytes is None else f' title="{nbytes:,} B"'
    return _raw(f'<td class="n{kind}"{label}{title}>{size(nbytes)}</td>')


def _difference_cell(nbytes: int | None, label: str = "difference") -> Markup:
    """Return the cell of a difference, likewise."""
    way = "" if not nbytes else " up" if nbytes > 0 else " down"
    if nbytes is None:
        return _raw(f'<td data-label="{label}" class="n{way}"></td>')
    text = format_size(nbytes, signed=True) if nbytes else "0"
    return _raw(f'<td data-label="{label}" class="n{way}" title="{nbytes:+,} B">{text}</td>')


def _raw(text: str) -> Markup:
    """Return text that is markup already, of this package's own making."""
    from markupsafe import Markup

    return Markup(text)  # noqa: S704 - templates made it, or it lies beside them


@cache
def _source(name: str) -> str:
    """Return a file beside the templates."""
    loader = _environment().loader
    assert loader is not None  # noqa: S101 - for the type checker
    return loader.get_source(_environment(), name)[0].strip()
