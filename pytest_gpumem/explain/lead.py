"""Find the causes of a growth, and its lead: the sentence that every report begins with.

The lead is the first of these that exists: an edited line that allocates the memory; a changed
toolchain version; an edited line elsewhere. Without any of them it is the line that grew most.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pytest_gpumem.breakdowns import site_name
from pytest_gpumem.explain.causes import SEGMENTS, growth_causes
from pytest_gpumem.explain.source_changes import Edit, Edits
from pytest_gpumem.judge.verdict import Lead
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.judge.verdict import Cause, Growth, LeadKind

_TOKEN: Final = re.compile(r"[\w.]+|\S")
_ENDS: Final = frozenset("()[]{},=:")
"""tokens that end an argument; a change is shown as whole arguments"""
NO_EDITS: Final = Edits()
MAX_ARGUMENT_LENGTH: Final = 60
"""maximum number of characters of a changed argument; for a longer one the whole line is shown"""


def explain_growth(
    growth: Growth, edits: Edits = NO_EDITS
) -> tuple[tuple[Cause, ...], Lead | None]:
    """Return the causes of a growth and its lead; ``edits`` are those linked to the growth."""
    causes = growth_causes(growth.row, growth.old, growth.new, of_one_program=growth.of_one_program)
    lead = lead_of(causes, edits, growth.toolchain, growth=growth.row.difference or 0)
    return causes, lead


def lead_of(
    causes: Sequence[Cause],
    edits: Edits = NO_EDITS,
    toolchain: Lead | None = None,
    *,
    growth: int,
) -> Lead | None:
    """Return the lead of a growth; None if nothing is known about its cause.

    ``growth`` is the peak's, in bytes: a line that grew by more is shown with this amount.
    """
    if causes and causes[0].old_code and causes[0].site is not None:
        site = causes[0].site
        edit = Edit(site.path, site.line, causes[0].old_code, site.code)
        return _edit_lead(edit, edits)
    closest = edits.lines[0] if edits.lines else None
    if closest and (closest.grows or toolchain is None):
        return _edit_lead(closest, edits)
    if toolchain is not None or not causes:
        return toolchain
    cause = causes[0]
    words = f"{cause.category} {format_size(min(cause.nbytes, growth), signed=True)}"
    if cause.site is None or not cause.site.path:
        return Lead("category", ", ".join([words, *cause.reasons]), place=cause.category)
    place = site_name(cause.site)
    names = ", ".join(dict.fromkeys(keeper.name for keeper in cause.keepers))
    keepers = f", kept by {names}" if names else ""
    kind: LeadKind = "segment" if cause.category == SEGMENTS else "line"
    return Lead(kind, f"{words} at {place}{keepers}", cause.site.path, cause.site.line, place)


def _edit_lead(edit: Edit, edits: Edits) -> Lead:
    sentence = f"{edit.path}:{edit.line} {edit_words(edit.old, edit.new)}"
    if edits.number > 1:  # another edit may be the cause: gpumem blame finds out
        sentence += f" (the nearest of {edits.number} edits)"
    elif not edits.number:  # git may hide other edits, as in a shallow clone
        sentence += " (other edits are not known)"
    return Lead("edit", sentence, edit.path, edit.line, sentence)


def edit_words(old: str, new: str) -> str:
    """Describe a line's edit: "changed: 4096 -> 16384", "is new: x = f(x)"."""
    if not old:
        return f"is new: {new}"
    if not new:
        return f"is gone: {old}"
    # Find the tokens that differ between the lines.
    sides = list(_TOKEN.finditer(old)), list(_TOKEN.finditer(new))
    words = [[token[0] for token in side] for side in sides]
    shortest = min(map(len, words))
    first = next((i for i in range(shortest) if words[0][i] != words[1][i]), shortest)
    room = shortest - first
    last = next((i for i in range(room) if words[0][-1 - i] != words[1][-1 - i]), room)
    # Widen both ends to whole arguments: the added tokens are the same in both lines.
    starts = {side[first] for side in words if first < len(side) - last}
    while first and not starts & _ENDS and words[0][first - 1] not in _ENDS:
        first -= 1
    while last and words[0][-last] not in _ENDS:
        last -= 1
    stretches = []
    for code, tokens in zip((old, new), sides, strict=True):
        inner = tokens[first : len(tokens) - last]
        stretches.append(code[inner[0].start() : inner[-1].end()] if inner else "")
    old_argument, new_argument = (stretch.strip(", ") for stretch in stretches)
    if max(len(old_argument), len(new_argument)) > MAX_ARGUMENT_LENGTH:
        return f"changed: {old} -> {new}"
    if not old_argument:
        return f"changed: {new_argument} was added"
    if not new_argument:
        return f"changed: {old_argument} was removed"
    return f"changed: {old_argument} -> {new_argument}"
