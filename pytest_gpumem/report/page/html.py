"""Render the page: one HTML file with a session's results, which needs no network.

With many results it shows the most urgent: browsers are slow with thousands of sections, and the
JSON report has them all. The template escapes outside text when it prints it (``finalize``), and
the page's content security policy allows no script but its own.
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

from pytest_gpumem.breakdowns import provenance_text, site_name
from pytest_gpumem.judge.result import KEPT_SITES, Result
from pytest_gpumem.judge.verdict import PEAKS, Kind, beyond_tolerance
from pytest_gpumem.report.model import hints_of, urgency, with_alike_ranks
from pytest_gpumem.report.page import timeline_svg
from pytest_gpumem.report.page.timeline_svg import LimitLine, RefusedRequest
from pytest_gpumem.report.parts.breakdown_rows import DeviceRows, device_rows
from pytest_gpumem.report.parts.card_matrix import TITLE as CARDS_TITLE
from pytest_gpumem.report.parts.card_matrix import card_matrix
from pytest_gpumem.report.parts.cause_sentences import cause_lines, row_cause, short_cause
from pytest_gpumem.report.parts.cells import circumstances, figure_cells, pinned_cell
from pytest_gpumem.report.parts.session_words import (
    comparison_sentences,
    moved_together,
    tells_more_than_table,
)
from pytest_gpumem.report.parts.update_text import update_summary
from pytest_gpumem.report.text import printable, signed_size, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2 import Environment

    from pytest_gpumem.judge.verdict import Comparison
    from pytest_gpumem.measurement import Attribution, Category
    from pytest_gpumem.report.model import OwnOutcome, Report
    from pytest_gpumem.report.page.timeline_svg import Drawing

MAX_RESULTS = 500
"""results that a page shows: failures first, then tests whose memory changed"""
MAX_DRAWN = 100
"""timelines to draw, those of failures first: each takes about 25 ms and 10 kB"""
MAX_SITES = 12
"""source lines that a section lists, per device"""
MAX_OPEN = 3
"""sections of failures that are open at first"""
MAX_SECTION_CAUSES = 3
"""causes at the top of a section; the section's table has up to MAX_SITES lines"""

COLUMNS = ("device", "batch", "allocated", "reserved", "pinned", "change", "budget")
"""columns between a test's name and its verdict"""

FULL = 100
"""percent of a limit at which its bar is full"""
_FIGURE = re.compile(r"[+-]?\d+(?:\.\d+)?")
"""the number in a cell, by which the page's script sorts"""


class DeviceSection(NamedTuple):
    """The breakdown of one device's peak, with its timeline."""

    rows: DeviceRows
    drawing: Drawing | None
    legend: tuple[Category, ...]
    ghost: bool
    """whether the baseline's memory over time is drawn over the timeline"""
    undrawn: bool
    """whether the device has a timeline that is not drawn"""


class PageEntry(NamedTuple):
    """A table row with its section: a result, or a test that its own code failed or skipped."""

    anchor: str
    """the id of its section, the same for this test in every page"""
    test: Result | OwnOutcome
    rank: float
    """urgency of its verdict, the most urgent lowest"""
    failed: bool
    """whether the test makes the session fail"""
    word: str
    """the verdict's word, or pytest's word for the outcome"""
    mark: str
    """a character beside the word, for readers without colors"""
    tone: str
    """the CSS class of the word's color"""
    opened: bool = False
    """whether its section is open when the page opens"""
    drawn: bool = False
    """whether its timelines are drawn"""


class FailureWords(NamedTuple):
    """Describes a failed test."""

    why: str
    """shown below the test's name, without the figures, which have their own columns"""
    cause: str
    """the text that the filter searches: the failure in one line, and the keeper"""
    group: str
    """the cause shared with other failures: category and source line"""


def failure_words(test: Result | OwnOutcome) -> FailureWords:
    """Describe why a test failed, or was skipped by its own code."""
    if not isinstance(test, Result):
        return FailureWords(test.message, f"{test.message} ", "by an error of the test's own")
    verdict, measurement = test.verdict, test.measurement
    oom = measurement.out_of_memory if measurement else None
    stayed = measurement.stayed if measurement else None
    reasons = [*(verdict.causes[0].reasons[:1] if verdict.causes else ())]
    reasons += [reason for line in test.held_lines for reason in line.reasons]
    reasons += [f"held by {stayed.holders[0].names}"] if stayed and stayed.holders else []
    keeper = reasons[0] if reasons else ""
    cause = row_cause(test)
    # The cause of a growth or a leak already names the keepers.
    cause_says_all = verdict.kind is Kind.LEAKED or (verdict.causes and verdict.causes[0].keepers)
    why = cause if cause_says_all and cause else "; ".join(filter(None, (cause, keeper)))
    group = str(verdict.kind)
    if verdict.lead is not None:
        # A report that another program wrote may have no causes.
        of_line = verdict.lead.kind == "line" and verdict.causes
        category = f"{verdict.causes[0].category}, " if of_line else ""
        group = f"{category}{verdict.lead.place}"
    elif oom is not None and oom.site:
        group = f"out of memory at {oom.site}"
    elif stayed is not None and stayed.sites:
        group = f"leaked, {site_name(stayed.sites[0])}"
    return FailureWords(why, f"{short_cause(test)} {keeper}", group)


def device_sections(result: Result, *, drawn: bool) -> list[DeviceSection]:
    """Return the breakdown of each device's peak, with its timeline if that is drawn."""
    devices: list[DeviceSection] = []
    for rows, attribution in zip(device_rows(result), _attributions(result), strict=True):
        timeline = attribution.timeline
        if timeline is None or not any(timeline.reserved):
            devices.append(DeviceSection(rows, None, (), ghost=False, undrawn=False))
            continue
        drawing, ghost = None, ghost_of(result, rows.index)
        if drawn:
            limits, refusal = limits_of(result, rows.index), refusal_of(result, rows.index)
            drawing = timeline_svg.draw(timeline, limits, refusal=refusal, ghost=ghost)
        legend = tuple(timeline_svg.categories_of(timeline))
        devices.append(DeviceSection(rows, drawing, legend, bool(ghost), not drawn))
    return devices


def page(report: Report, *, when: str = "", json_name: str = "") -> str:
    """Return the page's HTML.

    ``json_name`` is the path from the page to the JSON report with all results, or "".
    """
    entries = _all_entries(report)
    shown = entries[:MAX_RESULTS]
    parts: Any = _template_environment().get_template("parts.html.j2").module
    sections = [
        str((parts.section if isinstance(entry.test, Result) else parts.own_section)(entry))
        for entry in shown
    ]
    counter = Counter((entry.word, entry.tone) for entry in entries)
    # If a new toolchain changed many tests, that is their cause, not a source line that they share.
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
    template = _template_environment().get_template("page.html.j2")
    return template.render(
        report=report,
        causes=causes,
        entries=entries,
        remarks=[remark for remark in remarks if remark not in causes],
        when=when,
        counts=list(counter.items()),
        devices=len({result.device_key for result in report.results}),
        batches=any(result.batch_size is not None for result in report.results),
        pins=any(map(pinned_cell, report.results)),
        modules=list(dict.fromkeys(modules)),
        matrix=card_matrix(report.results),
        max_rows=MAX_RESULTS,
        rows=_markup("".join(map(row_html, shown))),
        sections=_markup("".join(sections)),
        json_name=json_name,
        json_address=quote(json_name),
        script=_markup(_source("page.js")),
        style=_markup(_source("page.css")),
        script_hash=_hash(_source("page.js")),
        style_hash=_hash(_source("page.css")),
    )


def anchor(result: Result) -> str:
    """Return the id of a result's section, which is the same in every page."""
    return f"t-{digest_of(result.nodeid, result.part, result.device_key)}"


def digest_of(*names: str) -> str:
    """Hash names to a short hexadecimal digest."""
    joined = "\0".join(names).encode("utf-8", "backslashreplace")
    return hashlib.sha256(joined).hexdigest()[:12]


def _all_entries(report: Report) -> list[PageEntry]:
    """Return all rows, the most urgent first: results, and tests without a verdict."""
    taken: Counter[str] = Counter()

    def own_id(name: str) -> str:
        taken[name] += 1
        return name if taken[name] == 1 else f"{name}-{taken[name]}"

    anchors = [(own_id(anchor(each)), each) for each in with_alike_ranks(report.results)]
    # Among tests with the same verdict, those whose largest lines differ from the baseline's come
    # first.
    anchors.sort(key=lambda pair: (urgency(pair[1]), not lines_moved(pair[1])))
    drawn, entries = 0, list[PageEntry]()
    for name, result in anchors:
        drawn += sum(attribution.timeline is not None for attribution in _attributions(result))
        failed = result.verdict.failed and not result.expected
        tone = "bad" if failed else "good" if result.verdict.kind.tone == "good" else "open"
        entry = PageEntry(name, result, urgency(result), failed, result.word, result.mark, tone)
        entries.append(entry._replace(drawn=drawn <= MAX_DRAWN))
    kinds = len(Kind)
    ranks = {"failed": kinds - 0.5, "error": kinds - 0.4, "xfailed": 2 * kinds - 0.5}
    for outcome in report.own_outcomes:
        name, word = own_id(f"own-{digest_of(outcome.nodeid)}"), outcome.word
        mark = "✕" if outcome.failed or word == "xfailed" else "○"
        tone = "bad" if outcome.failed else "open"
        rank = ranks.get(word, 3 * kinds)
        entries.append(PageEntry(name, outcome, rank, outcome.failed, word, mark, tone))
    entries.sort(key=lambda entry: entry.rank)
    first = [place for place, entry in enumerate(entries) if entry.failed][:MAX_OPEN]
    for place in first:
        entries[place] = entries[place]._replace(opened=True)
    return entries


def lines_moved(result: Result) -> bool:
    """Return whether the largest lines of a peak, or their bytes, differ from the baseline's."""
    pairs = zip(_attributions(result), result.breakdowns_before, strict=False)
    return any(new.breakdown.sites[:KEPT_SITES] != old.sites for new, old in pairs)


def _attributions(result: Result) -> Sequence[Attribution]:
    return result.measurement.attributions if result.measurement else ()


def limits_of(result: Result, device: int) -> list[LimitLine]:
    """Return the levels drawn in a device's timeline: its memory, budgets, the baseline's peak."""
    measurement = result.measurement
    if measurement is None:
        return []
    info = measurement.device
    usable = info.usable_memory
    limits = [LimitLine("card", f"{info.name} {size(usable)}", usable)] if usable else []
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
    """Return the baseline's memory over time, to draw over this run's; () if unknown or equal."""
    breakdowns, attributions = result.breakdowns_before, _attributions(result)
    if min(len(breakdowns), len(attributions)) <= device:
        return ()
    course = breakdowns[device].course
    return () if course == attributions[device].breakdown.course else course


def refusal_of(result: Result, device: int) -> RefusedRequest | None:
    """Return the request that a device refused; None if it refused none."""
    measurement = result.measurement
    oom = measurement.out_of_memory if measurement else None
    if measurement is None or oom is None or oom.device_index != device:
        return None
    budgets = [
        row.budget
        for row in result.verdict.comparisons
        if row.device == device and row.peak == "reserved" and row.budget is not None
    ]
    usable = measurement.device.usable_memory  # 0: unknown
    cap = min([*budgets, *([usable] if usable else [])], default=0)
    # Not every accelerator enforces a budget, so more than the cap may be reserved.
    return RefusedRequest(oom.requested, oom.reserved, max(cap, oom.reserved))


def _hash(source: str) -> str:
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


@cache
def _template_environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("pytest_gpumem.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        # Escape characters that a reader would not see; jinja2 then escapes HTML, except in Markup.
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
        leaked=Kind.LEAKED,
        device_sections=device_sections,
        cards_title=CARDS_TITLE,
        provenance_text=provenance_text,
        max_sites=MAX_SITES,
        max_drawn=MAX_DRAWN,
        size=lambda *args, **options: Markup(size_cell(*args, **options)),  # noqa: S704 - the templates' words
        difference=lambda *args: Markup(difference_cell(*args)),  # noqa: S704 - likewise
        name=lambda test: Markup(name_html(test)),  # noqa: S704 - it is escaped
        comparisons=comparisons_table,
        signed=signed_size,
        max_section_causes=MAX_SECTION_CAUSES,
    )
    return environment


def name_html(test: Result | OwnOutcome) -> str:
    """Return a test's or part's name as markup: its file, the rest, the part."""
    name = test.nodeid[len(test.module) :]
    kind = "module" if name else "test"  # without arguments, a program's file is its whole name
    words = [f'<span class="{kind}">{escape(printable(test.module + name[:2]))}</span>']
    if name:
        words.append(f'<wbr><span class="test">{escape(printable(name[2:]))}</span>')
    if test.part:
        words.append(f' <span class="part">({escape(printable(test.part))})</span>')
    return "".join(words)


def size_cell(nbytes: int | None, label: str = "", kind: str = "") -> str:
    """Return a size's table cell.

    Sections consist mostly of such cells, and a macro of the template takes ten times as long to
    render one. ``label`` names the figure on a narrow screen, where the table has no columns.
    """
    kind = f" {kind}" if kind else ""
    label = f' data-label="{label}"' if label else ""
    title = "" if nbytes is None else f' title="{nbytes:,} B"'
    return f'<td class="n{kind}"{label}{title}>{size(nbytes)}</td>'


def comparisons_table(rows: Sequence[Comparison], measured: str) -> Markup:
    """Return a section's table of figures beside their budgets and baselines.

    ``measured`` is the title of the column with the figures.
    """
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


def row_html(entry: PageEntry) -> str:
    """Return a test's table row, with the data that the page's script sorts and filters by."""
    test, cells, beyond = entry.test, [""] * len(COLUMNS), False
    if isinstance(test, Result):
        batch, lead = test.batch_size, test.leading_comparison
        cells = [test.device_key, "" if batch is None else str(batch), *figure_cells(test)]
        beyond = lead is not None and bool(beyond_tolerance([lead]))  # colors the change
    figures = []
    name = f"{test.nodeid} ({test.part})" if test.part else test.nodeid
    keys: list[str | float | None] = [printable(name)]
    for title, cell in zip(COLUMNS, cells, strict=True):
        figure = _FIGURE.search(cell)
        keys.append(cell if title == "device" else float(figure[0]) if figure else None)
        text = escape(printable(cell))
        if title == "device":
            figures.append(f'<td role="cell" class="device">{text}</td>')
            continue
        kind = f" {title}" if title in {"batch", "pinned", "change", "budget"} else ""
        label = f' data-label="{title}"' if cell else ""
        inner = str(text)
        if title == "change" and isinstance(test, Result):
            way = {"+": " up", "-": " down"}.get(cell[:1], "") if beyond else ""
            inner = f'<span class="move{way}">{text}</span>'
        elif title == "budget" and figure:  # a bar shows the used share
            percent = float(figure[0])
            kind_of_bar = "over" if percent > FULL or cell.startswith(">") else "used"
            inner = (
                f'{text}<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" '
                f'aria-hidden="true"><rect class="{kind_of_bar}" '
                f'width="{min(percent, FULL):.0f}" height="8"/></svg>'
            )
        figures.append(f'<td role="cell" class="n{kind}"{label}>{inner}</td>')
    data, why = {"keys": json.dumps([*keys, entry.rank])}, ""  # the page's script sorts None last
    if entry.failed or not isinstance(test, Result):
        words = failure_words(test)
        if words.why:
            why = f'<span class="why">{escape(printable(words.why))}</span>'
        data |= {"cause": words.cause, "group": words.group} if entry.failed else {}
    attributes = "".join(f' data-{key}="{escape(printable(text))}"' for key, text in data.items())
    failed = ' class="failed"' if entry.failed else ""
    row = "\n".join(figures)
    link = f'<a class="name" href="#{entry.anchor}">{name_html(test)}</a>'
    return (
        f'<tr role="row"{failed}{attributes}>\n<th scope="row" role="rowheader">{link}{why}</th>'
        f'\n{row}\n<td role="cell" class="verdict">'
        f'<span class="badge {entry.tone}"><span aria-hidden="true">{entry.mark}</span> '
        f"{escape(entry.word)}</span></td>\n</tr>\n"
    )


def difference_cell(nbytes: int | None, label: str = "difference", *, coloured: bool = True) -> str:
    """Return the cell of a difference, with its direction as CSS class."""
    way = "" if not nbytes or not coloured else " up" if nbytes > 0 else " down"
    title = "" if nbytes is None else f' title="{nbytes:+,} B"'
    words = "0" if nbytes == 0 else signed_size(nbytes)
    return f'<td data-label="{label}" class="n{way}"{title}>{words}</td>'


def _markup(html: str) -> Markup:
    """Mark this package's own HTML as safe."""
    return Markup(html)  # noqa: S704 - text from outside is escaped in it


@cache
def _source(name: str) -> str:
    loader = _template_environment().loader
    assert loader is not None  # noqa: S101 - for the type checker
    return loader.get_source(_template_environment(), name)[0].strip()
