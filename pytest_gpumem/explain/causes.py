"""Find the causes of a grown peak by comparing its source lines with the baseline's.

A peak is one moment, and a change of the code can move it to another: lines may then have more
memory at the peak although they allocate as much as before. So a line is judged first by its own
peak, compared with that in the baseline.

Everything here is computed from data alone. Sizes are bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Final

from pytest_gpumem.breakdowns import MIN_KEPT, category_rows, keeper_reason, keepers_of, site_rows
from pytest_gpumem.judge.verdict import Cause
from pytest_gpumem.measurement import Site
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpumem.breakdowns import BreakdownRow, SiteKey
    from pytest_gpumem.judge.verdict import Comparison
    from pytest_gpumem.measurement import Attribution, Breakdown, LineKey, LinePeak, SegmentRequest

MAX_CAUSES: Final = 10
"""maximum number of causes listed in one verdict"""
MIN_ALIKE: Final = 0.5
"""least similarity, from 0 to 1, at which a new line counts as an old line that was edited"""
MIN_LEADING: Final = 4
"""parameters are named before gradients and optimizer state that grew at most N times as much"""
MIN_EDITED: Final = 50
"""an edited line that makes a module is named first if it grew by at least 1/N as much as the line
that would otherwise be first"""
SEGMENTS: Final = "new segments"
"""the category of a cause that is not a tensor: memory that the allocator reserved"""
MADE: Final = {"parameters", "buffers"}
"""categories of memory that modules own"""
ALIKE_FACTOR: Final = 0.03
"""relative difference up to which two growth factors count as equal"""
MIN_EVEN_LINES: Final = 3
"""if at least so many lines grow by one factor, none of them is the cause"""
_COMMENT: Final = re.compile(r"\s*#[^'\"]*$")
FOLLOWING: Final = {"gradients", "optimizer state"}
"""categories that grow when parameters do: the parameters are then named first"""


def _segment_causes(requests: Sequence[SegmentRequest], baseline: int) -> tuple[Cause, ...]:
    """Return the lines whose requests made the allocator reserve more than in the baseline."""
    groups: dict[tuple[str, int], list[SegmentRequest]] = {}
    for request in requests:
        if request.reserved > baseline:
            groups.setdefault((request.path, request.line), []).append(request)
    causes = []
    for group in groups.values():
        first, nbytes = group[0], sum(request.nbytes for request in group)
        site = Site(
            *(first.path, first.line, first.function, first.code, ""), "other", nbytes, len(group)
        )
        reasons = tuple(dict.fromkeys(_segment_reason(request) for request in group))
        causes.append(Cause(nbytes, SEGMENTS, site, reasons=reasons))
    causes.sort(key=lambda cause: -cause.nbytes)
    return tuple(causes[:MAX_CAUSES])


def _segment_reason(request: SegmentRequest) -> str:
    """Describe why a request took a new segment: what was cached, and what fragmented it."""
    text = f"requested {format_size(request.requested)}"
    if not request.pieces:
        return f"{text} when nothing was cached"
    if request.pieces == 1:
        cache = f"{text} when one piece of {format_size(request.cached)} was cached"
    else:
        cache = (
            f"{text} when {format_size(request.cached)} were cached in {request.pieces} pieces, "
            f"the largest of {format_size(request.largest)}"
        )
    if not request.held_by:
        return cache
    return f"{cache}; tensors of {' and '.join(request.held_by)} lie between them"


@dataclass(frozen=True, slots=True)
class _LineGrowth:
    """How much a source line's own peak grew since the baseline."""

    peak: LinePeak
    nbytes: int


def growth_causes(
    row: Comparison,
    old: Sequence[Breakdown],
    new: Sequence[Attribution],
    *,
    of_one_program: bool = True,
) -> tuple[Cause, ...]:
    """Return the causes of a grown peak; () where they are unknown, as without an old breakdown.

    If the lines' growth does not make up the peak's, the causes are categories. ``of_one_program``
    says that both breakdowns come from the same code (possibly edited), not from two parts of a
    test.
    """
    if row.peak == "pinned":
        return ()
    if row.excess > 0 and row.peak == "reserved" and len(new) > row.device:
        return _segment_causes(new[row.device].segments, row.baseline or 0)
    if row.excess <= 0 or row.peak == "reserved" or min(len(old), len(new)) <= row.device:
        return ()
    keepers = new[row.device].keepers
    current, baseline = new[row.device].breakdown, old[row.device]
    rows = site_rows(current, baseline)
    growths = line_growths(current.lines, baseline.lines)
    own = {_line_key(line.peak): line.nbytes for line in growths}
    nets, moved = _net_growths(rows, own)
    if not any(nets.values()):  # no line grew: the peak is at another moment
        nets, moved = _net_growths(rows, {})
    grown = [site_row for site_row in rows if nets.get(id(site_row), 0) > 0]
    growth = sum(current.categories.values()) - sum(baseline.categories.values())
    if not grown or sum(nets.values()) * MIN_KEPT < growth:
        categories = [
            Cause(line.difference, line.name, reasons=_line_at_least(line, rows, baseline, growth))
            for line in category_rows(current, baseline)[:-1]
            if line.difference is not None and line.difference > 0
        ]
        return tuple(categories[:MAX_CAUSES])
    grown.sort(key=lambda site_row: (-nets[id(site_row)], -(site_row.difference or 0)))
    lead = grown[0]
    parameters = [row for row in grown if row.site and row.site.category == "parameters"]
    # More parameters need more gradients and more optimizer state: then name the parameters first.
    # Do not if they grew by only a few bytes: the allocator may have served them from larger free
    # blocks without splitting these.
    least = sum(row.difference or 0 for row in parameters) * MIN_LEADING
    if lead.site and lead.site.category in FOLLOWING and least >= (lead.difference or 0):
        grown.sort(key=lambda row: row not in parameters)
    if of_one_program:
        # A line that makes a wider layer is the cause, although lines that run the layer grow more.
        least = (grown[0].difference or 0) // MIN_EDITED
        makers = [row for row in grown if row.site and row.site.category in MADE]
        edited = [row for row in makers if _is_edited(row) and (row.difference or 0) >= least]
        grown.sort(key=lambda row: row not in edited)
    causes = []
    for line in grown[:MAX_CAUSES]:
        nbytes, site = (line.difference or 0) - moved[id(line)], line.site
        kept_by = keepers_of(site, keepers, nbytes) if site else ()
        causes.append(
            Cause(
                nbytes=nbytes,
                category=site.category if site else line.name,
                site=site,
                baseline_blocks=line.baseline_blocks,
                keepers=kept_by,
                reasons=tuple(keeper_reason(keeper, nbytes) for keeper in kept_by),
                old_code=line.old_code if _is_edited(line) else "",
            )
        )
    reasons = _further_reasons(causes[0], current, baseline, growths)
    first = replace(causes[0], reasons=(*causes[0].reasons, *reasons))
    return (first, *causes[1:])


def _line_at_least(
    category: BreakdownRow, rows: Sequence[BreakdownRow], baseline: Breakdown, growth: int
) -> tuple[str, ...]:
    """Return a sentence on the line that has most of a category's growth, or ().

    Only a line that the baseline does not list is named. In the baseline it had at most the
    category's bytes outside of the listed lines: this gives a lower bound of its growth. If the
    bound exceeds the peak's growth, memory of another category may only have moved to the line:
    then it is not named.
    """
    listed = sum(site.nbytes for site in baseline.sites if site.category == category.name)
    before = {str(name): nbytes for name, nbytes in baseline.categories.items()}
    most = max(before.get(category.name, 0) - listed, 0)
    for row in rows:
        least = row.nbytes - most
        if row.site is None or row.site.category != category.name or row.baseline is not None:
            continue
        if least <= growth and 2 * least > (category.difference or 0):
            return (f"at least {format_size(least)} of it at {row.name}",)
    return ()


def _net_growths(
    rows: Sequence[BreakdownRow], own: Mapping[LineKey, int]
) -> tuple[dict[int, int], Counter[int]]:
    """Return the bytes that each row adds to a growth, and those that only moved to it.

    Both are by the row's id. Memory that another line allocates now, or that counts as another
    category, only moved: what a row lost is subtracted from the row that gained it. ``own`` has the
    growth of each line's own peak, where it is known.
    """
    gains: dict[int, int] = {}
    for row in rows:
        difference = row.difference or 0
        if row.site is not None and difference > 0:
            gains[id(row)] = max(0, min(difference, own.get(_row_key(row)[:3], difference)))
    losses = {id(row): -(row.difference or 0) for row in rows if (row.difference or 0) < 0}
    moved: Counter[int] = Counter()
    keys = {id(row): _row_key(row) for row in rows}
    # Match first within the same line, then within the category; elsewhere match only equal bytes.
    for shared in (slice(3), slice(3, 4), slice(0)):
        for lost, nbytes in sorted(losses.items(), key=lambda loss: -loss[1]):
            # Memory moved only from lines that now allocate less. A line that allocates as much as
            # before merely has less memory at this moment.
            is_less = shared.stop and own.get(keys[lost][:3], -nbytes) < 0
            least = nbytes * (1 - ALIKE_FACTOR)
            kin = [
                gained
                for gained, gain in gains.items()
                if keys[gained][shared] == keys[lost][shared]
                and (gain == nbytes or (is_less and least <= gain <= nbytes * MIN_KEPT))
            ]
            if kin:
                nearest = min(kin, key=lambda gained: gains[gained])
                gains[nearest] = max(0, gains[nearest] - nbytes)
                moved[nearest] += nbytes
                del losses[lost]
    return gains, moved


def _row_key(row: BreakdownRow) -> SiteKey:
    site = row.site
    return (site.path, site.function, site.code, site.category) if site else ("", "", "", row.name)


def line_growths(current: Sequence[LinePeak], baseline: Sequence[LinePeak]) -> list[_LineGrowth]:
    """Return how much each source line grew, the largest growth first; [] without baseline lines.

    A baseline's line that no longer exists is compared with the most similar new line of the same
    function, as its edited form. A baseline lists only its largest lines, so it is unknown whether
    a smaller line grew.
    """
    if not baseline:
        return []
    old: Counter[LineKey] = Counter()
    for line in baseline:
        old[_line_key(line)] += line.nbytes
    smallest = min(line.nbytes for line in baseline)
    new: dict[LineKey, LinePeak] = {}
    for line in current:
        first = new.get(_line_key(line))
        new[_line_key(line)] = replace(first, nbytes=first.nbytes + line.nbytes) if first else line
    gone, added = old.keys() - new.keys(), new.keys() - old.keys()
    pairs = [
        (alike(old_key[2], new_key[2]), new_key, old_key)
        for old_key in gone
        for new_key in added
        if old_key[:2] == new_key[:2]
    ]
    edited: dict[LineKey, LineKey] = {}
    """each added line, with the line it replaces"""
    for ratio, new_key, old_key in sorted(pairs, reverse=True):
        if ratio >= MIN_ALIKE and new_key not in edited and old_key not in edited.values():
            edited[new_key] = old_key
    growths = [
        _LineGrowth(line, line.nbytes - old.get(edited.get(key, key), 0))
        for key, line in new.items()
        if key in old or key in edited or line.nbytes > smallest
    ]
    return sorted(growths, key=lambda growth: (-growth.nbytes, _line_key(growth.peak)))


def _line_key(line: LinePeak) -> LineKey:
    return line.path, line.function, line.code


def uniformly_grown_lines(rows: Sequence[BreakdownRow]) -> frozenset[tuple[str, int]]:
    """Return the lines that grew by the same factor as at least two other lines.

    A larger batch or more layers make all lines grow alike: none of them is the cause. Lines that
    allocate parameters or buffers are left out: a larger batch does not make these grow.
    """
    factors: dict[tuple[str, int], float] = {}
    for row in rows:
        if row.site is None or row.site.category in MADE:
            continue
        if row.baseline and (row.difference or 0) > 0:
            factors[_place_of_row(row)] = row.nbytes / row.baseline
    makers = {
        _place_of_row(row) for row in rows if row.site is not None and row.site.category in MADE
    }
    return frozenset(
        place
        for place, factor in factors.items()
        if place not in makers
        and sum(abs(like - factor) <= factor * ALIKE_FACTOR for like in factors.values())
        >= MIN_EVEN_LINES
    )


def _place_of_row(row: BreakdownRow) -> tuple[str, int]:
    return (row.site.path, row.site.line) if row.site else ("", 0)


def _is_edited(row: BreakdownRow) -> bool:
    code = without_comment(row.site.code if row.site else "")
    old_code = without_comment(row.old_code)
    return bool(old_code) and old_code != code and is_alike(old_code, code)


def _further_reasons(
    cause: Cause, current: Breakdown, baseline: Breakdown, growths: Sequence[_LineGrowth]
) -> Iterable[str]:
    """Yield further reasons: fragmentation, autocast now off, the forward line that grew most.

    The forward line is named if the cause is a line that calls a pass or makes parameters. Such a
    line does not show why it grew: a backward allocates for the lines of its forward, and
    ``model.cuda()`` for all modules.
    """
    grown = sum(current.categories.values()) - sum(baseline.categories.values())
    unsplit = (current.unsplit or 0) - (baseline.unsplit or 0)
    if baseline.unsplit is not None and 2 * unsplit > grown:  # most of the growth was not requested
        yield (
            f"fragmentation: {format_size(unsplit)} more are unused in blocks that are "
            "larger than the request, because the allocator did not split them"
        )
    if baseline.autocast and current.autocast is False:
        yield "no module runs under torch.autocast any more"
    site = cause.site
    calls = {(line.peak.path, line.peak.line) for line in growths if line.peak.calls_pass}
    if cause.keepers or site is None:  # keepers already explain the growth
        return
    if (site.path, site.line) not in calls and site.category != "parameters":
        return
    follows = {
        (at_peak.path, at_peak.line)
        for at_peak in current.sites
        if at_peak.category in FOLLOWING or at_peak.category == "parameters"
    }
    for growth in growths:
        line = growth.peak
        is_named = (line.path, line.line) in calls | follows | {(site.path, site.line)}
        if not is_named and growth.nbytes * MIN_KEPT >= cause.nbytes:
            size = format_size(growth.nbytes)
            place = f"{line.path}:{line.line}"
            yield f"as a result, {place} allocates {size} more in the forward pass: {line.code}"
            return


def without_comment(code: str) -> str:
    """Strip a line's trailing comment; a comment with quotes stays, as it may be in a string."""
    return _COMMENT.sub("", code)


def alike(old: str, new: str) -> float:
    """Return the similarity of two lines' code, from 0 to 1."""
    return SequenceMatcher(None, old, new).ratio()


def is_alike(old: str, new: str) -> bool:
    """Return whether the new line may be the old one, edited."""
    matcher = SequenceMatcher(None, old, new)
    # The upper bounds first: thousands of edits are compared, and ratio() is slow.
    bounds = matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio
    return all(ratio() >= MIN_ALIKE for ratio in bounds)
