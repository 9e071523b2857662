"""The page: one HTML file with a session's results in it, which needs no network.

A page of many results shows the most urgent ones: a browser is slow with thousands of sections, and
a JSON report has all results. Text from outside is escaped where the template prints it
(``finalize``), and the page's own policy lets no script run but its one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from markupsafe import Markup, escape

from pytest_gpumem.judge.breakdown_diff import provenance_text, site_name
from pytest_gpumem.judge.result import KEPT_SITES, hints_of, urgency, with_alike_ranks
from pytest_gpumem.judge.verdict import PEAKS, Kind, beyond_tolerance
from pytest_gpumem.report.page import timeline_svg
from pytest_gpumem.report.page.timeline_svg import LimitLine, RefusedRequest
from pytest_gpumem.report.parts.breakdown_rows import DeviceRows, device_rows
from pytest_gpumem.report.parts.card_matrix import TITLE as CARDS_TITLE
from pytest_gpumem.report.parts.card_matrix import card_matrix
from pytest_gpumem.report.parts.cause_sentences import cause_lines, row_cause, short_cause
from pytest_gpumem.report.parts.cells import circumstances, figure_cells, pinned_cell
from pytest_gpumem.report.parts.compared import comparison_sentences, tells_more_than_table
from pytest_gpumem.report.parts.session_words import moved_together
from pytest_gpumem.report.parts.update_text import update_summary
from pytest_gpumem.report.text import printable, signed_size, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2 import Environment

    from pytest_gpumem.judge.causes import HeldLine
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.judge.verdict import Comparison
    from pytest_gpumem.measurement import Attribution, Category, Stayed
    from pytest_gpumem.report.model import OwnOutcome, Report
    from pytest_gpumem.report.page.timeline_svg import Drawing

MAX_RESULTS = 500
"""results that a page shows: failures first, then tests with another memory"""
MAX_DRAWN = 100
"""timelines that are drawn, those of failures first: each takes about 25 ms and 10 kB"""
MAX_SITES = 12
"""source lines that a section lists, of each device"""
MAX_OPEN = 3
"""the first failures, which have open sections"""
MAX_SECTION_CAUSES = 3
"""causes that a section begins with; its table has all lines"""

COLUMNS = ("device", "batch", "allocated", "reserved", "pinned", "change", "budget")
"""columns of the table between a test's name and its verdict"""

FULL = 100
"""percent"""
_FIGURE = re.compile(r"[+-]?\d+(?:\.\d+)?")
"""a source line in a section; text from outside has no "<" in it"""


class DeviceSection(NamedTuple):
    """Where one device's peak comes from, with its timeline."""

    rows: DeviceRows
    drawing: Drawing | None
    legend: tuple[Category, ...]
    ghost: bool
    """whether the baseline's line is drawn over it"""
    undrawn: bool
    """whether it has a timeline that is not drawn"""


class OwnEntry(NamedTuple):
    """A test without a verdict with its place in the page: its own code failed, or skipped it."""

    anchor: str
    """the id of its section"""
    outcome: OwnOutcome
    rank: float
    opened: bool = False
    """whether its section is open when the page is"""

    @property
    def failed(self) -> bool:
        """Whether it failed the session."""
        return self.outcome.failed

    @property
    def word(self) -> str:
        """The outcome, as pytest names it."""
        return self.outcome.word

    @property
    def cause(self) -> str:
        """The error's first line, or the reason of the skip."""
        return self.outcome.message

    @property
    def keeper(self) -> str:
        """Nothing: it is of memory."""
        return ""

    @property
    def why(self) -> str:
        """The line below its name in its row."""
        return self.outcome.message

    @property
    def group(self) -> str:
        """The failures that it stands with."""
        return "by an error of the test's own"

    @property
    def mark(self) -> str:
        """A character beside the word, for readers without colours."""
        return "✕" if self.failed or self.word == "xfailed" else "○"

    @property
    def tone(self) -> str:
        """The class of its colour."""
        return "bad" if self.failed else "open"

    @property
    def cells(self) -> dict[str, str]:
        """The row of the table, without figures."""
        return dict.fromkeys(COLUMNS, "")

    @property
    def sort_keys(self) -> list[str | float | None]:
        """The keys by which the table's columns are sorted; None goes last."""
        return [printable(self.outcome.nodeid), "", *([None] * (len(COLUMNS) - 1)), self.rank]


class PageEntry(NamedTuple):
    """A result with its place in the page."""

    anchor: str
    """the id of its section, which later pages give the same test"""
    result: Result
    rank: float
    """of its verdict: the lower, the more urgent"""
    opened: bool = False
    """whether its section is open when the page is"""
    drawn: bool = False
    """whether its timelines are drawn"""

    @property
    def failed(self) -> bool:
        """Whether it failed the session."""
        return self.result.verdict.failed and not self.result.expected

    @property
    def word(self) -> str:
        """The verdict, as the table has it."""
        return self.result.word

    @property
    def cause(self) -> str:
        """Why it failed, in one line."""
        return short_cause(self.result)

    @property
    def why(self) -> str:
        """The line that failed it, for below its name: its figures have columns of their own."""
        if not self.failed:
            return ""
        cause, causes = row_cause(self.result), self.result.verdict.causes
        # What grew, or leaked, is told with the names of what keeps it.
        is_told = self.result.verdict.kind is Kind.LEAKED or (causes and causes[0].keepers)
        return cause if is_told and cause else "; ".join(filter(None, (cause, self.keeper)))

    @property
    def beyond(self) -> bool:
        """Whether the change is beyond the test's tolerance: only then it has a colour."""
        row = self.result.leading_comparison
        return row is not None and bool(beyond_tolerance([row]))

    @property
    def keeper(self) -> str:
        """The keeper of the first cause's memory, or why it grew: "" where that is not known."""
        causes = self.result.verdict.causes
        if causes and causes[0].reasons:
            return causes[0].reasons[0]
        reasons = [reason for line in self.result.held_lines for reason in line.reasons]
        if reasons:
            return reasons[0]
        stayed = self.result.measurement.stayed if self.result.measurement else None
        return f"held by {stayed.holders[0].text}" if stayed and stayed.holders else ""

    @property
    def held(self) -> list[HeldLine]:
        """The largest lines of a peak over a limit, where keepers of their blocks are known."""
        lines = self.result.held_lines
        return lines if any(line.reasons for line in lines) else []

    @property
    def group(self) -> str:
        """The cause that it shares with other failures: category and source line."""
        verdict, measurement = self.result.verdict, self.result.measurement
        if verdict.lead is not None:
            category = ""
            if verdict.lead.kind == "line" and verdict.causes:  # a foreign report may have none
                category = f"{verdict.causes[0].category}, "
            return f"{category}{verdict.lead.place}"
        oom = measurement.out_of_memory if measurement else None
        if oom is not None and oom.site:
            return f"out of memory at {oom.site}"
        stayed = measurement.stayed if measurement else None
        if stayed is not None and stayed.sites:
            return f"leaked, {site_name(stayed.sites[0])}"
        return str(verdict.kind)

    @property
    def leak(self) -> Stayed | None:
        """The memory that stayed, of a test that failed by it."""
        measurement = self.result.measurement
        leaked = self.result.verdict.kind is Kind.LEAKED
        return measurement.stayed if leaked and measurement else None

    @property
    def mark(self) -> str:
        """A character beside the verdict, for readers without colours."""
        return self.result.mark

    @property
    def tone(self) -> str:
        """The class of its colour."""
        if self.failed:
            return "bad"
        return "good" if self.result.verdict.kind.tone == "good" else "open"

    @property
    def cells(self) -> dict[str, str]:
        """The row of the table: device, batch size, figures in MiB, change, use of the budget."""
        batch = "" if self.result.batch_size is None else str(self.result.batch_size)
        cells = (self.result.device_key, batch, *figure_cells(self.result))
        return dict(zip(COLUMNS, cells, strict=True))

    @property
    def sort_keys(self) -> list[str | float | None]:
        """The keys by which the table's columns are sorted; None goes last."""
        keys: list[str | float | None] = [printable(self.result.name)]
        for name, cell in self.cells.items():
            figure = _FIGURE.search(cell)
            keys.append(cell if name == "device" else float(figure[0]) if figure else None)
        return [*keys, self.rank]

    @property
    def devices(self) -> list[DeviceSection]:
        """Where the peak of each device comes from; it draws, so a template asks once."""
        devices: list[DeviceSection] = []
        for rows, attribution in zip(
            device_rows(self.result), _attributions(self.result), strict=True
        ):
            timeline = attribution.timeline
            if timeline is None or not any(timeline.reserved):
                devices.append(DeviceSection(rows, None, (), ghost=False, undrawn=False))
                continue
            drawing, ghost = None, ghost_of(self.result, rows.index)
            if self.drawn:
                limits = limits_of(self.result, rows.index)
                refusal = refusal_of(self.result, rows.index)
                drawing = timeline_svg.draw(timeline, limits, refusal=refusal, ghost=ghost)
            legend = tuple(timeline_svg.categories_of(timeline))
            devices.append(DeviceSection(rows, drawing, legend, bool(ghost), not self.drawn))
        return devices


def page(report: Report, *, when: str = "", json_name: str = "") -> str:
    """Return the page.

    ``json_name`` is the JSON report with all results, as seen from the page's folder, or "".
    """
    entries = _all_entries(report)
    shown = entries[:MAX_RESULTS]
    parts: Any = _template_environment().get_template("parts.html.j2").module
    rows, sections = [], []
    for entry in shown:
        if isinstance(entry, OwnEntry):
            rows.append(row_html(entry, name_html(entry.outcome)))
            sections.append(str(parts.own_section(entry)))
        else:
            rows.append(row_html(entry, name_html(entry.result)))
            sections.append(str(parts.section(entry)))
    counter = Counter((entry.word, entry.tone) for entry in entries)
    # A new toolchain moves many tests at one line: it is the cause then, and not the line.
    toolchains = [change.sentence for change in moved_together(report.results)]
    causes = toolchains or cause_lines(report.results)
    compared = {}
    if tells_more_than_table(report.results):
        compared = comparison_sentences(report.results)
    remarks = [*report.remarks, *(f"baselines on {key}: {compared[key]}" for key in compared)]
    if report.updates is not None:
        numbers, *errors = update_summary(report.updates, brief=True, width=10_000).splitlines()
        remarks += [f"baselines: {numbers}", *errors]
    modules = [result.module for result in report.results]
    modules += [outcome.module for outcome in report.own_outcomes]
    return (
        _template_environment()
        .get_template("page.html.j2")
        .render(
            report=report,
            causes=causes,
            entries=entries,
            failures=[entry for entry in entries if entry.failed],
            remarks=[remark for remark in remarks if remark not in causes],
            when=when,
            counts=[
                {"word": word, "number": number, "tone": tone}
                for (word, tone), number in counter.items()
            ],
            devices=len({result.device_key for result in report.results}),
            batches=any(result.batch_size is not None for result in report.results),
            pins=any(map(pinned_cell, report.results)),
            modules=list(dict.fromkeys(modules)),
            matrix=card_matrix(report.results),
            max_rows=MAX_RESULTS,
            rows=_markup("".join(rows)),
            sections=_markup("".join(sections)),
            json_name=json_name,
            json_address=quote(json_name),
            script=_markup(_source("page.js")),
            style=_markup(_source("page.css")),
            script_hash=_hash(_source("page.js")),
            style_hash=_hash(_source("page.css")),
        )
    )


def anchor(result: Result) -> str:
    """Return the id of a result's section: the same in every page, whatever else is in it."""
    return f"t-{digest_of(result.nodeid, result.part, result.device_key)}"


def digest_of(*names: str) -> str:
    """Return letters that stand for names."""
    joined = "\0".join(names).encode("utf-8", "backslashreplace")
    return hashlib.sha256(joined).hexdigest()[:12]


def _all_entries(report: Report) -> list[PageEntry | OwnEntry]:
    """Return the rows of the table, the most urgent first: results, and tests without a verdict."""
    taken: Counter[str] = Counter()

    def own_id(name: str) -> str:
        taken[name] += 1
        return name if taken[name] == 1 else f"{name}-{taken[name]}"

    results = with_alike_ranks(report.results)
    ranked = [PageEntry(own_id(anchor(each)), each, urgency(each)) for each in results]
    # Of tests with one verdict, those whose lines moved come first.
    ranked.sort(key=lambda entry: (entry.rank, not lines_moved(entry.result)))
    drawn, entries = 0, list[PageEntry | OwnEntry]()
    for ranked_entry in ranked:
        attributions = _attributions(ranked_entry.result)
        drawn += sum(attribution.timeline is not None for attribution in attributions)
        entries.append(ranked_entry._replace(drawn=drawn <= MAX_DRAWN))
    kinds = len(Kind)
    ranks = {"failed": kinds - 0.5, "error": kinds - 0.4, "xfailed": 2 * kinds - 0.5}
    for outcome in report.own_outcomes:
        name = own_id(f"own-{digest_of(outcome.nodeid)}")
        entries.append(OwnEntry(name, outcome, ranks.get(outcome.word, 3 * kinds)))
    entries.sort(key=lambda entry: entry.rank)
    first = [place for place, entry in enumerate(entries) if entry.failed][:MAX_OPEN]
    for place in first:
        entries[place] = entries[place]._replace(opened=True)
    return entries


def lines_moved(result: Result) -> bool:
    """Return whether source lines differ from the baseline's; False where that is not known."""
    pairs = zip(_attributions(result), result.breakdowns_before, strict=False)
    return any(new.breakdown.sites[:KEPT_SITES] != old.sites for new, old in pairs)


def _attributions(result: Result) -> Sequence[Attribution]:
    return result.measurement.attributions if result.measurement else ()


def limits_of(result: Result, device: int) -> list[LimitLine]:
    """Return the levels that a device's timeline is drawn with: budgets, the card, the baseline."""
    measurement = result.measurement
    if measurement is None:
        return []
    info = measurement.device
    usable = info.total_memory - info.context
    limits = [LimitLine("card", f"{info.name} {size(usable)}", usable)]
    for row in result.verdict.comparisons:
        if row.device != device or row.peak not in PEAKS:
            continue
        if row.budget is not None and row.budget != usable:
            limits.append(LimitLine("budget", f"budget {row.peak} {size(row.budget)}", row.budget))
        if row.baseline is not None and row.peak == "allocated" and row.difference:
            limits.append(
                LimitLine("baseline", f"baseline's peak {size(row.baseline)}", row.baseline)
            )
    return limits


def ghost_of(result: Result, device: int) -> tuple[int, ...]:
    """Return the baseline's course on a device; none where it is unknown, or the same."""
    breakdowns, attributions = result.breakdowns_before, _attributions(result)
    if min(len(breakdowns), len(attributions)) <= device:
        return ()
    course = breakdowns[device].course
    return () if course == attributions[device].breakdown.course else course


def refusal_of(result: Result, device: int) -> RefusedRequest | None:
    """Return the request that a device refused; None where it refused none."""
    measurement = result.measurement
    oom = measurement.out_of_memory if measurement else None
    if measurement is None or oom is None or oom.device_index != device:
        return None
    budgets = [
        row.budget
        for row in result.verdict.comparisons
        if row.device == device and row.peak == "reserved" and row.budget is not None
    ]
    usable = measurement.device.total_memory - measurement.device.context
    return RefusedRequest(oom.requested, oom.reserved, min([*budgets, usable]))


def _hash(source: str) -> str:
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


# -- the templates --


@cache
def _template_environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("pytest_gpumem.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        # Without characters that a reader would not see; jinja2 escapes what is no markup after it.
        finalize=lambda value: (
            "" if value is None else printable(value) if type(value) is str else value
        ),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=size)
    environment.globals.update(
        circumstances=circumstances,
        hints_of=hints_of,
        cards_title=CARDS_TITLE,
        provenance_text=provenance_text,
        max_sites=MAX_SITES,
        max_drawn=MAX_DRAWN,
        size=lambda *args, **options: Markup(size_cell(*args, **options)),  # noqa: S704 - words of the templates
        difference=lambda *args: Markup(difference_cell(*args)),  # noqa: S704 - likewise
        name=lambda test: Markup(name_html(test)),  # noqa: S704 - it is escaped
        comparisons=comparisons_table,
        signed=signed_size,
        max_section_causes=MAX_SECTION_CAUSES,
    )
    return environment


def name_html(test: Result | OwnOutcome) -> str:
    """Return the name of a test or a part as markup: its file, the rest, the part."""
    name = test.nodeid[len(test.module) :]
    kind = "module" if name else "test"  # a program without arguments is its file
    words = [f'<span class="{kind}">{escape(printable(test.module + name[:2]))}</span>']
    if name:
        words.append(f'<wbr><span class="test">{escape(printable(name[2:]))}</span>')
    if test.part:
        words.append(f' <span class="part">({escape(printable(test.part))})</span>')
    return "".join(words)


def size_cell(nbytes: int | None, label: str = "", kind: str = "") -> str:
    """Return a cell of a table, a section's most frequent part: a macro takes ten times as long.

    ``label`` is the name in a table without columns.
    """
    kind = f" {kind}" if kind else ""
    label = f' data-label="{label}"' if label else ""
    title = "" if nbytes is None else f' title="{nbytes:,} B"'
    return f'<td class="n{kind}"{label}{title}>{size(nbytes)}</td>'


def comparisons_table(rows: Sequence[Comparison], measured: str) -> Markup:
    """Return the table of figures beside budgets and baselines: each section has one."""
    several = len({row.device for row in rows}) > 1
    budgets = any(row.budget is not None for row in rows)
    baselines = any(row.baseline is not None for row in rows)
    titles = [
        *(["budget"] * budgets),
        *(["baseline"] * baselines),
        measured,
        *(["difference", "tolerance"] * baselines),
    ]
    heads = "".join(f'<th scope="col" class="n">{title}</th>' for title in titles)
    lines = []
    for row in rows:
        device = f", device {row.device}" if several else ""
        cells = [
            *([size_cell(row.budget, "budget")] * budgets),
            *([size_cell(row.baseline, "baseline")] * baselines),
            size_cell(row.measured, measured),
        ]
        if baselines:
            beyond = bool(beyond_tolerance([row]))
            cells.append(difference_cell(row.difference, coloured=beyond))
            cells.append(size_cell(row.allowance, "tolerance"))
        lines.append(f'<tr><th scope="row">{row.title}{device}</th>{"".join(cells)}</tr>')
    return _markup(
        '<div class="scroll"><table class="figures cards" aria-label="Peaks beside their limits">'
        f"\n<thead><tr><td></td>{heads}</tr>"
        f"</thead>\n<tbody>\n{''.join(lines)}\n</tbody></table></div>"
    )


def row_html(entry: PageEntry | OwnEntry, name: str) -> str:
    """Return a result's row of the table, with data that the page's script sorts and filters by."""
    figures = []
    for title, cell in entry.cells.items():
        text = escape(printable(cell))
        if title == "device":
            figures.append(f'<td role="cell" class="device">{text}</td>')
            continue
        kind = f" {title}" if title in {"batch", "pinned", "change", "budget"} else ""
        label = f' data-label="{title}"' if cell else ""
        inner = str(text)
        if title == "change" and isinstance(entry, PageEntry):
            way = {"+": " up", "-": " down"}.get(cell[:1], "") if entry.beyond else ""
            inner = f'<span class="move{way}">{text}</span>'
        elif title == "budget" and isinstance(entry, PageEntry):
            inner = f"{text}{_meter(cell)}"
        figures.append(f'<td role="cell" class="n{kind}"{label}>{inner}</td>')
    words = printable(entry.why)
    why = f'<span class="why">{escape(words)}</span>' if words else ""
    data = {"keys": json.dumps(entry.sort_keys)}
    if entry.failed:
        data |= {"cause": f"{entry.cause} {entry.keeper}", "group": entry.group}
    attributes = "".join(f' data-{key}="{escape(printable(text))}"' for key, text in data.items())
    failed = ' class="failed"' if entry.failed else ""
    row = "\n".join(figures)
    return (
        f'<tr role="row"{failed}{attributes}>\n<th scope="row" role="rowheader"><a class="name" '
        f'href="#{entry.anchor}">{name}</a>{why}</th>\n{row}\n<td role="cell" class="verdict">'
        f'<span class="badge {entry.tone}"><span aria-hidden="true">{entry.mark}</span> '
        f"{escape(entry.word)}</span></td>\n</tr>\n"
    )


def _meter(cell: str) -> str:
    """Return a bar as long as the share of a budget that is used; "" of a cell without one."""
    share = _FIGURE.search(cell)
    if share is None:
        return ""
    percent = float(share[0])
    kind = "over" if percent > FULL or cell.startswith(">") else "used"
    return (
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="{kind}" width="{min(percent, FULL):.0f}" height="8"/></svg>'
    )


def difference_cell(nbytes: int | None, label: str = "difference", *, coloured: bool = True) -> str:
    """Return the cell of a difference, with the way that it goes as its class."""
    way = "" if not nbytes or not coloured else " up" if nbytes > 0 else " down"
    title = "" if nbytes is None else f' title="{nbytes:+,} B"'
    words = "0" if nbytes == 0 else signed_size(nbytes)
    return f'<td data-label="{label}" class="n{way}"{title}>{words}</td>'


def _markup(html: str) -> Markup:
    """Return text that is markup already, of this package's own making."""
    return Markup(html)  # noqa: S704 - templates made it, or it lies beside them


@cache
def _source(name: str) -> str:
    loader = _template_environment().loader
    assert loader is not None  # noqa: S101 - for the type checker
    return loader.get_source(_template_environment(), name)[0].strip()
